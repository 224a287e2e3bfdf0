"""Which completions an audit looks at again, and what it makes of a job that goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from contracts.shorthand import commit, ingest, verified
from ledger.audited import OTHER, Published, audited, tell_everything
from ledger.builders import JOB, Clock, completion, new_job

from specbatch.pipeline.ledger.memory.store import MemoryStore
from specbatch.pipeline.operations.audit import (
    MOST_FINDINGS,
    Auditor,
    Keys,
    LooksAgain,
    ReplayAudit,
    Replayed,
    chosen,
    record_of,
)
from specbatch.schemas.audit import Finding, FindingKind, KeptCompletion
from specbatch.schemas.errors import ModelError, UsageError
from specbatch.schemas.records import JobRow


def keys(count: int) -> Keys:
    made = Keys()
    for row in range(count):
        made.add(row, 0)
    return made


def test_a_sample_is_as_large_as_asked_and_depends_on_job_and_seed_alone() -> None:
    many = keys(1000)
    sample = chosen(many, JOB, 0.02)
    assert len(sample) == 20
    assert sample == sorted(sample) == chosen(many, JOB, 0.02)
    assert sample != chosen(many, JOB, 0.02, seed=1)
    assert sample != chosen(many, OTHER, 0.02)
    assert set(sample) < set(chosen(many, JOB, 0.1))
    assert chosen(many, JOB, 1.0) == list(many)


def test_of_a_few_completions_at_least_one_is_looked_at() -> None:
    assert len(chosen(keys(3), JOB, 0.001)) == 1
    assert chosen(keys(0), JOB, 1.0) == []


class Busy(MemoryStore):
    """A group is committed whenever somebody reads the completions, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(clock=Clock())
        self.groups_to_commit = list(range(times))

    def kept(self, job_id: str, batch: int = 500) -> Iterator[KeptCompletion]:
        if self.groups_to_commit:
            commit(self, verified(self, self.groups_to_commit.pop(0)))
        return super().kept(job_id, batch)


def no_replays(_job: JobRow, _verifier: str | None) -> LooksAgain:
    raise ModelError("it is not here")


def auditor_of(store: MemoryStore, replays: Any = no_replays) -> Auditor:
    return Auditor(store, Published(), replays)


def test_a_job_that_goes_on_is_read_again() -> None:
    store = Busy(2)
    ingest(store, groups=4)
    audit = auditor_of(store).chain(JOB[:8])
    assert audit.intact
    assert audit.counts.completions == 8


def test_a_job_that_does_not_stand_still_is_not_told_of() -> None:
    store = Busy(4)
    ingest(store, groups=4)
    with pytest.raises(UsageError, match="continues during the audit"):
        auditor_of(store).chain(JOB)


class Fake:
    """Every completion differs, but for row 1, whose prompt is gone."""

    def look(self, keys: Any) -> Iterator[Replayed]:
        for row, sample in keys:
            if row == 1:
                yield Replayed(skipped="its prompt is gone")
            else:
                found = Finding(FindingKind.TOKEN, "wrong", row=row, sample=sample)
                yield Replayed(3, [found] * 2)


def test_what_was_replayed_is_counted_and_kept() -> None:
    store = MemoryStore(clock=Clock())
    tell_everything(store)
    auditor = auditor_of(store, lambda _job, _verifier: Fake())
    chain = auditor.chain(JOB)
    found = auditor.replay(chain, 1.0)
    assert (found.sampled, found.differing, found.tokens) == (11, 11, 33)
    assert found.correctness.share == 0.0
    auditor.keep(chain, found)
    (kept,) = store.audits(JOB)
    assert (kept.sampled, kept.differing, len(kept.findings), kept.intact) == (11, 11, 22, True)
    assert kept.note is not None
    assert kept.note.endswith("1 its prompt is gone")


def test_a_replay_that_cannot_be_done_is_told_and_the_audit_kept() -> None:
    store = MemoryStore(clock=Clock())
    tell_everything(store)
    auditor = auditor_of(store)
    chain = auditor.chain(JOB)
    found = auditor.replay(chain, 1.0)
    assert isinstance(found.problem, ModelError)
    record = record_of(chain, found)
    assert (record.sampled, record.intact) == (0, True)
    assert str(record.note).endswith("nothing was replayed: it is not here")


def test_findings_beyond_count_are_only_counted() -> None:
    store = MemoryStore(clock=Clock())
    store.create_job(new_job())
    job = store._jobs[JOB]
    for row in range(MOST_FINDINGS + 5):
        job.completions[row, 0] = completion(row)
        job.digests[row, 0] = (row, bytes(64))  # each of a group of its own
    found = audited(store)
    assert (len(found.findings), found.left_out) == (MOST_FINDINGS, 5)
    replayed = ReplayAudit()
    for _ in range(2):
        replayed.add(Replayed(1, [Finding(FindingKind.TOKEN, "wrong")] * 700))
    assert (len(replayed.findings), replayed.differing) == (MOST_FINDINGS, 2)
