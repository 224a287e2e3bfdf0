"""Jobs and the reading of their input: one test body for both databases.

In memory, SQLite and PostgreSQL. Time is a clock that tests move, so nothing sleeps. What is
true of one database only (its own clock, lost connections, statements) is in `tests/ledger`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from contracts.shorthand import (
    claim,
    claim_job,
    commit,
    ingest,
    stage_of,
    successes,
    together,
    verified,
)
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    START,
    Clock,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import (
    FencedError,
    IdempotencyError,
    JobNotFoundError,
    SpecError,
    StoreError,
)
from specbatch.schemas.records import (
    JobState,
    NewJob,
    RejectedRow,
    Stage,
)
from specbatch.schemas.spec import load_spec
from specbatch.schemas.speculation import VOCABULARY

# --- jobs -----------------------------------------------------------------------------------


def test_a_new_job_is_queued_and_can_be_read_back(store: Store) -> None:
    row, created = store.create_job(new_job(idempotency_key="k"))
    assert created
    assert (row.state, row.stage, row.created_at) == (JobState.QUEUED, Stage.INGEST, START)
    assert row == store.get_job(JOB)
    assert row.spec == new_job().spec


@pytest.mark.parametrize("sampling", [{"stop": ["a\0"]}, {"stop": "\0"}, {"a\0": 1}])
def test_a_spec_with_a_null_character_is_refused(store: Store, sampling: dict[str, Any]) -> None:
    """PostgreSQL would keep it, and then no worker could claim any job."""
    with pytest.raises(SpecError, match=r"field `sampling.*U\+0000.*leave it out"):
        store.create_job(new_job(spec={**new_job().spec, "sampling": sampling}))
    assert store.list_jobs() == []
    where = {"input": {"uri": "in.parquet"}, "output": {"uri": "out"}, "verifier": "v"}
    with pytest.raises(SpecError):
        load_spec({**where, "sampling": sampling})
    for text in ("a\\0", "\\u0000", "\x01"):
        load_spec({**where, "sampling": {"stop": text}})


def test_statements_look_into_a_report_that_was_given_a_null_character(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.note_report(lease, {VOCABULARY: "v", "said": "a\0\0", "kept": "\\u0000"})
    assert list(store.past_outputs("default", "nightly", "v", 10, "another")) == []
    assert store.get_job(JOB).report["kept"] == "\\u0000"


def test_a_job_is_found_by_its_key_and_no_other_is(store: Store) -> None:
    first, _ = store.create_job(new_job(idempotency_key="k"))
    store.create_job(new_job("job00000000000002", idempotency_key=None))
    assert store.job_of_key("k") == first
    assert store.job_of_key("K") is None
    assert store.job_of_key("") is None


def test_the_same_key_and_spec_give_the_same_job(store: Store) -> None:
    first, _ = store.create_job(new_job(idempotency_key="k"))
    again, created = store.create_job(new_job("job00000000000002", idempotency_key="k"))
    assert (again, created) == (first, False)
    assert len(store.list_jobs()) == 1


def test_the_same_key_with_another_spec_names_what_differs(store: Store) -> None:
    store.create_job(new_job(idempotency_key="k"))
    other = new_job(
        "job00000000000002",
        idempotency_key="k",
        spec_digest="digest-2",
        spec={"name": "other", "sampling": {"temperature": 1.0, "n": 1}, "verifier": "big"},
    )
    with pytest.raises(IdempotencyError, match=r"differs in: name, sampling\.temperature\)"):
        store.create_job(other)


OLD_SPEC = {  # as version 0.1.0 stored one, every field with its default
    "name": "nightly", "tenant": "default", "verifier": "/big", "proposer": "/small",
    "input": {
        "uri": "/in.parquet", "format": "auto", "prompt_column": "prompt", "prompt_kind": "auto",
        "id_column": None, "seed_column": None, "tag_column": None,
    },
    "output": {"uri": "/out"},
    "sampling": {
        "max_tokens": 64, "min_tokens": 0, "temperature": 0.8, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "seed": 0, "n": 1, "stop_token_ids": [], "ignore_eos": False,
    },
    "speculation": {"depth": "auto", "pregenerate": "auto", "pregenerate_tokens": 16},
    "engine": {"dtype": "auto", "exactness": "bitwise"},
    "group_size": 64, "max_prompt_tokens": None,
}  # fmt: skip


def _resubmitted(**sampling: Any) -> NewJob:
    spec = load_spec(
        {
            "name": "nightly",
            "input": {"uri": "/in.parquet"},
            "output": {"uri": "/out"},
            "verifier": "/big",
            "proposer": "/small",
            "sampling": {"max_tokens": 64, "temperature": 0.8, **sampling},
        }
    )
    return new_job(
        "job00000000000002",
        idempotency_key="k",
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest(),
    )


def test_a_job_of_an_earlier_version_is_found_by_its_key(store: Store) -> None:
    old = new_job(idempotency_key="k", spec=OLD_SPEC, spec_digest="of every field there was")
    first, _ = store.create_job(old)
    assert store.create_job(_resubmitted()) == (first, False)
    with pytest.raises(IdempotencyError, match=r"differs in: sampling\.top_p\)"):
        store.create_job(_resubmitted(top_p=0.9))


def test_a_known_job_id_is_not_created_twice(store: Store) -> None:
    first, _ = store.create_job(new_job())
    assert store.create_job(new_job()) == (first, False)
    with pytest.raises(IdempotencyError, match=f"job id {JOB}"):
        store.create_job(new_job(spec_digest="digest-2"))


def test_jobs_without_a_key_are_never_the_same(store: Store) -> None:
    for number in range(3):
        assert store.create_job(new_job(f"job0000000000000{number}", idempotency_key=None))[1]
    assert store.create_job(new_job("job00000000000009", idempotency_key=""))[1]
    assert store.create_job(new_job("job00000000000008", idempotency_key=""))[1]


def test_concurrent_submissions_with_one_key_create_one_job(store: Store) -> None:
    jobs = [new_job(f"job0000000000000{n}", idempotency_key="k") for n in range(4)]
    results = successes(together(*[partial(store.create_job, job) for job in jobs]))
    assert sum(created for _, created in results) == 1
    assert len({row.job_id for row, _ in results}) == 1


def test_a_job_is_found_by_a_unique_prefix(store: Store) -> None:
    store.create_job(new_job("abcdef0000000001"))
    store.create_job(new_job("abcdefg"))
    store.create_job(new_job("abcdef"))
    assert store.get_job("abcdef00").job_id == "abcdef0000000001"
    assert store.get_job("abcdef").job_id == "abcdef"
    with pytest.raises(JobNotFoundError, match="no job"):
        store.get_job("abcde")
    with pytest.raises(JobNotFoundError, match="no job"):
        store.get_job("%bcdef")


def test_a_job_is_found_by_a_name_that_no_other_has_and_the_newest_as_latest(
    store: Store, clock: Clock
) -> None:
    with pytest.raises(JobNotFoundError, match="no job 'latest' in this store"):
        store.get_job("latest")
    for job_id, name in (("abcdef01", "one"), ("abcdef02", "two"), ("abcdef03", "two")):
        clock.advance(1)
        store.create_job(new_job(job_id, name=name))
    assert store.get_job("one").job_id == "abcdef01"
    assert store.get_job("latest").job_id == "abcdef03"
    with pytest.raises(JobNotFoundError, match="more than one job is named 'two': abcdef03, abcd"):
        store.get_job("two")
    store.create_job(new_job("one"))
    assert store.get_job("one").job_id == "one", "an id wins over a name"


def test_a_prefix_of_several_jobs_is_refused_with_the_first_of_them(store: Store) -> None:
    ids = [f"abcdef0{number}" for number in range(6)]
    for number, job_id in enumerate(ids):
        store.create_job(new_job(job_id))
        for call in (store.get_job, store.logged_job)[: 2 * number]:
            with pytest.raises(JobNotFoundError, match="more than one job") as refused:
                call("abcdef")
            named = [one for one in ids if one in str(refused.value)]
            assert named == ids[: min(number + 1, 4)]
            assert ("…" in str(refused.value)) == (number >= 4)


def test_jobs_are_listed_newest_first(store: Store, clock: Clock) -> None:
    for number in range(4):
        clock.advance(1)
        store.create_job(new_job(f"job0000000000000{number}"))
    assert [job.job_id[-1] for job in store.list_jobs(limit=3)] == ["3", "2", "1"]
    assert len(store.list_jobs(state=JobState.QUEUED)) == 4
    assert store.list_jobs(state=JobState.DONE) == []


def test_every_operation_on_an_unknown_job_says_so(store: Store) -> None:
    for call in (store.get_job, store.progress, store.request_cancel, store.retry_job):
        with pytest.raises(JobNotFoundError):
            call("nosuchjob")
    assert store.claim_job("nosuchjob", Stage.INGEST, "w", 1) is None
    assert store.claim_group("nosuchjob", 0, Stage.VERIFY, "w", 1) is None


# --- ingest ---------------------------------------------------------------------------------


def test_the_first_claim_of_ingest_starts_the_job(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    clock.advance(5)
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row, work.cursor) == (0, 0, None)
    job = store.get_job(JOB)
    assert (job.state, job.started_at) == (JobState.RUNNING, START + 5)


def test_ingest_resumes_where_its_last_transaction_ended(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = RejectedRow(3, None, "empty_prompt", "the prompt is empty")
    store.add_groups(lease, [new_group(0), new_group(1)], [bad], 9, position(9))
    clock.advance(LEASE_SEC + 1)
    work = claim_job(store, Stage.INGEST, "another")
    assert (work.next_group, work.next_row, work.cursor) == (2, 9, position(9))
    assert work.lease.token == lease.token + 1
    with pytest.raises(FencedError):
        store.add_groups(lease, [new_group(2)], [], 12, position(12))
    with pytest.raises(FencedError):
        store.finish_ingest(lease, 9, {})
    assert store.get_job(JOB).started_at == START


def test_groups_must_carry_on_where_the_last_ended(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    for wrong in ([new_group(0)], [new_group(2)], [new_group(1), new_group(1)]):
        with pytest.raises(StoreError, match="must have index 1"):
            store.add_groups(lease, wrong, [], 8, position(8))
    assert claim(store, 0).rows == 4


def test_a_failed_add_groups_leaves_nothing_behind(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = RejectedRow(1, "x", "c", "r")
    store.add_groups(lease, [], [bad], 2, position(2))
    with pytest.raises(StoreError):
        store.add_groups(lease, [new_group(0)], [bad], 8, position(8))
    store.release(lease, "row twice")
    work = claim_job(store, Stage.INGEST)
    assert (work.next_group, work.next_row) == (0, 2)
    assert store.claim_group(JOB, 0, Stage.VERIFY, "w", 1) is None


def test_groups_can_be_worked_on_while_the_input_is_read(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    commit(store, verified(store, 0))
    assert stage_of(store) is Stage.INGEST
    store.finish_ingest(lease, 4, {"verifier_sha256": "abc", "vocab": 32000})
    job = store.get_job(JOB)
    assert (job.stage, job.rows_total, job.groups_total) == (Stage.PUBLISH, 4, 1)
    assert job.report == {"verifier_sha256": "abc", "vocab": 32000}


def test_an_empty_input_goes_straight_to_publish(store: Store) -> None:
    ingest(store, groups=0)
    assert stage_of(store) is Stage.PUBLISH


def test_ingest_that_fails_every_time_fails_the_job(store: Store) -> None:
    store.create_job(new_job())
    for attempt in range(3):
        lease = claim_job(store, Stage.INGEST).lease
        assert lease.attempt == attempt + 1
        store.release(lease, "the file is gone")
    job = store.get_job(JOB)
    assert (job.state, job.stage, job.error) == (JobState.FAILED, Stage.END, "the file is gone")
    assert store.due() == []


def test_ingest_whose_workers_vanish_fails_the_job(store: Store, clock: Clock) -> None:
    store.create_job(new_job())
    for _ in range(3):
        claim_job(store, Stage.INGEST)
        clock.advance(LEASE_SEC + 1)
    assert store.claim_job(JOB, Stage.INGEST, "w", LEASE_SEC) is None
    job = store.get_job(JOB)
    assert job.state is JobState.FAILED
    assert "vanished 3 times" in (job.error or "")


def test_progress_of_ingest_gives_it_its_attempts_back(store: Store) -> None:
    store.create_job(new_job())
    for index in range(5):
        lease = claim_job(store, Stage.INGEST).lease
        store.add_groups(lease, [new_group(index)], [], index * 4 + 4, position())
        store.release(lease, "killed")
    assert stage_of(store) is Stage.INGEST


def test_failing_a_job_takes_its_groups_away(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0), new_group(1)], [], 8, position(8))
    held = claim(store, 0).lease
    store.fail_job(lease, "the model has no tokenizer")
    job = store.get_job(JOB)
    assert (job.state, job.error) == (JobState.FAILED, "the model has no tokenizer")
    assert job.finished_at == START
    assert store.heartbeat([held], LEASE_SEC) == ({held}, set(), set())
    with pytest.raises(FencedError):
        store.advance(held, Stage.RECORD, RESULTS, NO_TIME)
    assert [word for _, word, _, _ in store.failed_groups(JOB)] == ["cancelled", "cancelled"]
    with pytest.raises(FencedError):
        store.fail_job(lease, "again")
