"""The audit log, the same on both databases: the entries of a job, and the findings of audits."""

from __future__ import annotations

import orjson
import pytest
from contracts.shorthand import claim, claim_job, commit, finish, found, ingest, verified
from ledger.audited import ROWS, audited, record, tell_everything, told
from ledger.builders import JOB, LEASE_SEC, NO_TIME, Clock, completion, new_job

from specbatch.pipeline.audit.digests import KEPT_BYTES, chained, completion_digest
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.store import whoami
from specbatch.schemas.audit import (
    AuditRecord,
    EntryKind,
    Finding,
    FindingKind,
    Head,
    LogEntry,
)
from specbatch.schemas.errors import JobNotFoundError, UsageError
from specbatch.schemas.records import JobState, Stage
from support.databases import sqlite_store


def log_of(store: Store) -> list[LogEntry]:
    return list(store.log(JOB))


def last(store: Store) -> tuple[str, str, object]:
    """Kind, actor and payload of the newest entry."""
    entry = log_of(store)[-1]
    return entry.kind, entry.actor, orjson.loads(entry.payload)


def test_both_databases_write_the_same_chain(store: Store, clock: Clock) -> None:
    tell_everything(store)
    twin = sqlite_store(type(clock)(), max_attempts=3)
    tell_everything(twin)
    assert log_of(store) == log_of(twin)
    assert store.log_head(JOB) == twin.log_head(JOB) == log_of(store)[-1].head
    assert told(store) == []
    assert [(k.row_index, k.group_index, k.digest) for k in store.kept(JOB)] == (
        [(k.row_index, k.group_index, k.digest) for k in twin.kept(JOB)]
    )
    assert list(store.groups(JOB)) == list(twin.groups(JOB))


def test_a_submitted_job_is_pinned_with_its_spec_and_by_whom(store: Store) -> None:
    store.create_job(new_job(deadline_sec=50.0))
    store.create_job(new_job())  # the same one again
    (entry,) = log_of(store)
    assert (entry.number, entry.kind, entry.actor) == (1, "submitted", whoami())
    said = orjson.loads(entry.payload)
    assert said["spec"] == dict(new_job().spec)
    assert said["deadline_at"] == store.get_job(JOB).deadline_at


def test_a_group_tells_of_each_completion_and_of_its_worker(store: Store) -> None:
    ingest(store)
    lease = verified(store, 1, owner="worker-7")
    commit(store, lease)
    kind, actor, said = last(store)
    assert (kind, actor) == ("group", "worker-7")
    assert said == {
        "index": 1,
        "generation": lease.token,
        "completions": [
            [row, 0, chained(completion_digest(completion(row)))] for row in range(4, 8)
        ],
    }


def test_a_commit_that_is_refused_leaves_no_entry(store: Store) -> None:
    ingest(store)
    lease = verified(store, 0)
    commit(store, lease)
    entries = len(log_of(store))
    with pytest.raises(Exception, match="no longer held"):
        commit(store, lease)
    assert len(log_of(store)) == entries


def test_completions_that_are_there_already_are_held_to_their_first_entry(store: Store) -> None:
    ingest(store, groups=1)
    held = claim(store, 0)
    store.request_cancel(JOB)
    store.keep_part(held.lease, [completion(0)], NO_TIME, {})
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    lease = verified(store, 0)
    again = [completion(row, text="another") for row in range(4)]
    store.commit_group(lease, again, NO_TIME, {})
    assert told(store) == []
    assert audited(store).counts.completions == ROWS


def test_what_stops_a_job_is_told(store: Store, clock: Clock) -> None:
    ingest(store, deadline_sec=50.0)
    clock.advance(60.0)
    assert store.stop_overdue() == {JOB}
    kind, actor, said = last(store)
    assert (kind, actor) == ("stopped", whoami())
    assert said == {"reason": store.get_job(JOB).stop_reason}
    assert told(store) == []
    finish(store, JobState.CANCELLED)
    store.retry_job(JOB)
    assert last(store)[2] == {
        "quarantined": False, "units": 2, "deadline_at": None, "budget_usd": None,
    }  # fmt: skip
    assert told(store) == []


def test_a_job_that_fails_says_so(store: Store) -> None:
    store.create_job(new_job())
    store.fail_job(claim_job(store, Stage.INGEST).lease, "no such model")
    kind, actor, _ = last(store)
    assert (kind, actor) == ("failed", "ingester")
    assert told(store) == []


