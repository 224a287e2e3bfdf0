"""Every sentence that users may meet, with its place, to be read aloud.

    python -m specbatch.tools.messages >messages.txt

They are the texts of errors, log lines, remarks, help and field descriptions. Values in a sentence
are shown as the code that writes them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pipeline", "workers", "kernels", "schemas", "jobs", "migrations", "package")
SAYING = {
    *("remark", "complain", "say", "warning", "info", "error", "exception"),
    *("Option", "Argument", "Field", "_option"),
}


def sentences(file: Path) -> Iterator[tuple[int, str, str]]:
    """(line, what says it, the sentence) for all that has more than one word."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and _says(name := _name_of(node.func)):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if " " in (words := text_of(argument)):
                    yield node.lineno, name, words


def text_of(node: ast.expr) -> str:
    """A text as far as the source has it; empty for anything else."""
    match node:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=other):
            return f"<{text_of(body)} | {text_of(other)}>"
    return ""


def _says(name: str) -> bool:
    return name in SAYING or name.endswith("Error")


def _name_of(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def main() -> None:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for line, name, words in sorted(set(sentences(file))):
                print(f"{file.relative_to(ROOT)}:{line} {name}: {words}")


if __name__ == "__main__":
    main()
