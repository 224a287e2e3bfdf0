"""What an audit covers and what it cannot know: the rows of the table that `audit` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from specbatch.pipeline.anchors import AnchorCounts
from specbatch.pipeline.ledger.accounts import AccountCounts
from specbatch.pipeline.ledger.checking import Counts
from specbatch.pipeline.ledger.log_facts import LogFacts
from specbatch.pipeline.published import OutputCounts
from specbatch.schemas.provenance import TICKS_PER_SEC

OLDER_COPY = "a restored older copy of the store cannot be seen"


class Extent(StrEnum):
    """How far something is covered."""

    COVERED = "covered"
    IN_PART = "in part"
    NOT = "not covered"


@dataclass(frozen=True, slots=True)
class Covered:
    """One row: `how` says what was compared with what, or why nothing was."""

    what: str
    extent: Extent
    how: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the rows are made of."""

    facts: LogFacts
    counts: Counts
    output: OutputCounts
    accounts: AccountCounts
    anchors: AnchorCounts

    def rows(self, replayed: int, completions: int) -> Iterator[Covered]:
        """`replayed` of so many `completions` went through the verifier again."""
        yield self._log()
        yield self._anchors()
        yield Covered("order and actions", self._of_log, "the job's row, compared with the log")
        yield Covered("which prompts and quarantined rows", self._of_log, "compared with the log")
        yield self._completions()
        yield _replays(replayed, completions)
        yield self._output()
        yield from self._accounts()
        yield Covered(
            "workers' idle time, learned tables",
            Extent.NOT,
            "shared between jobs and still moving: idle and overhead of workers, step times, "
            "acceptance, tenants' shares; no token depends on them",
        )
        yield Covered(
            "earlier audits, schedules, traces, exports",
            Extent.NOT,
            "kept beside the log, which names exports alone",
        )
        yield Covered(
            "who wrote it all",
            Extent.NOT,
            "whoever can write the store, the output and the anchors, and has the key that signs "
            "them, can forge all of it",
        )

    @property
    def _of_log(self) -> Extent:
        return Extent.IN_PART if self.facts.adopted or self.facts.lacks else Extent.COVERED

    @property
    def _last(self) -> int:
        return max(self.facts.anchors, default=0)

    def _log(self) -> Covered:
        how = f"{_count(self.facts.entries, 'entry', 'entries')}, each follows the one before"
        if self.output.confirms is not None:
            how += f"; the manifest holds down the first {self.output.confirms:,}"
        if self.facts.adopted:
            how += "; the job is older than its log, which says nothing of what came before"
        return Covered("audit log", self._of_log, how)

    def _anchors(self) -> Covered:
        anchor, name = self.anchors.last, "end of the log"
        if anchor is None:
            where = "there is no anchor of this job" if self.anchors.is_set else (
                "SPECBATCH_ANCHOR_URI is not set"
            )  # fmt: skip
            return Covered(name, Extent.NOT, f"not anchored ({where}): {OLDER_COPY}")
        how = f"anchored up to entry {anchor.number:,} of {self._last:,} with key {anchor.key}, "
        how += f"at {_time(anchor.at)} by the clock of who signed it"
        stamped = self.anchors.stamped
        if stamped is not None:
            how += f"; entry {stamped.number:,} stamped at {self.anchors.stamped_at} by "
            how += self.anchors.stamped_by
        if anchor.number == self._last:
            return Covered(name, Extent.COVERED, how)
        how += f"; of the {self._last - anchor.number:,} after it {OLDER_COPY}: audit with --anchor"
        return Covered(name, Extent.IN_PART, how)

    def _completions(self) -> Covered:
        how = f"every column of {_count(self.counts.completions, 'completion')}, their device time "
        how += "and cost too, compared with the log"
        older = self.counts.uncovered
        if older:
            how += f"; {_count(older, 'completion')} older than the log not"
        return Covered("completions", Extent.IN_PART if older else self._of_log, how)

    def _output(self) -> Covered:
        found, name = self.output, "output files"
        if found.purged:
            return Covered(name, Extent.NOT, "deleted by a purge, as the log says")
        if not self.facts.published:
            return Covered(name, Extent.NOT, f"the job is not published{self._not_yet}")
        how = f"size and SHA-256 of {_count(found.files, 'file')}, {found.size_bytes:,} bytes, "
        return Covered(name, Extent.COVERED, f"{how}compared with {found.uri}")

    @property
    def _not_yet(self) -> str:
        return " yet" if self.facts.is_open() is not False else ": it failed without an output"

    def _accounts(self) -> Iterator[Covered]:
        names = ("figures of job and groups", "device time of attempts", "decisions about drafting")
        if self.facts.accounts is None:
            why = f"the job is not published{self._not_yet}"
            if self.facts.published:
                why = "the job is older than this part of the log"
            yield from (Covered(name, Extent.NOT, why) for name in names)
            return
        found = self.accounts
        how = f"{_count(found.groups, 'group')} and the report, compared with the log"
        yield Covered(names[0], Extent.COVERED, how)
        how = f"{_count(found.slices, 'slice')} with {_sec(found.ticks)}, compared with the log"
        if found.late_slices:
            how += f"; {_sec(found.late_ticks)} of attempts that were not kept are not: such time "
            how += "may be told later"
        yield _row(names[1], found.late_slices, how)
        how = f"{_count(found.decisions, 'decision')}, compared with the log"
        if found.late_decisions:
            how += f"; {found.late_decisions:,} noted after the job was published are not"
        yield _row(names[2], found.late_decisions, how)


def _replays(replayed: int, completions: int) -> Covered:
    name = "tokens are the verifier's choice"
    if not replayed:
        return Covered(name, Extent.NOT, "no completion was replayed")
    extent = Extent.COVERED if replayed >= completions else Extent.IN_PART
    return Covered(name, extent, f"{replayed:,} of {_count(completions, 'completion')} replayed")


def _row(name: str, late: int, how: str) -> Covered:
    return Covered(name, Extent.IN_PART if late else Extent.COVERED, how)


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _sec(ticks: int) -> str:
    return f"{ticks / TICKS_PER_SEC:,.2f} s"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
