"""Compares a small and a large job whose rows come in opposite orders; prints peaks in MiB.

python comparing_memory.py ROWS
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator

from specbatch.pipeline.operations.comparing import compare
from specbatch.pipeline.outputs.rows import ComparedRow

TOKENS = 250


def rows(numbers: Iterable[int]) -> Iterator[ComparedRow]:
    """Completions of 1 kB of token ids and as much text."""
    for number in numbers:
        tokens = number.to_bytes(4, "little") * TOKENS
        yield ComparedRow(
            f"row-{number}", number, 0, f"{number:08d}" * 125, tokens, "stop", None, None
        )


def peak_mib(count: int) -> float:
    """The process's peak after a comparison in which half of the rows of both jobs wait."""
    found = compare(rows(range(count)), rows(reversed(range(count))))
    assert (found.same, found.equal) == (count, True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    most = int(sys.argv[1])
    print(*(round(peak_mib(n)) for n in (most // 4, most)))
