"""Which ids were seen before, over an input of any length.

64-bit BLAKE2b hashes in a few sorted runs that are merged as they grow: 8 bytes per id at rest,
16 while the largest merge runs. Two different ids collide with probability n²/2⁶⁵ (3·10⁻⁸ for a
million ids); the second would then be refused as a duplicate, never silently mixed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


class IdSet:
    """Add ids in order and learn which of them were there already."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []  # sorted, each more than twice as long as the next

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, ids: Sequence[str]) -> list[bool]:
        """Add ids; True for each that was in the set, or earlier in `ids`."""
        if not ids:
            return []
        hashes = _hashes(ids)
        seen = np.ones(len(hashes), dtype=bool)
        unique, first = np.unique(hashes, return_index=True)
        known = np.zeros(len(unique), dtype=bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            known |= run[at] == unique
        seen[first[~known]] = False
        if not known.all():
            self._append(unique[~known])
        return [bool(flag) for flag in seen]

    def _append(self, run: Hashes) -> None:
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last, previous = self._runs.pop(), self._runs.pop()
            merged = np.concatenate([previous, last])
            merged.sort()
            self._runs.append(merged)


def _hashes(ids: Sequence[str]) -> Hashes:
    digests = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
