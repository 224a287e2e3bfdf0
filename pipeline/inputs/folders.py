"""Finds the files that an input folder or a glob means."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from specbatch.pipeline.storage.object_store import explained
from specbatch.pipeline.storage.objects import files_below
from specbatch.schemas.errors import InputError

_SUFFIXES = {
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "jsonl": (".jsonl", ".jsonl.gz"),
    "openai": (".jsonl", ".jsonl.gz"),
    "openai-completions": (".jsonl", ".jsonl.gz"),
}
_NAMES = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", "jsonl": "JSONL"}
_FIRST = ("parquet", "jsonl")
_HIDING = ("_", ".")


def odd_kind(path: Path) -> str | None:
    """In words, what is at a path that is neither a file nor a folder; None: nothing, or one of
    these."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return None
    mode = path.stat().st_mode
    words = {
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    found = next((word for is_kind, word in words.items() if is_kind(mode)), None)
    return None if found is None else f"is {found}: name a file, which can be read again"


def wanted_suffixes(wanted_format: str) -> tuple[str, ...]:
    """The suffixes of a spec's `input.format`; of all formats for `auto`."""
    return _SUFFIXES.get(wanted_format) or tuple(dict.fromkeys(sum(_SUFFIXES.values(), ())))


def formats_of(uris: Iterable[str]) -> list[str]:
    """The formats of a folder with these files, by their suffixes and in a fixed order.

    Only Parquet and JSONL where there are any: CSV files beside them are notes more often than
    prompts.
    """
    given = list(uris)
    found = [kind for kind in _NAMES if any(uri.endswith(_SUFFIXES[kind]) for uri in given)]
    return [kind for kind in found if kind in _FIRST] or found


def in_words(formats: Iterable[str]) -> str:
    return " and ".join(_NAMES[kind] for kind in formats)


def format_of(uri: str) -> str | None:
    """The format that a file's suffix says, unless its contents decide (JSONL) or it says none."""
    return next((k for k in ("parquet", "arrow", "csv") if uri.endswith(_SUFFIXES[k])), None)


def is_hidden(name: str, pattern: str = "") -> bool:
    """Whether a file is hidden: Spark's `_SUCCESS`, temporary and dot files at any depth below the
    input folder, except those whose first character a glob's `pattern` names."""
    named = [part for part in pattern.split("/") if part.startswith(_HIDING)]
    return any(
        part.startswith(_HIDING) and not any(fnmatchcase(part, one) for one in named)
        for part in name.split("/")
    )


def is_glob(uri: str) -> bool:
    """Whether a uri looks like a glob. Files and folders with such names take precedence."""
    return any(sign in uri for sign in "*?[")


def split_glob(uri: str) -> tuple[str, str]:
    """The folder before a glob's first special character, with its slash, and the pattern."""
    root, slash, _ = re.split(r"[*?\[]", uri, maxsplit=1)[0].rpartition("/")
    root += slash
    return root, uri[len(root) :]


def local_files(folder: Path) -> list[Path]:
    """The files of a local input folder, sorted by name. Raises `ObjectError` for a subfolder
    without read permission, unless it is hidden."""
    found = files_below(folder, lambda name: not is_hidden(name))
    return sorted((path for path in found if not is_hidden(path.name)), key=str)


def local_matches(glob: str) -> list[Path]:
    """The local files that a glob matches, sorted by name. Raises `ObjectError` for a folder
    without read permission on its path, unless it is hidden."""
    root, pattern = split_glob(glob)
    _check_readable(Path(root), pattern)
    found = _found(Path(root), pattern)
    visible = (p for p in found if not is_hidden(p.relative_to(root).as_posix(), pattern))
    return sorted(visible, key=str)


def _found(root: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from root.glob(pattern)
    except ValueError as error:  # of Python 3.11 and 3.12: `**` beside other signs
        raise InputError(f"input {root / pattern} is not a glob: {error}") from None


def _check_readable(root: Path, pattern: str) -> None:
    """Raise for folders without read permission, which `Path.glob` silently skips."""
    parts = pattern.split("/")
    for depth, part in enumerate(parts):
        for folder in _passed(root, parts[:depth], pattern):
            with explained("list", str(folder)):
                if not folder.is_dir():
                    continue
                if is_glob(part):
                    os.scandir(folder).close()
                else:
                    (folder / part).exists()


def _passed(root: Path, parts: list[str], pattern: str) -> Iterator[Path]:
    if not parts:
        yield root
        return
    for path in _found(root, "/".join(parts)):
        if path == root or not is_hidden(path.relative_to(root).as_posix(), pattern):
            yield path
