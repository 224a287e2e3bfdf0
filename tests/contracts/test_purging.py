"""What a purge empties and what it leaves, in every store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from contracts.shorthand import DRAFTED, commit, ended, finish, ingest, verified
from ledger.builders import JOB, NO_TIME, Clock, completion, new_job

from specbatch.pipeline.audit.digests import facts_digest
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.purge import Purger
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import RejectedRow, Stage
from specbatch.schemas.speculation import VOCABULARY


def test_a_purge_empties_texts_and_leaves_figures(store: Store) -> None:
    ended(store)
    before, progress = list(store.completions(JOB)), store.progress(JOB)
    times = store.row_times(JOB)
    assert [time.completion_tokens for time in times] == [12]
    assert list(store.purge(JOB, "asked for", batch_rows=2)) == [0, 2, 4, 5]
    after = list(store.completions(JOB))
    assert [facts_digest(record) for record in after] == [facts_digest(r) for r in before]
    for record in after:
        assert (record.row_id, record.text, record.token_ids, record.error) == ("", "", (), None)
        assert (record.logprobs, record.top_logprobs) == ((), None)
        assert record.provenance == replace(DRAFTED, rejected=())
    assert list(store.rejected(JOB)) == [RejectedRow(4, None, "bad_id", "")]
    assert store.progress(JOB) == progress
    assert store.row_times(JOB) == times, "money is told by the token as before"
    assert store.get_job(JOB).purged_at is not None
    assert [entry.kind for entry in store.log(JOB)][-1] == EntryKind.PURGED


def test_a_purge_is_done_once_and_goes_on_where_it_was(store: Store) -> None:
    ended(store)
    broken_off = store.purge(JOB, "asked for", batch_rows=2)
    assert [next(broken_off), next(broken_off)] == [0, 2]
    assert [record.text for record in store.completions(JOB)] == ["", "", "a b", "a b"]
    assert [job.job_id for job in store.ended_jobs(0.0)] == [JOB]
    assert [job.job_id for job in store.ended_jobs(0.0, within_sec=1.0)] == [JOB]
    assert list(store.purge(JOB, "once more", batch_rows=2)) == [2, 4, 5]
    assert store.ended_jobs(0.0) == []
    assert list(store.purge(JOB, "and again")) == []
    kinds = [entry.kind for entry in store.log(JOB)]
    assert kinds.count(EntryKind.PURGED) == 1


def test_a_job_that_keeps_something_else_is_emptied_and_stays_due(store: Store) -> None:
    ended(store)
    assert list(store.purge(JOB, "asked for", batch_rows=2, unfinished=True)) == [0, 2, 4, 5]
    assert {record.text for record in store.completions(JOB)} == {""}
    assert list(store.rejected(JOB)) == [RejectedRow(4, None, "bad_id", "")]
    assert list(store.purge(JOB, "once more", unfinished=True)) == [5, 5]
    assert [job.job_id for job in store.ended_jobs(0.0)] == [JOB]
    assert list(store.purge(JOB, "and again")) == [5, 5]
    assert store.ended_jobs(0.0) == []
    assert [entry.kind for entry in store.log(JOB)].count(EntryKind.PURGED) == 1


def test_jobs_are_due_however_many_there_are(store: Store, clock: Clock) -> None:
    for n, tenant in enumerate(["one", "two", "one", "two", "one"]):
        ended(store, f"job-of-{tenant}-{n}", tenant=tenant)
        clock.advance(10.0)
    purger = Purger(store, Objects(), {"one": 0.0, "two": 0.0, "none": 0.0})
    for page in (1, 2, 3, 10):
        for age in (None, 0.0):
            found = [one.job.job_id[-1] for one in purger.due(None, age, page)]
            assert found == ["0", "1", "2", "3", "4"]
            assert [one.job.job_id[-1] for one in purger.due("two", age, page)] == ["1", "3"]
    for done in purger.due(None, 0.0, page=1):  # what is purged meanwhile hides no other
        list(purger.store.purge(done.job.job_id, done.why))
    assert store.ended_jobs(0.0) == []


def test_a_job_that_goes_on_is_not_purged_nor_a_purged_one_retried(store: Store) -> None:
    ingest(store)
    with pytest.raises(UsageError, match="cancel it first"):
        list(store.purge(JOB, "asked for"))
    for index in range(2):
        commit(store, verified(store, index))
    finish(store)
    list(store.purge(JOB, "asked for"))
    with pytest.raises(UsageError, match="was purged"):
        store.retry_job(JOB)


def test_jobs_are_found_by_age_and_tenant(store: Store, clock: Clock) -> None:
    ended(store, "job-of-one-0001", tenant="one")
    clock.advance(100.0)
    ended(store, "job-of-two-0001", tenant="two")
    clock.advance(10.0)
    assert [job.tenant for job in store.ended_jobs(0.0)] == ["one", "two"]
    assert [job.tenant for job in store.ended_jobs(60.0)] == ["one"]
    assert [job.tenant for job in store.ended_jobs(0.0, "two")] == ["two"]
    assert [job.tenant for job in store.ended_jobs(0.0, limit=1)] == ["one"]
    assert store.ended_jobs(111.0) == []


def test_jobs_whose_texts_are_not_kept_are_found_behind_any_number_of_others(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    for n in range(3):
        ended(store, f"job-that-is-full-{n}")
        clock.advance(10.0)
    modes = [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY, PrivacyMode.REDACTED]
    for n, mode in enumerate(modes):  # all of one moment
        work = tmp_path / str(n)
        work.mkdir()
        (work / "results.arrow").write_bytes(b"x")
        ended(store, f"job-private-{n}", privacy=mode, workspace_uri=str(work))
    names = [f"job-private-{n}" for n in range(3)]
    (first,) = store.ended_jobs(0.0, limit=1, private_only=True)
    assert first.job_id == names[0]
    rest = store.ended_jobs(0.0, limit=2, private_only=True, after=first)
    assert [job.job_id for job in rest] == names[1:]
    assert store.ended_jobs(0.0, private_only=True, after=rest[-1]) == []
    purger = Purger(store, Objects(), {})
    for page in (1, 2, 3):
        assert [job.job_id for job in purger.left_behind(page)] == names


def test_outputs_with_tokens_left_out_are_not_drafted_from(store: Store) -> None:
    ended(store, "job-of-one-0001")
    outputs = list(store.past_outputs("default", "nightly", "v", 1000, "x"))
    assert len(outputs) == 0, "those with an error are none"
    ingest(store, groups=1)
    lease = verified(store, 0)
    records = [completion(0), completion(1, token_ids=(7, NOT_KEPT, 9))]
    store.commit_group(lease, records, NO_TIME, {VOCABULARY: "v"})  # type: ignore[dict-item]  # a report holds words too
    assert [o.row_id for o in store.past_outputs("default", "nightly", "v", 99, "x")] == ["row-0"]


def test_a_job_keeps_the_mode_and_the_whole_spec_it_was_submitted_with(store: Store) -> None:
    job, _ = store.create_job(
        new_job(privacy=PrivacyMode.REDACTED, spec={"a": "[EMAIL]"}, sealed_spec='{"a": "x@y.z"}')
    )
    for found in (job, store.get_job(JOB), store.list_jobs()[0]):
        assert found.privacy is PrivacyMode.REDACTED
        assert found.spec == {"a": "x@y.z"}


def test_groups_with_results_come_in_the_order_of_their_rows(store: Store) -> None:
    ingest(store, groups=2)
    cut = verified_after_a_cut(store)
    commit(store, verified(store, 1))
    found = store.recorded_groups(JOB)
    assert [index for index, _, _ in found] == [0, cut, 1]
    assert all(results is not None for _, _, results in found)


def verified_after_a_cut(store: Store) -> int:
    """Group 0 is cut in two, and both parts are done; the index of the second."""
    work = store.claim_group(JOB, 0, Stage.VERIFY, "w", 60.0)
    assert work is not None
    cut = store.split_group(work.lease, 1)
    store.advance(work.lease, Stage.RECORD, work.prompts, NO_TIME)
    record = store.claim_group(JOB, 0, Stage.RECORD, "w", 60.0)
    assert record is not None
    store.commit_group(record.lease, [completion(0)], NO_TIME, {})
    lease = verified(store, cut)
    store.commit_group(lease, [completion(row) for row in (1, 2, 3)], NO_TIME, {})
    return cut
