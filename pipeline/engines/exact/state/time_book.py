"""Shares the time of each step among its sequences, in whole ticks and to the last of them.

A step is a few tenths of a millisecond with a small model, so this is one short loop of integers.
Within a kind, sequences are served in a row: each gets what the sum so far, rounded down, rises by.
So every share is right to a tick, and all of them add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbatch.pipeline.engines.exact.state.sequence import Sequence
    from specbatch.pipeline.engines.exact.state.work import Work

PREFILL, VERIFY, DRAFT, REJECTED, PADDING, OVERHEAD = range(6)  # fields of `Ticks`, in order

Rows = tuple[int, int, int]  # of a prompt, that decided a token, that were rejected


def now() -> int:
    """Ticks by the performance counter."""
    return time.perf_counter_ns() // 100


def spread(total: int, weights: Seq[int]) -> list[int]:
    """`total` in whole parts by weight, which add up to it. Equal ones where nothing has weight."""
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
    """Adds to sequences, and to `totals`, what they took. `totals` has a place for each kind."""

    def __init__(self, totals: list[int]) -> None:
        self._totals = totals

    def add(self, sequence: Sequence, kind: int, ticks: int) -> None:
        """What was done for one sequence alone."""
        sequence.time[kind] += ticks
        self._totals[kind] += ticks

    def share_step(
        self, work: Work, parts: Seq[Work], number: int, padded: Callable[[int], int]
    ) -> tuple[int, list[int]]:
        """Share the time since `work` was begun: all of it, and each sequence's share.

        `parts` are what passed of the work: itself, or else pieces of it; who is in none of them
        failed, or has its turn later. The shares are those of the last part. `number` is the
        step's; `padded(rows)` says how many rows a pass of so many has.
        """
        whole = now() - work.begun
        passing = sum(part.pass_ticks for part in parts)
        drafting = min(work.drafting_ticks, whole - passing)
        overhead = whole - passing - drafting
        if len(parts) == 1 and len(parts[0].plan) == len(work.plan):
            return whole, self._share(parts[0], number, padded, drafting, overhead)
        seen = {planned.sequence for part in parts for planned in part.plan}
        rest = work.part([planned for planned in work.plan if planned.sequence not in seen])
        pieces = [part for part in (rest, *parts) if part.plan]
        sizes = [sum(map(sum, piece.rows)) for piece in pieces]
        shares: list[int] = []
        for piece, of_drafting, of_overhead in zip(
            pieces, spread(drafting, sizes), spread(overhead, sizes), strict=True
        ):
            shares = self._share(piece, number, padded, of_drafting, of_overhead)
        return whole, shares

    def _share(
        self, part: Work, number: int, padded: Callable[[int], int], drafting: int, overhead: int
    ) -> list[int]:
        sequences = [planned.sequence for planned in part.plan]
        drafts = spread(drafting, part.draft_weights) if drafting else None
        shares = self.share_pass(sequences, part.rows, part.pass_ticks, overhead, padded, drafts)
        for sequence, share in zip(sequences, shares, strict=True):
            if sequence.passes > len(sequence.steps):  # it decided something here
                sequence.steps.append(number)
                sequence.pass_ticks.append(share)
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
        """Share a pass, and overhead with it, by rows; each sequence's share.

        `drafts` are the ticks that drafting for each of them took.
        """
        count = sum(map(sum, rows))
        padding = ticks - ticks * count // padded(count)
        useful = ticks - padding
        prefill = verify = rejected = 0
        seen = given = given_padding = given_overhead = 0
        shares = []
        for i, (prompt, kept, refused) in enumerate(rows):
            of = sequences[i].time
            before = given + given_padding + given_overhead
            if prompt:
                seen += prompt
                part = useful * seen // count - given
                of[PREFILL] += part
                prefill += part
                given += part
            if kept:
                seen += kept
                part = useful * seen // count - given
                of[VERIFY] += part
                verify += part
                given += part
            if refused:
                seen += refused
                part = useful * seen // count - given
                of[REJECTED] += part
                rejected += part
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
        totals = self._totals
        for kind, sum_ in enumerate(
            (prefill, verify, sum(drafts or ()), rejected, padding, overhead)
        ):
            totals[kind] += sum_
        return shares
