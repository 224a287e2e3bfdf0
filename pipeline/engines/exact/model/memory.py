"""Sizes KV caches, and predicts the memory an engine will hold."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from specbatch.pipeline.engines.state.kv_blocks import BlockManager
from specbatch.schemas.errors import NoEngineError

log = logging.getLogger(__name__)

MOST_OF_AVAILABLE = 0.8
DEFAULT_CACHE = 1 << 30  # of one model on a processor
LEAST_CACHE = 16 << 20  # of one model, beside other engines; the least that may be set
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes a model or an engine holds when its caches are full, computed before its first step."""

    weights: int
    kv_cache: int
    workspace: int  # activations and logits of the largest pass
    cache_tokens: int  # not bytes: what the roomiest cache has room for
    process: int = 0  # on a processor: interpreter, libraries, and what other engines hold

    @property
    def total(self) -> int:
        return self.process + self.weights + self.kv_cache + self.workspace

    def __str__(self) -> str:
        parts = ("process", "weights", "kv_cache", "workspace")
        sizes = ", ".join(f"{p.replace('_', ' ')} {getattr(self, p) >> 20}" for p in parts)
        return f"{self.total >> 20} MiB ({sizes})"


def budget_of(models: Sequence[MemoryBudget], on_processor: bool) -> MemoryBudget:
    """The budget of an engine whose models are loaded but have not run yet.

    Frees what loading left behind first. Caches are not resident yet: the system allocates their
    pages on first use.
    """
    weights = sum(m.weights for m in models)
    give_back_freed()
    process = 0
    if on_processor:
        process = max(0, (resident_bytes() or 0) - weights)
    return MemoryBudget(
        weights=weights,
        kv_cache=sum(m.kv_cache for m in models),
        workspace=sum(m.workspace for m in models),
        cache_tokens=max(m.cache_tokens for m in models),
        process=process,
    )


def resident_bytes(status: Path = _STATUS) -> int | None:
    """Resident memory of this process; None where the system does not report it."""
    return _kib(status, "VmRSS")


def give_back_freed() -> None:
    """Collect garbage and return the allocator's free pages to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others need not
    if trim is not None:
        trim(0)


_had_engine = threading.Event()  # this process; a whole collection takes half a second


def free_for_another(on_gpu: bool) -> None:
    """Free the memory of a dropped engine before another one replaces it. Does nothing before the
    first engine of a process."""
    if not _had_engine.is_set():
        _had_engine.set()
        return
    give_back_freed()
    if on_gpu:
        import torch

        torch.cuda.empty_cache()  # what the allocator keeps does not count as free


class Promises:
    """What KV caches of this process on a processor may still grow by. Thread-safe.

    The system allocates a cache's pages when they are written to, so part of what it reports as
    available is already promised to caches that are not full.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[BlockManager, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def make(self, blocks: BlockManager, block_bytes: int) -> None:
        """The promise lasts as long as the blocks exist."""
        with self._lock:
            self._made[blocks] = block_bytes

    @property
    def outstanding(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(size * blocks.untouched for blocks, size in self._made.items())


PROMISES = Promises()  # of this process: the memory is the process's too


def cache_bytes(
    wanted: int, models: int, meminfo: Path = _MEMINFO, promises: Promises = PROMISES
) -> int:
    """What is wanted for each of `models` caches of an engine, or their share of 80 % of what is
    available and not promised to other engines.

    Raises `NoEngineError` where those have nearly all of it.
    """
    available = available_bytes(meminfo)
    if available is None:
        return wanted
    promised = promises.outstanding
    size = within(wanted, models, max(0, available - promised))
    if promised and size < min(wanted, LEAST_CACHE):
        raise NoEngineError(
            f"not enough memory for another engine in this process: {available >> 20} MiB are "
            f"available, and {promised >> 20} MiB of them are promised to KV caches of its other "
            "engines; lower SPECBATCH_KV_CACHE_MIB, or start a separate worker for such jobs"
        )
    return size


def gpu_caches(wanted: int | None, token_bytes: Sequence[int], free: int) -> list[int]:
    """Bytes of the cache of each model, of which a token takes so many, on a GPU with `free` ones.

    What is wanted for each; without that, four fifths of what is free for all of them together, so
    that all have room for as many tokens.
    """
    if wanted is not None:
        return [within(wanted, len(token_bytes), free)] * len(token_bytes)
    most = int(free * MOST_OF_AVAILABLE)
    return [most * size // sum(token_bytes) for size in token_bytes]


def within(wanted: int, models: int, available: int) -> int:
    """What is wanted, or a cache's share of 80 % of the available bytes, with a warning."""
    most = int(available * MOST_OF_AVAILABLE) // models
    if wanted > most:
        log.warning(
            "KV cache of %d MiB instead of %d: only %d MiB of memory are available",
            *(size >> 20 for size in (most, wanted, available)),
        )
    return min(wanted, most)


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """What new allocations can use without swapping; None where the system does not say."""
    return _kib(meminfo, "MemAvailable")


def _kib(path: Path, wanted: str) -> int | None:
    """A line's amount, which is given in KiB, in bytes."""
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == wanted:
            return int(amount.split()[0]) << 10
    return None
