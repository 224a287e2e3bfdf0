"""Shares the time of each step among its sequences, in whole 100-ns units and without remainder.

A step takes a few tenths of a millisecond with a small model, so this is one short loop of
integers. Within a kind of time, sequences are served in order: each gets what the running total,
rounded down, rises by. So every share is right to one unit, and all of them add up.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.state.sequence import Sequence

PREFILL, VERIFY, DRAFT, REJECTED, PADDING, OVERHEAD = range(6)  # fields of `Ticks`, in order

Rows = tuple[int, int, int]  # of a prompt, that decided a token, that were rejected


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass whose time is shared: its sequences, and what each had in it."""

    sequences: Seq[Sequence]
    rows: Seq[Rows]
    draft_weights: Seq[int]  # by which the time for drafting is shared
    ticks: int  # that the pass took; 0: it raised, or is still to come


def spread(total: int, weights: Seq[int]) -> list[int]:
    """Divide `total` into whole parts by weight that add up to it; equally if all weigh nothing."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts, seen, given = [], 0, 0
    for weight in weights:
        seen += weight
        upto = total * seen // whole
        parts.append(upto - given)
        given = upto
    return parts


class TimeBook:
    """Charges time to sequences and to `totals`, which has one entry per kind."""

    def __init__(self, totals: list[int]) -> None:
        self._totals = totals

    def add(self, sequence: Sequence, kind: int, ticks: int) -> None:
        """Charge work that was done for one sequence alone."""
        sequence.time[kind] += ticks
        self._totals[kind] += ticks

    def share_step(
        self,
        begun: int,
        drafting: int,
        passes: Seq[Pass],
        number: int,
        padded: Callable[[int], int],
    ) -> tuple[int, list[int]]:
        """Share the time since `begun`: all of it, and each sequence's share of the last pass.

        `drafting` is what proposers took of it. Each sequence of the step is in one of the passes.
        `number` is the step's, or that of its first pass; `padded(rows)` is the number of rows that
        such a pass really has.
        """
        whole = now() - begun
        passing = sum(each.ticks for each in passes)
        drafting = min(drafting, whole - passing)
        overhead = whole - passing - drafting
        sizes = [sum(map(sum, each.rows)) for each in passes] if len(passes) > 1 else [1]
        shares: list[int] = []
        for each, of_drafting, of_overhead in zip(
            passes, spread(drafting, sizes), spread(overhead, sizes), strict=True
        ):
            shares = self._share(each, number, padded, of_drafting, of_overhead)
        return whole, shares

    def _share(
        self, each: Pass, number: int, padded: Callable[[int], int], drafting: int, overhead: int
    ) -> list[int]:
        drafts = spread(drafting, each.draft_weights) if drafting else None
        shares = self.share_pass(each.sequences, each.rows, each.ticks, overhead, padded, drafts)
        for sequence, share in zip(each.sequences, shares, strict=True):
            decided = sequence.passes - len(sequence.steps)  # passes that decided something here
            if decided == 1:
                sequence.steps.append(number)
                sequence.pass_ticks.append(share)
            elif decided:
                sequence.steps += range(number, number + decided)
                sequence.pass_ticks += spread(share, [1] * decided)
        return shares

    def share_pass(
        self,
        sequences: Seq[Sequence],
        rows: Seq[Rows],
        ticks: int,
        overhead: int,
        padded: Callable[[int], int],
        drafts: Seq[int] | None = None,
    ) -> list[int]:
        """Share a pass, and overhead with it, by rows; returns each sequence's share.

        `drafts` are the ticks that drafting for each of them took.
        """
        count = sum(map(sum, rows))
        padding = ticks - ticks * count // padded(count)
        useful = ticks - padding
        totals = self._totals
        seen = given = given_padding = given_overhead = 0
        shares = []
        for i, (prompt, kept, refused) in enumerate(rows):
            of = sequences[i].time
            before = given + given_padding + given_overhead
            for kind, some in ((PREFILL, prompt), (VERIFY, kept), (REJECTED, refused)):
                if some:
                    seen += some
                    part = useful * seen // count - given
                    of[kind] += part
                    totals[kind] += part
                    given += part
            if padding:
                part = padding * seen // count - given_padding
                of[PADDING] += part
                given_padding += part
            part = overhead * seen // count - given_overhead
            of[OVERHEAD] += part
            given_overhead += part
            share = given + given_padding + given_overhead - before
            if drafts is not None:
                of[DRAFT] += drafts[i]
                share += drafts[i]
            shares.append(share)
        totals[DRAFT] += sum(drafts or ())
        totals[PADDING] += padding
        totals[OVERHEAD] += overhead
        return shares
