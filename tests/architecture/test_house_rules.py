"""Rules every file of the product keeps, so that reviews need not repeat them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.tree import FRONT, NOT_SHIPPED, ROOMS, ROOT, is_inside, modules

MOST_LINES = 800
# A code in brackets or after the colon, then some words.
EXPLAINED = re.compile(
    r"type: ignore\[[a-z, -]+\]\s+#\s*\w+.*\w|noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*\s+\W*\w+.*\w"
)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_pyproject_lists_every_room_and_no_other() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    inside = {f"specbatch/{room}": room for room in ROOMS if room != FRONT}
    own = {f"specbatch/{name}": f"{FRONT}/{name}" for name in ("__init__.py", "py.typed")}
    assert tool["wheel"]["packages"] == own | inside


def test_every_package_but_kernels_has_an_init() -> None:
    folders = {module.path.parent for module in modules()} - {ROOT / "kernels"}
    assert [f for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_inits_of_rooms_do_no_work() -> None:
    for room in ROOMS:
        path = ROOT / room / "__init__.py"
        if path.is_file() and room != FRONT:
            body = ast.parse(path.read_text()).body
            assert all(isinstance(getattr(node, "value", None), ast.Constant) for node in body), (
                f"{room}/__init__.py holds more than its docstring"
            )


def test_no_process_of_ours_imports_modules_of_the_current_folder() -> None:
    """What lies there is not ours, and these processes get passwords."""
    wrong = [
        module.at(node.lineno)
        for module in modules(*ROOMS)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.List | ast.Tuple)
        for words in [[getattr(word, "value", None) for word in node.elts]]
        for before, word in zip([None, *words], words, strict=False)
        if word in ("-m", "-c") and before != "-P"
    ]
    assert not wrong, f"start Python with -P: {wrong}"


def test_only_commands_print() -> None:
    wrong = [
        module.at(node.lineno)
        for module in modules()
        if not any(is_inside(module.name, room) for room in ("jobs", *NOT_SHIPPED))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    ]
    assert not wrong, f"log instead of printing: {wrong}"


def test_every_ignored_finding_names_its_code_and_reason() -> None:
    files = [module.path for module in modules()] + sorted((ROOT / "tests").rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line, comment in comments(path)
        if re.search(r"#\s*(type:\s*ignore|(ruff: )?noqa)", comment)
        and not EXPLAINED.search(comment)
    ]
    assert not wrong, f"write `# noqa: CODE - reason` or `# type: ignore[code]  # reason`: {wrong}"


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {m.at(1): len(m.path.read_text().splitlines()) for m in modules()}
    long = {where: lines for where, lines in lengths.items() if lines > MOST_LINES}
    assert not long, f"split these (more than {MOST_LINES} lines): {long}"
