"""Linear layers whose rows keep their bits whatever the batch.

Libraries pick another kernel, and another order of addition, for another number of rows. So we run
every linear layer only on numbers of rows that this machine was *seen* to treat alike: at load time
each layer shape is probed at a ladder of row counts, and the cheapest set of counts whose outputs
agree bit for bit, for every layer, becomes the set of tiles. A pass of T rows is padded to a sum of
tiles. Nothing is assumed of the library; what was measured is logged.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

LADDER = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Passes a nightly run consists of: few rows at its ends, hundreds in its middle.
_TYPICAL_ROWS = (1, 4, 16, 48, 64, 96, 128, 200, 256, 512, 1024)
_PROBED = (1, 3, 16, 17, 64, 130)  # of what pads itself: parts of tiles, and more than two
_CANCELLING = 256  # inputs at most, of a row whose products cancel out
_CALL_ROWS = 24  # what a call costs beside its rows, in rows


@dataclass(frozen=True)
class RowTiles:
    """Row counts that were seen to agree bit for bit, in ascending order."""

    sizes: tuple[int, ...]

    def cover(self, rows: int) -> tuple[int, ...]:
        """The cheapest tiles that hold `rows` rows, largest first."""
        return _cover(self.sizes, rows)

    def padded(self, rows: int) -> int:
        return sum(self.cover(rows))

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))


@lru_cache(maxsize=8192)
def _cover(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for unit in range(1, -(-rows // LADDER[0]) + 1):
        best.append(
            min(
                (before + _CALL_ROWS + size, (*tiles, size))
                for size in sizes
                for before, tiles in [best[max(0, unit - size // LADDER[0])]]
            )
        )
    return tuple(sorted(best[-1][1], reverse=True))


class TiledLinear(nn.Module):
    """`nn.Linear` run tile by tile; the number of rows must be a sum the tiles cover exactly."""

    def __init__(self, linear: nn.Linear, tiles: RowTiles) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._tiles = tiles

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        cover = self._tiles.cover(rows.shape[0])
        padding = sum(cover) - rows.shape[0]
        if padding:  # a caller that did not pad: right, only slower
            rows = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
        if len(cover) == 1:
            out = F.linear(rows, self.weight, self.bias)
        else:
            out = rows.new_empty(rows.shape[0], self.out_features)
            start = 0
            for size in cover:
                out[start : start + size] = F.linear(
                    rows[start : start + size], self.weight, self.bias
                )
                start += size
        return out[: out.shape[0] - padding].view(*x.shape[:-1], self.out_features)


def calibrate(linears: Iterable[nn.Linear]) -> RowTiles:
    """Probe two layers of every shape; the cheapest set of row counts on which all agree.

    Cheapest by a nominal cost, not by a clock: workers of one kind must choose alike.
    """
    shapes: dict[tuple[int, int, bool], list[nn.Linear]] = {}
    for linear in linears:
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        shapes.setdefault(shape, []).append(linear)
    probed = [m for alike in shapes.values() for m in (alike[0], *alike[1:][-1:])]
    partitions = {_agreeing(_passes(_product(m), telling(m), LADDER)) for m in probed}
    candidates = {
        frozenset(LADDER).intersection(*choice) for choice in itertools.product(*partitions)
    }
    best = min(
        (RowTiles(tuple(sorted(sizes))) for sizes in candidates if sizes),
        key=lambda tiles: (_typical_cost(tiles), tiles.sizes),
        default=RowTiles(LADDER[2:3]),  # one constant size is always consistent
    )
    log.info("row tiles %s agree bit for bit on %d layer shapes", best, len(shapes))
    return best


def _typical_cost(tiles: RowTiles) -> float:
    """Padded rows per row, summed over the typical numbers of rows."""
    return sum(sum(_CALL_ROWS + s for s in tiles.cover(rows)) / rows for rows in _TYPICAL_ROWS)


def probe_agrees(by_rows: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether the first and the last of `telling` rows have the bits of a pass of all of them at
    every size that is probed."""
    whole = by_rows(rows)
    return all(
        torch.equal(by_rows(rows[part]), whole[part])
        for size in _PROBED
        for part in (slice(None, size), slice(-size, None))
    )


def _product(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Its kernel, but for the bias's value: that would round away what the sums differ in."""
    bias = None if linear.bias is None else torch.zeros_like(linear.bias)
    return lambda rows: F.linear(rows, linear.weight, bias)


def telling(linear: nn.Linear) -> Tensor:
    """As many rows as the largest tile has; of two in three the products cancel out.

    Sums of random products differ by order in bits that a half-precision result rounds away, so
    that sizes may seem alike on every row that is tried. Where x[a] = w[b] and x[b] = -w[a], what
    is left of a sum is nothing but the rounding on its way. Weights of eight bits may be
    scaled before their sum or after it: for one half of these rows they are taken as they are kept.
    """
    generator = torch.Generator().manual_seed(0)
    count, width = LADDER[-1], linear.in_features
    like, by_rows = linear.weight, _product(linear)
    rows = torch.randn(count, width, generator=generator)
    positions = torch.randperm(width, generator=generator)[: min(width, _CANCELLING) // 2 * 2]
    units = torch.zeros(len(positions), width)
    units[torch.arange(len(positions)), positions] = 1.0
    weights = by_rows(units.to(like.device, like.dtype)).float().cpu()  # (positions, outputs)
    kept = getattr(like, "qdata", like)[:, positions.to(like.device)].float().cpu().T
    for first, given in ((1, weights), (2, kept)):
        # By a power of two, which changes no bit of them: no number may be too large for the dtype.
        exact = given * torch.exp2(-given.abs().max().clamp_min(1e-30).log2().ceil())
        chosen = rows[first::3]
        of = torch.randint(linear.out_features, (len(chosen),), generator=generator)
        pairs = (len(chosen), len(positions) // 2)
        scale = torch.exp2(torch.randint(-12, 13, pairs, generator=generator))
        chosen[:] = 0.0
        chosen[:, positions[0::2]] = exact[1::2, of].T * scale
        chosen[:, positions[1::2]] = -exact[0::2, of].T * scale
    return rows.to(like.device, like.dtype)


def _passes(
    by_rows: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]
) -> dict[int, Tensor]:
    """Outputs of the same rows, in passes of every size."""
    return {
        size: torch.cat([by_rows(rows[i : i + size]) for i in range(0, sizes[-1] - size + 1, size)])
        for size in sizes
    }


def _agreeing(outputs: dict[int, Tensor]) -> frozenset[frozenset[int]]:
    """Partition of the ladder into sizes with equal bits on their common rows."""
    groups: list[list[int]] = []
    for size, out in outputs.items():
        for group in groups:
            other = outputs[group[0]]
            common = min(len(out), len(other))
            if torch.equal(out[:common], other[:common]):
                group.append(size)
                break
        else:
            groups.append([size])
    return frozenset(frozenset(group) for group in groups)
