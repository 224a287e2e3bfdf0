"""Which files of an input folder are meant."""

from __future__ import annotations

_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl",), "openai": (".jsonl",)}
_ALL = (".parquet", ".jsonl")


def wanted_suffixes(wanted_format: str) -> tuple[str, ...]:
    """Of a spec's `input.format`."""
    return _SUFFIXES.get(wanted_format, _ALL)


def is_hidden(name: str) -> bool:
    """Spark's `_SUCCESS`, temporary and dot files, at any depth below the input folder."""
    return any(part.startswith(("_", ".")) for part in name.split("/"))
