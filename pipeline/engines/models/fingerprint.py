"""Digests a model folder, part by part: see `schemas/fingerprint.py`. No torch.

A file is digested again only after it changed, which its inode, its size and both of its times
show. A file that was just changed is always digested again: its times may not show a second change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from specbatch.schemas.errors import ModelError
from specbatch.schemas.fingerprint import (
    CONFIG,
    GENERATION,
    NONE,
    PARTS,
    TEMPLATE,
    TOKENIZER,
    WEIGHTS,
    Fingerprint,
    short_digest,
)
from specbatch.schemas.spec import Weights

log = logging.getLogger(__name__)

_FILES = {
    WEIGHTS: ("*.safetensors", "*.safetensors.index.json"),
    CONFIG: ("config.json",),
    GENERATION: ("generation_config.json",),
    TOKENIZER: (
        *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    ),
    TEMPLATE: ("chat_template.*", "additional_chat_templates/*"),
}
_TOKENIZER_CONFIG = "tokenizer_config.json"  # of the tokenizer, but for the template inside
_YOUNG_NS = 2_000_000_000  # as coarse as times of files may be
_HASHERS = 4  # files at a time: more than disks give
_TRIES = 3  # snapshots of a folder that is being written

Loaded = TypeVar("Loaded")


class Stat(NamedTuple):
    """What changes when a file does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder at one moment. If two are equal, nothing changed between them."""

    fingerprint: Fingerprint
    stats: tuple[tuple[str, Stat], ...]


_digests: dict[Path, tuple[Stat, str]] = {}  # of files that were not young then
_reading = threading.Lock()  # one thread at a time reads files
_snapshots: dict[Path, Snapshot] = {}  # of folders none of whose files was young then


def _digests_of(files: Sequence[Path]) -> list[str]:
    """As they are now. Raises `OSError`."""
    with _reading, ThreadPoolExecutor(_HASHERS, "digest") as pool:
        return list(pool.map(_digest_of, files))


def _digest_of(path: Path) -> str:
    begun_ns, stat = time.time_ns(), stat_of(path)
    known = _digests.get(path)
    if known is not None and known[0] == stat:
        return known[1]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # lets other threads run
    if not _is_young(stat, begun_ns) and stat_of(path) == stat:
        _digests[path] = (stat, digest)
    return digest


def stat_of(path: Path) -> Stat:
    """Of what a link leads to."""
    found = path.stat()
    return Stat(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def snapshot_of(ref: str, path: Path) -> Snapshot:
    """Digest a folder's parts, or return the known digests if nothing changed.

    Raises `ModelError` where the folder is being written, or cannot be read.
    """
    for _ in range(_TRIES):
        try:
            begun_ns, files = time.time_ns(), _files(path)
            stats = _stats(path, files)
            known = _snapshots.get(path)
            if known is not None and known.stats == stats:
                return known
            snapshot = Snapshot(_fingerprint(path, files), stats)
            is_same = stats == _stats(path, _files(path))
        except FileNotFoundError:
            continue  # it was there when the folder was listed
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise ModelError(f"files of model `{ref}` cannot be read: {reason}") from None
        if is_same:
            if not any(_is_young(stat, begun_ns) for _, stat in stats):
                _snapshots[path] = snapshot
            return snapshot
    raise ModelError(f"files of model `{ref}` are being written: wait until that is done")


def unchanged(ref: str, path: Path, load: Callable[[], Loaded]) -> tuple[Snapshot, Loaded]:
    """Load a folder, and its snapshot, the same before and after: so `load` read that.

    Raises `ModelError` if the folder keeps changing.
    """
    before = snapshot_of(ref, path)
    for _ in range(_TRIES):
        loaded = load()
        after = snapshot_of(ref, path)
        if after == before:
            return after, loaded
        log.warning("files of model %s changed while they were loaded: loading again", ref)
        before = after
        del loaded  # two of them may not fit
    raise ModelError(
        f"files of model `{ref}` keep changing while they are loaded: wait until the copy is "
        "complete"
    )


def fingerprint_of(fingerprint: str, weights: Weights) -> str:
    """The fingerprint of a model whose folder has `fingerprint`, run with such weights."""
    if weights == "as-is":
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {weights}".encode()).hexdigest()


def beside_weights(path: Path) -> list[Path]:
    """A folder's files that count, but for its weights."""
    return [file for file, part in _files(path).items() if part != WEIGHTS]


def _files(path: Path) -> dict[Path, str]:
    """The files that count, in order, and the part that each belongs to."""
    found = {
        file: part
        for part, patterns in _FILES.items()
        for pattern in patterns
        for file in path.glob(pattern)
        if file.is_file()
    }
    return dict(sorted(found.items()))


def _stats(path: Path, files: Iterable[Path]) -> tuple[tuple[str, Stat], ...]:
    return tuple((str(file.relative_to(path)), stat_of(file)) for file in files)


def _is_young(stat: Stat, at_ns: int) -> bool:
    return any(abs(at_ns - time_ns) <= _YOUNG_NS for time_ns in (stat.mtime_ns, stat.ctime_ns))


def _fingerprint(path: Path, files: Mapping[Path, str]) -> Fingerprint:
    whole = [file for file in files if file.name != _TOKENIZER_CONFIG]
    lines: dict[str, list[str]] = {part: [] for part in PARTS}
    for file, digest in zip(whole, _digests_of(whole), strict=True):
        lines[files[file]].append(f"{file.relative_to(path)} {digest}")
    if len(whole) < len(files):
        for part, line in _tokenizer_config(path / _TOKENIZER_CONFIG).items():
            lines[part].append(line)
    return Fingerprint.of({part: _digest(of_part) for part, of_part in lines.items()})


def _tokenizer_config(file: Path) -> dict[str, str]:
    """What it says, by part. Its template is the template's, as if it lay in a file of its own."""
    raw = file.read_bytes()
    try:
        values = json.loads(raw)
        template = values.pop("chat_template", None)
    except (ValueError, AttributeError, RecursionError):
        return {TOKENIZER: f"{_TOKENIZER_CONFIG} {short_digest(raw)}"}
    lines = {TOKENIZER: f"{_TOKENIZER_CONFIG} {_of_json(values)}"}
    return lines if template is None else {**lines, TEMPLATE: f"inside {_of_json(template)}"}


def _of_json(values: object) -> str:
    return short_digest(json.dumps(values, sort_keys=True).encode())


def _digest(lines: Sequence[str]) -> str:
    return short_digest("\n".join(lines).encode()) if lines else NONE
