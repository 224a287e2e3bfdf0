"""The figures of a report, added up group by group and completion by completion.

Memory grows with the number of groups and not of completions: of those it keeps counters, the few
that stand out and the few that are shown.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from specbatch.pipeline.observe.report.facts import Bar, Drafts, Moment, Spread
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.provenance import passes_of
from specbatch.schemas.records import NO_TAG

MOMENTS = 48  # intervals that a job's time is divided into
MOST_TAGS = 2000  # that are counted apart
TAGS_SHOWN = 20
OUTLIERS = 8
LEAST_PROPOSED = 16  # draft tokens: with fewer, a rate means nothing
MOST_STEPS = 1 << 16  # steps of the verifier that are counted one by one
OTHER_TAGS = "(other tags)"
UNKNOWN_SOURCE = "(not recorded)"


class Timeline:
    """The job's groups in intervals of time, by when they were done."""

    def __init__(self, groups: list[GroupFigures], started_at: float | None) -> None:
        done = [(g.done_at, g) for g in groups if g.done_at is not None]
        self._of_group: dict[int, int] = {}
        self._bins: list[list[GroupFigures]] = []
        self._sources: list[dict[str, tuple[int, int]]] = []
        if not done:
            return
        first, last = min(at for at, _ in done), max(at for at, _ in done)
        self._begin = min(first, started_at) if started_at is not None else first
        number = min(MOMENTS, max(1, len(done) // 2)) if last > self._begin else 1
        self._width = (last - self._begin) / number or 1.0
        self._bins = [[] for _ in range(number)]
        self._sources = [{} for _ in range(number)]
        for at, group in done:
            interval = min(number - 1, int((at - self._begin) / self._width))
            self._bins[interval].append(group)
            self._of_group[group.index] = interval

    def count(self, group_index: int, source: str, proposed: int, accepted: int) -> None:
        interval = self._of_group.get(group_index)
        if interval is not None:
            known = self._sources[interval].get(source, (0, 0))
            self._sources[interval][source] = (known[0] + proposed, known[1] + accepted)

    def moments(self) -> tuple[Moment, ...]:
        return tuple(
            Moment(
                begin=self._begin + number * self._width,
                end=self._begin + (number + 1) * self._width,
                groups=len(groups),
                tokens=sum(g.completion_tokens for g in groups),
                proposed=sum(g.proposed for g in groups),
                accepted=sum(g.accepted for g in groups),
                passes=sum(g.verifier_passes for g in groups),
                queue_sec=sum(g.queue_sec for g in groups),
                compute_sec=sum(g.compute_sec for g in groups),
                by_source=self._sources[number],
            )
            for number, groups in enumerate(self._bins)
        )


@dataclass(slots=True)
class _Sums:
    """Sums over the rows of one tag."""

    completions: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    usd: float = 0.0


class Largest:
    """The few completions with the largest keys; among equal keys the first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[tuple[float, ...], RowFigures]] = []

    def see(self, row: RowFigures, *key: float) -> None:
        entry = ((*key, -row.row_index, -row.sample_index), row)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, entry)
        elif self._most and entry[0] > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    @property
    def rows(self) -> list[RowFigures]:
        """The largest first."""
        return [row for _, row in sorted(self._heap, key=lambda entry: entry[0], reverse=True)]


class Fill:
    """How many of the job's sequences shared a pass of the verifier.

    A pass is identified by the process's session and the number of its step. Where there are too
    many to keep, only every second step is counted, then every fourth, and so on: those are exact.
    """

    def __init__(self, session_of: Mapping[int, int], most: int = MOST_STEPS) -> None:
        """`session_of`: the number of the session that verified a group."""
        self._session_of = session_of
        self._most = most
        self.stride = 1
        self._sequences: Counter[tuple[int, int]] = Counter()

    def see(self, row: RowFigures) -> None:
        session, stride = self._session_of.get(row.group_index, 0), self.stride
        if stride == 1:
            self._sequences.update((session, step) for step in row.steps)
        else:
            self._sequences.update((session, step) for step in row.steps if not step % stride)
        while len(self._sequences) > self._most:
            self.stride *= 2
            kept = {key: n for key, n in self._sequences.items() if not key[1] % self.stride}
            self._sequences = Counter(kept)

    @property
    def mean(self) -> float | None:
        """Sequences in a pass."""
        if not self._sequences:
            return None
        return sum(self._sequences.values()) / len(self._sequences)

    def bars(self) -> tuple[Bar, ...]:
        """Passes by sequences, in classes that double."""
        classes: Counter[int] = Counter()
        for sequences in self._sequences.values():
            classes[(sequences - 1).bit_length()] += 1
        return tuple(
            Bar(_class_name(size), classes[size]) for size in range(max(classes, default=-1) + 1)
        )


def _class_name(size: int) -> str:
    low, high = (1 << (size - 1)) + 1 if size else 1, 1 << size
    return str(high) if low >= high else f"{low}–{high}"


@dataclass(slots=True)
class Tally:
    """Counters over all completions."""

    timeline: Timeline
    fill: Fill
    samples: int
    seed: str  # decides which completions are shown
    drafts: dict[str, Counter[tuple[int, int]]] = field(default_factory=dict)  # by source
    plain_passes: int = 0
    tags: dict[str | None, _Sums] = field(default_factory=dict)
    slowest: Largest = field(default_factory=lambda: Largest(OUTLIERS))
    least_accepted: Largest = field(default_factory=lambda: Largest(OUTLIERS))
    shown: Largest = field(default_factory=lambda: Largest(0))

    def __post_init__(self) -> None:
        self.shown = Largest(self.samples)

    def see(self, row: RowFigures) -> None:
        """Count one completion."""
        self._count_tag(row)
        self.slowest.see(row, row.ticks)
        if row.proposed >= LEAST_PROPOSED:
            self.least_accepted.see(row, -row.accepted / row.proposed, row.proposed)
        if row.tokens:
            name = f"{self.seed}/{row.row_index}/{row.sample_index}".encode()
            drawn = int.from_bytes(blake2b(name, digest_size=6).digest(), "big")
            self.shown.see(row, float(drawn))
        self.fill.see(row)
        self._count_passes(row)

    def _count_tag(self, row: RowFigures) -> None:
        tag: str | None = row.tag
        if tag not in self.tags and len(self.tags) >= MOST_TAGS:
            tag = OTHER_TAGS
        sums = self.tags.setdefault(tag, _Sums())
        sums.completions += 1
        sums.tokens += row.tokens
        sums.proposed += row.proposed
        sums.accepted += row.accepted
        sums.usd += row.cost_usd

    def _count_passes(self, row: RowFigures) -> None:
        kept, plain = passes_of(row.origins)
        self.plain_passes += plain if row.verifier_passes else 0  # none of a copy
        if not kept:
            return
        drafted, proposers = row.drafted, row.makers
        if not len(drafted) == len(proposers) == len(kept):  # recorded before sources were kept
            self._count(row.group_index, UNKNOWN_SOURCE, kept, kept)
            return
        # Accepted tokens that a stop inside of the last draft cut off count as accepted.
        kept[-1] = min(kept[-1] + row.accepted - sum(kept), drafted[-1])
        for number, source in enumerate(row.sources):
            if len(row.sources) == 1:
                self._count(row.group_index, source, drafted, kept)
                continue
            mine = [i for i, proposer in enumerate(proposers) if proposer == number]
            one = [drafted[i] for i in mine], [kept[i] for i in mine]
            self._count(row.group_index, source, *one)

    def _count(
        self, group_index: int, source: str, drafted: Sequence[int], kept: Sequence[int]
    ) -> None:
        """Drafts of one source: the tokens of each, and how many were accepted."""
        self.drafts.setdefault(source, Counter()).update(zip(drafted, kept, strict=True))
        self.timeline.count(group_index, source, sum(drafted), sum(kept))

    # --- results ----------------------------------------------------------------------------
    def by_tag(self) -> tuple[tuple[Drafts, ...], int]:
        """The tags with most tokens, and how many are left out."""
        lines = [
            Drafts(tag or NO_TAG, s.proposed, s.accepted, 0, s.completions, s.tokens, s.usd)
            for tag, s in self.tags.items()
        ]
        lines.sort(key=lambda line: (-line.tokens, line.name))
        return tuple(lines[:TAGS_SHOWN]), max(0, len(lines) - TAGS_SHOWN)

    def by_source(self) -> tuple[Drafts, ...]:
        lines = [
            Drafts(
                source,
                sum(drafted * times for (drafted, _), times in counts.items()),
                sum(kept * times for (_, kept), times in counts.items()),
                counts.total(),
            )
            for source, counts in self.drafts.items()
        ]
        return tuple(sorted(lines, key=lambda line: (-line.proposed, line.name)))

    def _all_drafts(self) -> Counter[tuple[int, int]]:
        """(tokens, accepted) of each draft, over all sources."""
        return sum(self.drafts.values(), Counter())

    def depths(self) -> tuple[Bar, ...]:
        """Passes of sequences by the number of their draft tokens."""
        passes: Counter[int] = Counter({0: self.plain_passes} if self.plain_passes else {})
        for (drafted, _), times in self._all_drafts().items():
            passes[drafted] += times
        return tuple(Bar(str(depth), passes[depth]) for depth in range(max(passes, default=-1) + 1))

    def positions(self) -> tuple[Drafts, ...]:
        """How many draft tokens were accepted at each position of a draft.

        A token counts where all before it were accepted: no other is reached.
        """
        reached: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for (drafted, kept), times in self._all_drafts().items():
            for position in range(min(kept + 1, drafted)):
                reached[position] += times
            for position in range(kept):
                accepted[position] += times
        return tuple(Drafts(str(at + 1), reached[at], accepted[at]) for at in sorted(reached))


def spread(values: list[float]) -> Spread | None:
    """Quantiles by the nearest rank; None without values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(at(0.5), at(0.9), at(0.99), ordered[-1], math.fsum(ordered), len(ordered))
