"""Audits a finished job: its log and what that pins, and a sample of completions to replay.

Needs only the store and the output's manifest, and neither an engine nor Arrow.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specbatch.pipeline.audit.accounts import AccountCounts, compared
from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.audit.replay_log import Checker, Counts
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.coverage import Coverage, Covered, Part
from specbatch.pipeline.outputs.published import OutputCounts, output_findings
from specbatch.pipeline.runtime.anchors import KEY, URI, AnchorCounts, Anchors
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import (
    EMPTY,
    AuditRecord,
    Correctness,
    Finding,
    FindingKind,
    Head,
    KeptCompletion,
    LogEntry,
)
from specbatch.schemas.errors import JobNotFoundError, SpecbatchError, StoreError, UsageError
from specbatch.schemas.records import FINISHED, JobRow

MOST_FINDINGS = 1000  # that are listed; the others are counted

# Errors from values that specbatch would not write.
_SPOILT = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
_TRIES = 3  # for a job that still runs while its log is read


Progress = Callable[[int], None]


def unseen(_count: int) -> None:
    """The default progress callback, which does nothing."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One completion that was replayed, or why it was not."""

    tokens: int = 0
    findings: Sequence[Finding] = ()
    skipped: str | None = None
    note: str | None = None  # how it was replayed, if that matters


class LooksAgain(Protocol):
    """Replays completions of one job. `replay.Replays` is one."""

    def check(self, keys: Iterable[tuple[int, int]]) -> Iterator[Replayed]:
        """Each of these (row, sample)."""
        ...


@dataclass
class Keys:
    """Keys (row, sample) of many completions in little memory."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    samples: array[int] = field(default_factory=lambda: array("q"))

    def add(self, row: int, sample: int) -> None:
        self.rows.append(row)
        self.samples.append(sample)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.rows, self.samples, strict=True)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class ChainAudit:
    """The contents of a log and the findings against it."""

    job_id: str
    facts: LogFacts
    counts: Counts
    findings: list[Finding] = field(default_factory=list)
    left_out: int = 0  # findings beyond `MOST_FINDINGS`
    remarks: list[str] = field(default_factory=list)  # what could not be checked
    output: OutputCounts = field(default_factory=OutputCounts)
    accounts: AccountCounts = field(default_factory=AccountCounts)
    anchors: AnchorCounts = field(default_factory=AnchorCounts)
    compared: set[Part] = field(default_factory=set)  # completely
    to_replay: Keys = field(default_factory=Keys)  # completions that ended regularly

    @property
    def intact(self) -> bool:
        return not self.findings

    @property
    def end(self) -> Head:
        """The last entry of the log."""
        number = max(self.facts.hashes, default=0)
        return Head(number, self.facts.hashes[number]) if number else EMPTY

    def covered(self, replayed: int) -> list[Covered]:
        """The table of what this audit covers, given the number of replayed completions."""
        found = (self.output, self.accounts, self.anchors, self.compared)
        coverage = Coverage(self.facts, self.counts, *found)
        return list(coverage.rows(replayed, self.counts.completions))

    def compare(self, part: Part, found: Iterator[Finding]) -> None:
        """Add findings about a part of the store; a part that cannot be read is one too."""
        try:
            self.add(found)
            self.compared.add(part)
        except (StoreError, *_SPOILT) as error:
            what = f"{part} of the job cannot be read: {error}"
            self.add([Finding(FindingKind.JOB, what)])

    def add(self, found: Iterable[Finding]) -> None:
        for finding in found:
            if len(self.findings) < MOST_FINDINGS:
                self.findings.append(finding)
            else:
                self.left_out += 1


@dataclass
class ReplayAudit:
    """The result of replaying a sample."""

    sampled: int = 0
    differing: int = 0
    tokens: int = 0
    is_fast: bool = False  # the job promised no bits
    findings: list[Finding] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    problem: SpecbatchError | None = None  # why nothing could be replayed

    @property
    def correctness(self) -> Correctness:
        return Correctness(self.sampled, self.differing)

    def add(self, one: Replayed) -> None:
        if one.skipped is not None:
            self.skipped[one.skipped] += 1
        if one.note is not None:
            self.notes[one.note] += 1
        if one.skipped is None or one.findings:
            self.sampled += 1
            self.differing += bool(one.findings)
            self.tokens += one.tokens
        self.findings += one.findings[: max(0, MOST_FINDINGS - len(self.findings))]


@dataclass(frozen=True, slots=True)
class Auditor:
    """The auditor of one store. `replays` makes an object that replays a job's completions."""

    store: Store
    objects: Objects
    replays: Callable[[JobRow, str | None], LooksAgain]
    anchors: Anchors | None = None

    def chain(self, job: str, progress: Progress = unseen) -> ChainAudit:
        """Check the log of a job, given its id or the beginning of its id.

        Raises `UsageError` for a job that still runs, whose log keeps changing.
        """
        try:
            job_id = self._id_of(job)
        except JobNotFoundError:
            if self.anchors is None or not self.anchors.known(job):
                raise
            return self._gone(job, self.anchors)
        for _ in range(_TRIES):
            before = self.store.log_head(job_id)
            audit = audit_chain(self.store, self.objects, job_id, progress, self.anchors)
            if audit.intact or self.store.log_head(job_id) == before:
                return audit
        raise UsageError(f"job {job_id} is still running: audit it when it has ended")

    def _id_of(self, job: str) -> str:
        """The id of a job by its log, whether its row exists or not, or by its name."""
        try:
            return self.store.logged_job(job)
        except JobNotFoundError:
            return self.store.get_job(job).job_id

    def _gone(self, job_id: str, anchors: Anchors) -> ChainAudit:
        """Check a job that only its anchors know."""
        facts = LogFacts(job_id)
        audit = ChainAudit(job_id, facts, Counts())
        audit.add(anchors.findings(job_id, facts.hashes, audit.anchors))
        return audit

    def anchor(self, chain: ChainAudit) -> None:
        """Anchor the end of a log that was just checked and found intact.

        Raises `UsageError` if the place or the key is not set, and `ObjectError`.
        """
        if self.anchors is None:
            raise UsageError(
                f"{URI} is not set, so there is no place for anchors: set {URI} to a folder or "
                f"bucket outside the store, and {KEY} to the key that signs them"
            )
        self.anchors.put(chain.job_id, chain.end)
        chain.anchors = AnchorCounts()
        chain.add(self.anchors.findings(chain.job_id, chain.facts.hashes, chain.anchors))

    def replay(
        self,
        chain: ChainAudit,
        share: float,
        seed: int = 0,
        verifier: str | None = None,
        progress: Progress = unseen,
    ) -> ReplayAudit:
        """Replay a sample of the completions that were just checked."""
        found = ReplayAudit()
        keys = chosen(chain.to_replay, chain.job_id, share, seed) if share else []
        if not keys:
            return found
        try:
            job = self.store.get_job(chain.job_id)
            found.is_fast = (job.spec.get("engine") or {}).get("exactness") == "fast"
            replays = self.replays(job, verifier)
        except SpecbatchError as error:
            found.problem = error
            return found
        except (ValueError, TypeError, AttributeError):  # the check reported its row as damaged
            found.problem = UsageError(f"the row of job {chain.job_id} is damaged: no replay")
            return found
        for one in replays.check(keys):
            found.add(one)
            progress(1)
        return found

    def keep(self, chain: ChainAudit, replayed: ReplayAudit) -> AuditRecord:
        """Store the findings. Raises `StoreError` if this login has no right to."""
        record = record_of(chain, replayed)
        self.store.keep_audit(record)
        return record