def test_a_job_whose_attempts_are_used_up_says_so(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    for _ in range(3):
        claim_job(store, Stage.INGEST)
        clock.advance(LEASE_SEC + 1)
    assert store.claim_job(JOB, Stage.INGEST, "late", LEASE_SEC) is None
    assert last(store)[:2] == ("failed", whoami())
    assert told(store) == []


def test_a_group_that_is_given_up_is_told(store: Store, clock: Clock) -> None:
    ingest(store, groups=1, rows=1)
    for _ in range(3):
        claim(store, 0)
        clock.advance(LEASE_SEC + 1)
    assert store.close_over() == 1
    kind, _, said = last(store)
    assert kind == "lost"
    assert isinstance(said, dict)
    assert (said["index"], said["rows"]) == (0, 1)
    assert told(store) == []


def test_groups_that_are_cut_have_the_prompts_that_were_planned(store: Store) -> None:
    ingest(store, groups=2)
    store.split_group(claim(store, 0).lease, 1)
    assert [group.index for group in store.groups(JOB)] == [0, 1, 1 << 24]
    assert told(store) == []


def test_what_is_done_with_a_job_can_be_noted(store: Store) -> None:
    store.create_job(new_job())
    head = store.note_action(JOB[:8], EntryKind.EXPORTED, {"what": "tokens", "to": "s3://b"})
    assert head == store.log_head(JOB)
    assert last(store) == ("exported", whoami(), {"what": "tokens", "to": "s3://b"})
    with pytest.raises(JobNotFoundError):
        store.note_action("nobody", EntryKind.EXPORTED, {})


def test_the_log_is_read_from_any_entry_on(store: Store) -> None:
    tell_everything(store)
    entries = log_of(store)
    assert list(store.log(JOB, after=3, batch=2)) == entries[3:]
    assert next(store.log(JOB, after=4, batch=1)) == entries[4]
    assert list(store.log("nobody")) == []
    assert store.log_head("nobody") == Head()


def test_a_job_is_found_by_its_log(store: Store) -> None:
    store.create_job(new_job())
    assert store.logged_job(JOB) == store.logged_job(JOB[:9]) == JOB
    with pytest.raises(JobNotFoundError):
        store.logged_job("elsewhere")
    with pytest.raises(JobNotFoundError):
        store.logged_job(JOB[:4])


def test_a_completion_and_a_job_are_read_as_they_stand(store: Store) -> None:
    tell_everything(store)
    one = found(store.kept_one(JOB, 9, 0))
    assert (one.row_index, one.sample_index, one.group_index) == (9, 0, 2)
    assert one.digest == completion_digest(record(9))[:KEPT_BYTES]
    assert completion_digest(found(one.record)) == completion_digest(record(9))
    assert store.kept_one(JOB, 99, 0) is None
    facts = found(store.job_facts(JOB))
    assert (facts["tenant"], facts["rows_total"]) == ("default", 14)
    assert store.job_facts("nobody") is None
    assert [*store.kept("nobody"), *store.groups("nobody")] == []


def test_completions_are_paged(store: Store) -> None:
    tell_everything(store)
    assert [k.row_index for k in store.kept(JOB, batch=5)] == list(range(12))


def test_audits_are_kept_with_their_findings(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    assert store.correctness().share is None
    differs = Finding(
        FindingKind.TOKEN, "it is wrong \x00", row=2**40, sample=1, position=7, written=3,
        decided=4, margin=2.5,
    )  # fmt: skip
    changed = Finding(FindingKind.ENTRY, "entry 3 was changed", number=3)
    clock.advance(5.0)
    at = clock.now
    store.keep_audit(AuditRecord(JOB, 50, 1, 900, True, (differs, changed), "a remark"))
    clock.advance(5.0)
    store.keep_audit(AuditRecord(JOB, 150, 0, 2700, True))
    first, second = store.audits(JOB)
    assert first == AuditRecord(JOB, 50, 1, 900, True, (differs, changed), "a remark", at, whoami())
    assert (second.sampled, second.findings, second.note) == (150, (), None)
    assert store.correctness().share == 1 - 1 / 200
    assert store.correctness(since=clock.now).share == 1.0
    assert store.audits("nobody") == []


def test_a_retry_that_is_refused_is_not_told(store: Store) -> None:
    ingest(store)
    entries = len(log_of(store))
    with pytest.raises(UsageError):
        store.retry_job(JOB)
    assert len(log_of(store)) == entries
