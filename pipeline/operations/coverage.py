"""What an audit covers and what it cannot know: the rows of the table that `audit` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from specbatch.pipeline.audit.accounts import AccountCounts
from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.audit.replay_log import Counts
from specbatch.pipeline.observe.units import plural
from specbatch.pipeline.outputs.published import OutputCounts
from specbatch.pipeline.runtime.anchors import AnchorCounts
from specbatch.schemas.provenance import in_seconds

NO_LOG = "the store has no entry of this job's log"
OLDER_COPY = "a restored older copy of the store cannot be seen"


class Part(StrEnum):
    """Parts of the store that an audit compares with the log, each completely or not at all."""

    JOB = "the row"
    GROUPS = "the groups"
    REJECTED = "the quarantined rows"
    COMPLETIONS = "the completions"
    FIGURES = "the figures"


class Extent(StrEnum):
    """How far an audit covers something."""

    COVERED = "covered"
    IN_PART = "in part"
    NOT = "not covered"


@dataclass(frozen=True, slots=True)
class Covered:
    """One row: `how` says what was compared with what, or why nothing was compared."""

    what: str
    extent: Extent
    how: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """Makes the rows from the results of an audit."""

    facts: LogFacts
    counts: Counts
    output: OutputCounts
    accounts: AccountCounts
    anchors: AnchorCounts
    compared: Collection[Part]  # to their end

    def rows(self, replayed: int, completions: int) -> Iterator[Covered]:
        """The rows; the verifier replayed `replayed` of `completions` completions."""
        yield self._log()
        yield self._anchors()
        yield self._with_log("order and actions", "the job's row, compared with the log", Part.JOB)
        yield self._with_log(
            "which prompts and quarantined rows",
            "compared with the log" + self._groups_ends,
            *(Part.GROUPS, Part.REJECTED),
        )
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
            "anyone who can write the store, the output and the anchors, and has the key that "
            "signs them, can forge all of it",
        )

    @property
    def _of_log(self) -> Extent:
        return Extent.IN_PART if self.facts.adopted or self.facts.lacks else Extent.COVERED

    @property
    def _last(self) -> int:
        return max(self.facts.hashes, default=0)

    @property
    def _groups_ends(self) -> str:
        is_told = self.facts.is_open() is False and not self.facts.lacks
        return ", as is how each group ended" if is_told else ""

    def _with_log(self, what: str, how: str, *parts: Part) -> Covered:
        """A row about parts of the store that an audit compares with the log."""
        why = self._not_compared(*parts)
        if why is not None:
            return Covered(what, Extent.NOT, why)
        return Covered(what, self._of_log, how)

    def _not_compared(self, *parts: Part) -> str | None:
        """Why one of these parts was not compared with the log; None: all were."""
        if not self.facts.entries:
            return NO_LOG
        if Part.JOB not in self.compared:
            return "the job's row is gone or cannot be read"
        missed = [part for part in parts if part not in self.compared]
        return f"{' and '.join(missed)} cannot be read" if missed else None

    def _log(self) -> Covered:
        if not self.facts.entries:
            return Covered("audit log", Extent.NOT, NO_LOG)
        how = f"{plural(self.facts.entries, 'entry', 'entries')}, each follows the one before"
        if self.output.confirms is not None:
            how += f"; the manifest confirms entries 1\N{EN DASH}{self.output.confirms:,}"
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
        how += f"at {_time(anchor.at)} by the signer's clock"
        stamped = self.anchors.stamped
        if stamped is not None:
            how += f"; entry {stamped.number:,} stamped at {self.anchors.stamped_at} by "
            how += self.anchors.stamped_by
        if anchor.number == self._last:
            return Covered(name, Extent.COVERED, how)
        how += f"; of the {self._last - anchor.number:,} after it {OLDER_COPY}: audit with --anchor"
        return Covered(name, Extent.IN_PART, how)

    def _completions(self) -> Covered:
        if (why := self._not_compared(Part.COMPLETIONS)) is not None:
            return Covered("completions", Extent.NOT, why)
        how = f"every column of {plural(self.counts.completions, 'completion')}, their device time "
        how += "and cost too, compared with the log"
        if purged := self.counts.purged:
            how += f"; {purged:,} purged ones are empty, as they were left, and their tags are not "
            how += "covered"
        older = self.counts.uncovered
        if older:
            how += f"; {plural(older, 'completion')} older than the log not"
        return Covered("completions", Extent.IN_PART if older or purged else self._of_log, how)

    def _output(self) -> Covered:
        found, name = self.output, "output files"
        if found.purged:
            return Covered(name, Extent.NOT, "deleted by a purge, as the log says")
        if not self.facts.published:
            return Covered(name, Extent.NOT, self._unpublished)
        missed = f"not compared: {found.named - found.files:,} of "
        missed += f"{plural(found.named, 'file')} that the manifest names"
        gaps = [found.gap] * bool(found.gap) + [missed] * (found.files < found.named)
        if gaps and not found.files:
            return Covered(name, Extent.NOT, "; ".join(gaps))
        how = f"size and SHA-256 of {plural(found.files, 'file')}, {found.size_bytes:,} bytes, "
        how = "; ".join((f"{how}compared with {found.uri}", *gaps))
        return Covered(name, Extent.IN_PART if gaps else Extent.COVERED, how)

    @property
    def _unpublished(self) -> str:
        """Why the job has no published output to check."""
        is_open = self.facts.is_open()
        if is_open is None:
            return "the log does not say whether the job was published"
        return f"the job is not published{' yet' if is_open else ': it failed without an output'}"

    def _accounts(self) -> Iterator[Covered]:
        names = (
            *("figures of job and groups", "device time of attempts", "decisions about drafting"),
            "what else attempts used",
        )
        if (why := self._no_figures()) is not None:
            yield from (Covered(name, Extent.NOT, why) for name in names)
            return
        found = self.accounts
        how = f"{plural(found.groups, 'group')} and the report, compared with the log"
        yield Covered(names[0], Extent.COVERED, how)
        how = (
            f"{plural(found.slices, 'slice')} with {in_seconds(found.ticks)}, compared with the log"
        )
        if found.late_slices:
            how += f"; {in_seconds(found.late_ticks)} of attempts that were not kept are not: such "
            how += "time may be recorded later"
        yield _row(names[1], found.late_slices, how)
        how = f"{plural(found.decisions, 'decision')}, compared with the log"
        if found.late_decisions:
            how += f"; {found.late_decisions:,} noted after the job was published are not"
        yield _row(names[2], found.late_decisions, how)
        if found.usage is None:
            yield Covered(names[3], Extent.NOT, "the job is older than this part of the log")
        else:
            how = f"{plural(found.usage, 'attempt')} that were kept, compared with the log"
            yield Covered(names[3], Extent.COVERED, how)

    def _no_figures(self) -> str | None:
        """Why the figures were not compared; None if they were."""
        if self.facts.accounts is not None:
            return self._not_compared(Part.FIGURES)
        if self.facts.published:
            return "the job is older than this part of the log"
        return self._unpublished


def _replays(replayed: int, completions: int) -> Covered:
    name = "tokens are the verifier's choice"
    if not replayed:
        return Covered(name, Extent.NOT, "no completion was replayed")
    extent = Extent.COVERED if replayed >= completions else Extent.IN_PART
    return Covered(name, extent, f"{replayed:,} of {plural(completions, 'completion')} replayed")


def _row(name: str, late: int, how: str) -> Covered:
    return Covered(name, Extent.IN_PART if late else Extent.COVERED, how)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
