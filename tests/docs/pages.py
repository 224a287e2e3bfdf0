"""The pages as they are written, taken apart: blocks, and the shell commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from docs.elsewhere import ELSEWHERE as PROGRAMS_ELSEWHERE

from specbatch.tools.site.navigation import flat, nav_of
from support.tree import ROOT

DOCS = ROOT / "docs"
SHELL = ("sh", "bash", "shell", "zsh")  # run by a test, but for what `elsewhere.py` names
ELSEWHERE = ("console",)  # not run: every command must be one that `elsewhere.py` names
PROGRAMS = (  # of indented blocks
    *("specbatch", "submit-job", "export", "python", "python3"),
    *PROGRAMS_ELSEWHERE,
)
GOES_ON = ("\\", "|", "&&")  # at the end of a line
PYTHON = "python"
PRINTED = "text"  # directly under a block of commands or of Python: what it prints

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?:\{ *\.)?(?P<language>[\w+-]*)")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True)
class Block:
    """A fenced block, or an indented one of commands; `printed`: what the page shows under it."""

    page: str
    line: int
    language: str
    text: str
    printed: str = ""

    @property
    def where(self) -> str:
        return f"docs/{self.page}:{self.line}"


def written_pages() -> list[str]:
    """Paths of all pages in `docs/`, in the order of the navigation, unnamed ones last."""
    paths = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    order = flat(nav_of(paths))
    return sorted(paths, key=lambda path: order.index(path) if path in order else len(order))


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """All of them, in order."""
    lines = (text if text is not None else (DOCS / page).read_text()).splitlines()
    found: list[Block] = []
    ends: list[int] = []
    number = 0
    while number < len(lines):
        begin = _FENCE.match(lines[number])
        if begin is None:
            inner = _indented(lines, number)
            if inner and program_of(inner[0].removeprefix("$ ")) in PROGRAMS:
                found.append(Block(page, number + 1, SHELL[0], "\n".join(inner)))
                number += len(inner)
                ends.append(number)
            else:
                number += 1
            continue
        indent, inner, first = len(begin["indent"]), [], number
        number += 1
        while not lines[number].strip().startswith(begin["marks"]):
            inner.append(lines[number][indent:])
            number += 1
        block = Block(page, first + 1, begin["language"], "\n".join(inner))
        above = "".join(lines[ends[-1] : first]).strip() if ends else "?"
        if block.language == PRINTED and not above and found[-1].language in (*SHELL, PYTHON):
            over = found.pop()
            block = Block(page, over.line, over.language, over.text, block.text)
            ends.pop()
        found.append(block)
        number += 1
        ends.append(number)
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, each with its continued lines and documents."""
    return list(_split(block.text.splitlines()))


def program_of(command: str) -> str:
    """`specbatch` of `A=b specbatch jobs`."""
    words = [w for w in command.split() if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    return words[0] if words else "="


def _indented(lines: list[str], number: int) -> list[str]:
    """The lines that are set apart by four spaces and begin here, if some do."""
    if number and lines[number - 1].strip():
        return []
    inner = []
    while number < len(lines) and lines[number].startswith("    "):
        inner.append(lines[number][4:])
        number += 1
    return inner


def _split(lines: list[str]) -> Iterator[str]:
    held: list[str] = []
    until: str | None = None
    for line in lines:
        plain = line.removeprefix("$ ") if not held else line
        if not held and (not plain.strip() or plain.lstrip().startswith("#")):
            continue
        held.append(plain)
        if until is not None:
            if line.strip() == until:
                yield "\n".join(held)
                held, until = [], None
            continue
        if document := _HEREDOC.search(plain):
            until = document[1]
        elif not plain.rstrip().endswith(GOES_ON) and not _is_open("\n".join(held)):
            yield "\n".join(held)
            held = []
    assert not held, f"a command does not end: {held}"


def _is_open(text: str) -> bool:
    """Whether a quotation goes on behind the text."""
    quote = ""
    escaped = False
    for sign in text:
        if escaped:
            escaped = False
        elif sign == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
    return bool(quote)


def all_blocks() -> list[Block]:
    """Of every page that is written, made ones have none."""
    return [block for page in written_pages() for block in blocks_of(page)]
