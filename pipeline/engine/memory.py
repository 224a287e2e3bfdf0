"""How much memory KV caches may have."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

MOST_OF_AVAILABLE = 0.8
_MEMINFO = Path("/proc/meminfo")


def cache_bytes(wanted: int, models: int, meminfo: Path = _MEMINFO) -> int:
    """What is wanted for each of `models` caches, or their share of 80 % of what is available."""
    available = available_bytes(meminfo)
    return wanted if available is None else within(wanted, models, available)


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
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) << 10  # given in KiB
    return None
