"""Every command of every page is run, and prints what its page shows."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
import yaml
from docs.elsewhere import (
    AFTER,
    BESIDE,
    ELSEWHERE,
    EXIT_CODES,
    FILES,
    SHARED,
    SHARED_JOB,
    SHARED_PAGES,
)
from docs.pages import ELSEWHERE as NOT_RUN
from docs.pages import (
    PRINTED,
    PYTHON,
    SHELL,
    Block,
    all_blocks,
    blocks_of,
    commands_of,
    program_of,
    written_pages,
)
from docs.printed import missing, plain
from docs.session import Session

from specbatch.jobs.cli.main import app
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from support.tree import ROOT

OTHER_LANGUAGES = ("", PYTHON, "yaml", "ini", "json", "sql", "promql", "toml", PRINTED)
FIRST = "tutorial.md"  # makes the folder and the job that the other pages use

_looked: set[str] = set()  # commands of pages about the same store
_ran: dict[str, list[str]] = {}  # page: its commands that were run


def is_elsewhere(block: Block, command: str) -> bool:
    program = program_of(command)
    if program in BESIDE:
        return any(program_of(other) in ELSEWHERE for other in commands_of(block))
    return program in ELSEWHERE


@pytest.fixture(scope="module")
def shared(session: Session, night: Path) -> Mapping[str, str]:
    """The environment of who looks after workers of many machines: that of the nightly S3 job."""
    if SHARED_JOB not in _ran:
        run_page(session, SHARED_JOB, night)
    settings = {name: text.format(**session.values) for name, text in SHARED.items()}
    session.begin(night)
    session.environment |= settings
    listed = session.run("specbatch jobs --state done --limit 1 --json")
    return settings | {"JOB": orjson.loads(listed.printed.splitlines()[-1])[0]["job"]}


def needs_elsewhere(block: Block) -> bool:
    """Whether Python imports what is only in an environment of its own."""
    imported = re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)
    return any(module in ELSEWHERE for module in imported)


def pages_with_commands() -> list[str]:
    return list(dict.fromkeys(b.page for b in all_blocks() if b.language in (*SHELL, PYTHON)))


@pytest.fixture(scope="module")
def night(session: Session) -> Path:
    """The tutorial, read to its end: its folder, with its job in it."""
    run_page(session, FIRST, session.folder)
    session.base |= {"JOB": session.environment["JOB"]}
    return session.cwd


Read = Callable[[str], None]


@pytest.fixture
def read(session: Session, night: Path, request: pytest.FixtureRequest) -> Read:
    """Runs a page, unless it was run before."""

    def run(page: str) -> None:
        if page in AFTER:
            run(AFTER[page])
        more = request.getfixturevalue("shared") if page.startswith(SHARED_PAGES) else {}
        if page not in _ran:
            run_page(session, page, night, more)

    return run


@pytest.mark.parametrize("page", pages_with_commands())
def test_a_page_s_commands_do_what_it_shows(read: Read, page: str) -> None:
    read(page)
    assert page in _ran


def run_page(session: Session, page: str, cwd: Path, more: Mapping[str, str] | None = None) -> None:
    session.begin(cwd)
    session.environment |= more or {}
    done = _ran.setdefault(page, [])
    try:
        for block in blocks_of(page):
            if block.language == "yaml" and page in FILES and not done:
                path = cwd / FILES[page]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            elif block.language == PYTHON and not needs_elsewhere(block):
                compare(block, session.python(block.text).printed)
            elif block.language in SHELL:
                done += run_block(session, block)
    finally:
        session.end()


def run_block(session: Session, block: Block) -> list[str]:
    printed = ""
    done = []
    for command in commands_of(block):
        if is_elsewhere(block, command):
            continue
        if block.page.startswith(SHARED_PAGES) and command in _looked:
            done.append(command)  # the same look at the same store, on another page
            continue
        ran = session.run(command)
        wanted = exit_code(block.page, command)
        assert ran.code == wanted, f"{block.where}: {command}\nexit code {ran.code}\n{ran.printed}"
        printed += ran.printed
        done.append(command)
        if block.page.startswith(SHARED_PAGES):
            _looked.add(command)
    compare(block, printed)
    return done


def exit_code(page: str, command: str) -> int:
    """What the page says that a command ends with: one that begins so, or is of the program."""
    said = {begin: code for (where, begin), code in EXIT_CODES.items() if where == page}
    program = said.get(program_of(command), 0)
    return next((code for begin, code in said.items() if command.startswith(begin)), program)


def compare(block: Block, printed: str) -> None:
    lost = missing(block.printed, printed)
    assert not lost, f"{block.where} shows {lost}, printed was:\n{printed}"


def test_what_python_prints_is_shown() -> None:
    """So that a block cannot print what its page does not mean."""
    printing = [b for b in all_blocks() if b.language == PYTHON and "print(" in b.text]
    assert len(printing) > 3
    assert [b.where for b in printing if not needs_elsewhere(b) and not b.printed] == []


def test_no_command_can_fail_unseen() -> None:
    """`pipefail` does not see what `<(...)` runs: two of them that fail are equal."""
    commands = [(b, c) for b in all_blocks() if b.language in SHELL for c in commands_of(b)]
    assert commands
    hiding = [f"{b.where}: {c}" for b, c in commands if re.search(r"[<>]\(|\|\| *(true|:)", c)]
    assert hiding == []


def test_no_command_is_untested(read: Read) -> None:
    """What the pages have is counted against what was run."""
    for page in pages_with_commands():
        read(page)
    untested, elsewhere, tested = [], 0, 0
    for block in all_blocks():
        for command in commands_of(block) if block.language in (*SHELL, *NOT_RUN) else ():
            if is_elsewhere(block, command):
                elsewhere += 1
            elif block.language in SHELL and command in _ran.get(block.page, ()):
                tested += 1
            else:
                untested.append(f"{block.where}: {command}")
    print(f"\npages: {len(written_pages())}, commands run: {tested}, elsewhere: {elsewhere}, "
          f"untested commands: {len(untested)}")  # fmt: skip
    assert not untested
    assert tested > 30


def test_a_block_is_of_a_language_that_some_test_knows() -> None:
    known = (*SHELL, *NOT_RUN, *OTHER_LANGUAGES)
    assert [b.where for b in all_blocks() if b.language not in known] == []


def test_what_is_not_run_says_why_and_is_held_by_something_else() -> None:
    used = {program_of(c) for b in all_blocks() if b.language in (*SHELL, *NOT_RUN)
            for c in commands_of(b)}  # fmt: skip
    for block in (b for b in all_blocks() if b.language == PYTHON and needs_elsewhere(b)):
        compile(block.text, block.where, "exec")
        used |= set(re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE))
    for program, why in ELSEWHERE.items():
        path, _, name = why.held_by.partition("::")
        assert why.reason
        if program in used:
            assert (ROOT / path).exists(), f"{program}: {path} is not there"
            last = name.rpartition(".")[2]
            assert not name or f"def {last}" in (ROOT / path).read_text()


def test_targets_of_make_are_there_and_do_what_is_said() -> None:
    commands = [c for b in all_blocks() for c in commands_of(b)
                if b.language in (*SHELL, *NOT_RUN) and program_of(c) == "make"]  # fmt: skip
    targets = {command.split()[1] for command in commands}
    assert "demo" in targets
    for target in targets:
        # Started by make itself, it would also say which directory it enters.
        command = ["make", "--no-print-directory", "-n", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if target == "demo":
            assert done.stdout.strip().endswith(".venv/bin/specbatch demo")


def test_specs_of_the_pages_are_specs() -> None:
    found = 0
    least: Mapping[str, Any] = {
        "input": {"uri": "a"}, "output": {"uri": "b"}, "verifier": "c", "proposer": "d",
    }  # fmt: skip
    for block in all_blocks():
        documents = re.findall(r"\.yaml <<'END'\n(.*?)^END$", block.text, re.MULTILINE | re.DOTALL)
        for text in (*documents, *([block.text] if block.language == "yaml" else [])):
            values = yaml.safe_load(text)
            if isinstance(values, dict) and set(values) <= set(JobSpec.model_fields):
                load_spec({**least, **values})
                found += 1
    assert found > 2


def test_settings_of_the_pages_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"SPECBATCH_{name.upper()}" for name in Settings.model_fields}
    known |= {"SPECBATCH_SETTINGS", "SPECBATCH_NATIVE", "SPECBATCH_NATIVE_ISA"}
    for page in written_pages():
        named = set(re.findall(r"SPECBATCH_[A-Z0-9_]+\b", (ROOT / "docs" / page).read_text()))
        assert not named - known, f"docs/{page}: {named - known}"
    for block in all_blocks():
        if block.language == "ini":
            for name in [name for name in os.environ if name.startswith("SPECBATCH_")]:
                monkeypatch.delenv(name)
            for name, value in re.findall(r"^(SPECBATCH_\w+)=(.*)$", block.text, re.MULTILINE):
                monkeypatch.setenv(name, value)
            Settings()


def test_commands_that_the_text_names_exist_with_their_options() -> None:
    commands: dict[str, Any] = dict(vars(typer.main.get_command(app))["commands"])
    wrong = []
    for page in written_pages():
        text = (ROOT / "docs" / page).read_text()
        for words in re.findall(r"`((?:specbatch|submit-job)(?: [^`]*)?)`", text):
            name, *rest = words.split()
            if name == "specbatch":
                name = rest.pop(0) if rest and rest[0][0].isalpha() else ""
            if name and name not in commands:
                wrong.append(f"docs/{page}: {words}")
                continue
            params = commands[name].params if name else []
            flags = {flag for p in params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
            wrong += [f"docs/{page}: {words}: {word}" for word in rest
                      if word.startswith("--") and word.partition("=")[0] not in flags]  # fmt: skip
    assert not wrong


def test_lines_are_compared_without_their_figures() -> None:
    shown = "│ tokens │ 16,384 (9,918 per second) │\n…\noutput: …/night"
    assert missing(shown, "│ tokens  │ 2,048 (1 per second) │\nx\noutput: /a/b/night\n") == []
    assert missing(shown, "│ tokens │ none │\noutput: /a/night") == [shown.splitlines()[0]]
    assert missing("b\na", "a\nb") == ["a"]
    assert plain("job 8c1d3a5e7f90b2c4 took -$0.5") == "job ID took #"