def is_bad(findings: Sequence[Finding], is_fast: bool) -> bool:
    """Whether something is wrong. `exactness: fast` promises no bits, so near ties are as asked."""
    return any(not (is_fast and f.kind is FindingKind.NEAR_TIE) for f in findings)


def record_of(chain: ChainAudit, replayed: ReplayAudit) -> AuditRecord:
    """The record of an audit, as the store keeps it."""
    counts = {**replayed.skipped, **replayed.notes}
    notes = [*chain.remarks, *(f"{count} {why}" for why, count in counts.items())]
    if replayed.problem is not None:
        notes.append(f"nothing was replayed: {replayed.problem}")
    return AuditRecord(
        job_id=chain.job_id,
        sampled=replayed.sampled,
        differing=replayed.differing,
        tokens=replayed.tokens,
        intact=chain.intact,
        findings=(*chain.findings, *replayed.findings),
        note="; ".join(notes) or None,
    )


def audit_chain(
    store: Store,
    objects: Objects,
    job_id: str,
    progress: Progress = unseen,
    anchors: Anchors | None = None,
) -> ChainAudit:
    """Check a job's log and everything it pins. `progress` is called for each completion.

    `anchors`: anchors of the log outside the store, if any. `job_id` is the complete id
    (`Store.logged_job`). Raises `StoreError` if the store is out of reach.
    """
    facts = LogFacts(job_id)

    def entry_at(number: int) -> LogEntry | None:
        return next(store.log(job_id, number - 1, batch=1), None)

    checker = Checker(facts, entry_at)
    audit = ChainAudit(job_id, facts, checker.counts)

    def seen(one: KeptCompletion) -> None:
        record = one.record
        if record is not None and record.finish_reason in FINISHED and record.token_ids:
            audit.to_replay.add(one.row_index, one.sample_index)
        progress(1)

    row = store.job_facts(job_id)
    audit.add(facts.follow(store.log(job_id), None if row is None else store.log_head(job_id)))
    if row is None:
        audit.add(checker.job(row))
    else:
        audit.compare(Part.JOB, checker.job(row))
        audit.compare(Part.GROUPS, checker.groups(store.groups(job_id)))
        audit.compare(Part.REJECTED, checker.rejected(store.rejected(job_id)))
        audit.add(checker.completions(store.kept(job_id), seen))
        audit.compared.add(Part.COMPLETIONS)
        if facts.accounts is not None:
            audit.compare(Part.FIGURES, _accounts(store, facts, audit.accounts))
    place = facts.expected.get("output_uri", (row or {}).get("output_uri"))
    audit.add(output_findings(objects, facts, place, audit.output))
    if anchors is not None:
        audit.add(anchors.findings(job_id, facts.hashes, audit.anchors))
        audit.remarks += audit.anchors.remarks
    if checker.counts.uncovered:
        audit.remarks.append(
            f"{checker.counts.uncovered} completions are older than the job's log, which does not "
            "cover them"
        )
    return audit


def _accounts(store: Store, facts: LogFacts, counts: AccountCounts) -> Iterator[Finding]:
    assert facts.accounts is not None
    yield from compared(facts.accounts, store.accounts(facts.job_id), counts)


def chosen(keys: Keys, job_id: str, share: float, seed: int = 0) -> list[tuple[int, int]]:
    """A sample of so large a share, at least one completion: always the same, in order."""
    count = min(len(keys), math.ceil(len(keys) * share))

    def drawn(key: tuple[int, int]) -> bytes:
        text = f"{job_id}/{seed}/{key[0]}/{key[1]}"
        return hashlib.sha256(text.encode()).digest()[:8]

    if count == len(keys):
        return list(keys)
    return sorted(heapq.nsmallest(count, keys, key=drawn))
