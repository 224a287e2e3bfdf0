"""Which files of an input folder, or of a glob, are meant."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl",), "openai": (".jsonl",)}
_ALL = (".parquet", ".jsonl")
_HIDING = ("_", ".")


def wanted_suffixes(wanted_format: str) -> tuple[str, ...]:
    """Of a spec's `input.format`."""
    return _SUFFIXES.get(wanted_format, _ALL)


def is_hidden(name: str, pattern: str = "") -> bool:
    """Spark's `_SUCCESS`, temporary and dot files, at any depth below the input folder; but for
    what a glob's `pattern` names by its first character."""
    named = [part for part in pattern.split("/") if part.startswith(_HIDING)]
    return any(
        part.startswith(_HIDING) and not any(fnmatchcase(part, one) for one in named)
        for part in name.split("/")
    )


def is_glob(uri: str) -> bool:
    """Whether it looks like one: files and folders may be called so too, and come first."""
    return any(sign in uri for sign in "*?[")


def split_glob(uri: str) -> tuple[str, str]:
    """The folder before a glob's first sign, with its slash, and the pattern below it."""
    root, slash, _ = re.split(r"[*?\[]", uri, maxsplit=1)[0].rpartition("/")
    root += slash
    return root, uri[len(root) :]


def local_matches(glob: str) -> list[Path]:
    """What a glob finds here, in order of name."""
    root, pattern = split_glob(glob)
    found = Path(root).glob(pattern)
    visible = (p for p in found if not is_hidden(p.relative_to(root).as_posix(), pattern))
    return sorted(visible, key=str)
