"""The product's source tree, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONT = "package"  # the file of the import package itself: its folder is `specbatch` elsewhere
ROOMS = ("schemas", "kernels", "pipeline", "workers", "jobs", "migrations", FRONT)
NOT_SHIPPED = ("benchmarks", "tools")  # importable from a checkout only


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and the line that imports it."""

    target: str
    line: int
    level: int  # dots of a relative import


@dataclass(frozen=True)
class Module:
    """One source file of ours. Its name is the import name without `specbatch.`."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, also inside functions and under TYPE_CHECKING."""
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, 0)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    target = _as_module(node.module or "", alias.name)
                    yield Import(target, node.lineno, node.level)
            elif _is_import_call(node):
                yield Import(node.args[0].value, node.lineno, 0)  # type: ignore[attr-defined]  # checked by _is_import_call

    def at(self, line: int) -> str:
        """`path:line`, for messages."""
        return f"{self.path.relative_to(ROOT)}:{line}"


@cache
def modules(*rooms: str) -> tuple[Module, ...]:
    """Every Python file of the rooms (all of them by default, also those not in the wheel)."""
    found = []
    for room in rooms or (*ROOMS, *NOT_SHIPPED):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(_module(".".join(p for p in parts if p != "__init__"), path))
    return tuple(found)


@cache  # many tests read the same files, and each is parsed once
def _module(name: str, path: Path) -> Module:
    return Module(name, path)


def is_inside(name: str, package: str) -> bool:
    """Whether a dotted name is the package or in it."""
    return name == package or name.startswith(package + ".")


def _as_module(base: str, name: str) -> str:
    """`from base import name`: the module `base.name` if that is one of ours, else `base`."""
    folder = ROOT.joinpath(*base.split(".")[1:])
    if not is_inside(base, "specbatch"):
        return base
    return f"{base}.{name}" if _is_module(folder / name) or base == "specbatch" else base


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def _is_import_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", ""))
        in ("import_module", "__import__")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )
