"""The text every Python installation has: the standard library's own sources.

Nothing is downloaded, so the demo pair can be trained anywhere. This module knows which files
are read, which are held out, and where functions begin; it knows nothing of tokens or models.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HELD_OUT: tuple[str, ...] = (
    "_osx_support",
    "asyncio.locks",
    "asyncio.queues",
    "base64",
    "bz2",
    "calendar",
    "cmd",
    "code",
    "configparser",
    "contextlib",
    "csv",
    "difflib",
    "email.utils",
    "fileinput",
    "fractions",
    "functools",
    "gzip",
    "heapq",
    "importlib.util",
    "ipaddress",
    "lzma",
    "mimetypes",
    "pprint",
    "queue",
    "random",
    "sched",
    "selectors",
    "shlex",
    "statistics",
    "string",
    "tempfile",
    "textwrap",
    "timeit",
    "traceback",
    "unittest.result",
    "uuid",
    "wave",
    "wsgiref.headers",
    "xml.sax.handler",
)
"""Modules that training never sees; every prompt and every reported loss comes from them."""

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
"""Tests repeat the library's words, and installed packages differ from machine to machine."""

SKIPPED_PREFIXES = ("encodings/", "pydoc_data/", "config-", "_sysconfigdata")
"""Generated tables, and build settings that hold the paths of one machine."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a source file, by the text at which it starts."""

    name: str  # qualified inside its module
    start: int  # character offset of its first line: the first decorator, or the `def`
    head: str  # first line up to the first docstring line, or just the signature's lines
    documented: bool


def library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_name(relative: PurePosixPath) -> str:
    """`asyncio/locks.py` -> `asyncio.locks`; a package is named without `__init__`."""
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files(root: Path | None = None) -> dict[str, Path]:
    """Every source file that may be read, by module name, in a stable order."""
    root = root or library_root()
    relatives = sorted(PurePosixPath(p.relative_to(root).as_posix()) for p in root.rglob("*.py"))
    return {
        module_name(relative): root / relative
        for relative in relatives
        if not SKIPPED_FOLDERS & set(relative.parts)
        and not str(relative).startswith(SKIPPED_PREFIXES)
    }


def training_files(root: Path | None = None) -> dict[str, Path]:
    """What training reads: everything but the held-out modules."""
    return {name: path for name, path in source_files(root).items() if name not in HELD_OUT}


def held_out_files(root: Path | None = None) -> dict[str, Path]:
    """The held-out modules that this interpreter has."""
    return {name: path for name, path in source_files(root).items() if name in HELD_OUT}


def read(path: Path) -> str:
    """The file's text with tabs expanded; a byte that is not UTF-8 is replaced, never fatal."""
    return path.read_text(encoding="utf-8", errors="replace").expandtabs(8)


def functions(text: str) -> Iterator[Function]:
    """Every function of a source text in source order; a file that does not parse has none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = [line + "\n" for line in text.split("\n")]  # splitlines would cut at form feeds
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    for name, node in _walk(tree, ""):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        documented = ast.get_docstring(node, clean=False) is not None
        # With a docstring, its first line ends the head; else the line before the body does.
        last = node.body[0].lineno if documented else max(node.lineno, node.body[0].lineno - 1)
        head = "".join(lines[first:last]).rstrip()
        yield Function(name=name, start=offsets[first], head=head, documented=documented)


def _walk(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Depth first in source order, so that names and order never depend on the traversal."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        yield from _walk(child, inner)
