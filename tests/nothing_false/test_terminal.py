"""Whatever rows, names, paths and errors hold: a terminal shows it, and obeys none of it."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from support import forks
from support.models import TinyPair
from support.workers import BIN

TITLE, FLIP = "\x1b]0;owned\x07", "\u202egpj.exe\u2066"
EVIL = f"{TITLE}\x9b2J\x7f{FLIP}\u200f[bold]x[/bold][link=https://evil.example]y[/link]"
OBEYED = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# What our own styles and bars send to a terminal: colours, moves, lines erased, the cursor hidden.
STYLES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[[0-9]*[AKGJ]|\x1b\[\?25[lh]|\x1b\[\?1049[lh]|\x1b\[H")
KINDS = ("completions", "tokens", "costs", "time")


@dataclass(frozen=True)
class Place:
    """A folder with a job that holds such things."""

    folder: Path
    model: Path
    job: str
    said: str  # by the command that submitted it

    @property
    def environment(self) -> dict[str, str]:
        return {"SPECBATCH_WORKSPACE": str(self.folder / f"data{EVIL}")}

    def says(self, *arguments: str) -> str:
        """Both streams, as they were written; the command may fail, and not by a bug."""
        done = forks.run(
            *("specbatch", *arguments), environment=self.environment, cwd=self.folder, timeout=240
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def shows(self, *arguments: str) -> str:
        """What a terminal gets, without our own styles."""
        mine, its = pty.openpty()
        process = subprocess.Popen(
            [str(BIN / "specbatch"), *arguments],
            env=os.environ | self.environment | {"TERM": "xterm-256color", "COLUMNS": "100"},
            cwd=self.folder, stdin=its, stdout=its, stderr=its,
        )  # fmt: skip
        os.close(its)
        said = b"".join(read_all(mine))
        os.close(mine)
        process.wait(240)
        return STYLES.sub("", said.decode().replace("\r\n", "\n").replace("\r", ""))


def read_all(descriptor: int) -> Iterator[bytes]:
    with suppress(OSError):  # how a terminal says that nobody writes to it any more
        while data := os.read(descriptor, 1 << 16):
            yield data


def rows() -> Iterator[dict[str, object]]:
    for number in range(4):
        yield {"id": f"r{number}{EVIL}", "prompt": f"say {EVIL}", "tag": f"t{EVIL}"}
    yield {"id": f"r0{EVIL}", "prompt": "the same id once more"}
    yield {"id": f"long{EVIL}", "prompt": "w " * 4000}
    yield {"id": f"odd{EVIL}", "prompt": "x", "temperature": f"hot{EVIL}"}
    yield {"id": f"line\nerror: forged{EVIL}", "messages": [{"role": EVIL, "content": "x"}]}


@pytest.fixture(scope="module")
def place(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("terminal")
    model = folder / f"model{TITLE}{FLIP}[bold]"
    shutil.copytree(tiny_pair.verifier, model)
    source = folder / f"in{TITLE}{FLIP}[bold].jsonl"
    source.write_bytes(b"\n".join(map(orjson.dumps, rows())))
    made = Place(folder, model, "", "")
    done = forks.run(
        "specbatch", "submit-job", "--local", "--json", "--input", str(source),
        "--output", f"out{TITLE}{FLIP}[bold]", "--max-tokens", "4", "--verifier", str(model),
        environment=made.environment, cwd=folder, timeout=240,
    )  # fmt: skip
    assert done.stdout.strip(), done.stderr
    job = json.loads(done.stdout.strip().splitlines()[-1])["job"]
    return Place(folder, model, job, done.stdout + done.stderr)


def commands(place: Place) -> Iterator[tuple[str, ...]]:
    job = place.job
    yield from [("jobs",), ("jobs", "--json"), ("show", job), ("show", job, "--json")]
    yield from [("top", "--once"), ("top", "--json"), ("settings",), ("schedules",)]
    yield from [("cost", job), ("cost", job, "--json"), ("retry", job), ("retry", f"no{EVIL}")]
    yield from [("audit", job, "--sample", "50%"), ("audit", job, "--sample", "0", "--json")]
    yield from [("replay", f"{job}/0"), ("cancel", job), ("show", f"job{EVIL}")]
    yield from (
        ("export", job, "--what", kind, "--to", f"{kind}{TITLE}{FLIP}.parquet") for kind in KINDS
    )
    yield ("report", job, "--output", f"report{TITLE}{FLIP}.html")
    yield ("purge", "--job", job, "--dry-run")
    source = str(next(place.folder.glob("in*")))
    order = ("--verifier", str(place.model), "--max-tokens", "4")
    yield ("submit-job", "--input", source, "--output", "plan", *order, "--dry-run")
    yield ("submit-job", "--input", f"none{TITLE}{FLIP}[bold]", "--output", "o", *order, "--local")
    missing = ("--verifier", f"none{TITLE}{FLIP}[bold]")
    yield ("submit-job", "--input", source, "--output", "o", *missing, "--local")
    yield ("submit-job", "--input", source, "--output", "again", *order, "--local", "--name", EVIL)


def test_a_submission_prints_nothing_that_a_terminal_obeys(place: Place) -> None:
    assert OBEYED.findall(place.said) == []


def test_no_command_prints_what_a_terminal_obeys(place: Place) -> None:
    found = {arguments: place.says(*arguments) for arguments in commands(place)}
    assert {
        words: OBEYED.findall(said) for words, said in found.items() if OBEYED.search(said)
    } == {}
    assert not [words for words, said in found.items() if "Usage:" in said]
    shown = found["show", place.job]
    assert "\\x1b]0;owned\\x07" in shown, "it is shown, escaped"
    assert "[link=https://evil.example]y[/link]" in shown, "and is no markup"
    assert not [line for line in shown.splitlines() if line.startswith("error: forged")]


@pytest.mark.parametrize("arguments", [("jobs", "--limit", EVIL), (f"no{EVIL}",)])
def test_what_was_typed_is_no_exception(place: Place, arguments: tuple[str, ...]) -> None:
    said = place.says(*arguments)
    assert "Usage" in said
    assert OBEYED.findall(said) == []


def test_json_is_json_and_means_what_the_rows_hold(place: Place) -> None:
    said = place.says("export", place.job, "--what", "completions", "--to", "a.parquet", "--json")
    assert json.loads(said.splitlines()[-1])["rows"] >= 4
    kept = pq.read_table(place.folder / "a.parquet").to_pylist()
    assert {row["row_id"] for row in kept} >= {f"r{n}{EVIL}" for n in range(1, 4)}
    assert not OBEYED.search(place.says("show", place.job, "--json"))


def test_a_terminal_gets_no_sequences_but_our_styles(place: Place) -> None:
    source = str(next(place.folder.glob("in*")))
    order = ("--verifier", str(place.model), "--max-tokens", "4", "--output", f"pty{FLIP}")
    for arguments in (
        ("show", place.job),
        ("top", "--once"),
        ("audit", place.job, "--sample", "0"),
        ("submit-job", "--input", source, *order, "--local"),
        ("show", f"job{EVIL}"),
    ):
        said = place.shows(*arguments)
        assert said.strip(), arguments
        assert OBEYED.findall(said) == [], (arguments, said)


def test_a_report_shows_no_text_in_another_order(place: Place) -> None:
    place.says("report", place.job, "--output", "r.html")
    assert not OBEYED.search((place.folder / "r.html").read_text())


def test_logs_as_text_and_as_json_hold_none_of_it(place: Place) -> None:
    source = str(next(place.folder.glob("in*")))
    broken = place.folder / f"broken{TITLE}{FLIP}"
    shutil.copytree(place.model, broken, dirs_exist_ok=True)
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    order = ("--verifier", str(broken), "--input", source, "--output", "b", "--local")
    for form in ("text", "json"):
        done = forks.run(
            *("specbatch", "submit-job", *order),
            environment=place.environment | {"SPECBATCH_LOG_FORMAT": form},
            cwd=place.folder, timeout=240,
        )  # fmt: skip
        assert done.returncode != 0
        assert "owned" in done.stderr
        assert not OBEYED.search(done.stdout + done.stderr), form
