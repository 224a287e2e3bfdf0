"""Who is next, on both databases: classes, tenants, jobs and groups, and one winner for each."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from contracts.shorthand import (
    F32,
    claim_job,
    exhaust,
    found,
    ingest,
    serving,
    successes,
    together,
)
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    ROW_BOUND,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)
from sqlalchemy import select

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.fair_share import SEC_PER_TOKEN
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.records import GroupWork, Lease, NewGroup, Stage, StageTiming
from specbatch.schemas.serving import BatchEnd, BatchStatus, NewBatch, Purpose, StoredFile
from specbatch.schemas.tables import Tenant

SPEC = {"sampling": {"max_tokens": 10, "n": 2}}


def plan(store: Store, job_id: str, groups: int, rows: int = 4, **values: object) -> None:
    """A job whose input is read, of equal groups."""
    store.create_job(new_job(job_id, spec=SPEC, **values))
    lease = found(store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)).lease
    store.add_groups(
        lease, [new_group(i, rows) for i in range(groups)], [], groups * rows, position()
    )
    store.finish_ingest(lease, groups * rows, {})


def next_of(store: Store, owner: str = "w", model: str = "big") -> GroupWork | None:
    return store.claim_next(Stage.VERIFY, model, owner, LEASE_SEC)


def order(store: Store) -> list[tuple[str, int | None]]:
    """All that can be claimed, in the order in which it is."""
    claimed = []
    while (work := next_of(store)) is not None:
        claimed.append((work.lease.job_id, work.lease.group_index))
    return claimed


def test_a_claim_is_that_of_claim_group(store: Store) -> None:
    ingest(store, groups=1)
    work = found(next_of(store, "w1"))
    assert work.lease == Lease(JOB, 0, Stage.VERIFY, 1, "w1", 1)
    assert (work.rows, work.prompts, work.prompt_tokens) == (4, new_group(0).prompts, 20)
    assert next_of(store) is None
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)


def test_the_longest_group_of_a_job_goes_first_and_then_the_lowest(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    groups = [new_group(i, rows) for i, rows in enumerate((4, 9, 1, 9, 6))]
    store.add_groups(lease, groups, [], 29, position())
    assert [index for _, index in order(store)] == [1, 3, 4, 0, 2]


def test_tenants_go_before_priorities_and_priorities_before_the_age_of_jobs(
    store: Store, clock: Clock
) -> None:
    plan(store, "job-low", 1, tenant="a", priority=2)
    clock.advance(1)
    plan(store, "job-a-old", 2, tenant="a")
    clock.advance(1)
    plan(store, "job-a-new", 1, tenant="a")
    clock.advance(1)
    plan(store, "job-b", 2, tenant="b")
    clock.advance(1)
    plan(store, "job-b-high", 1, tenant="b", priority=0)
    assert [job for job, _ in order(store)] == [
        "job-b-high", "job-a-old", "job-a-old", "job-b", "job-a-new", "job-b", "job-low",
    ]  # fmt: skip


def test_of_a_tenants_jobs_the_earlier_deadline_goes_before_the_older_job(
    store: Store, clock: Clock
) -> None:
    plan(store, "job-old", 1)
    plan(store, "job-later", 1, deadline_sec=9000.0)
    clock.advance(1)
    plan(store, "job-sooner", 1, deadline_sec=8000.0)
    assert [job for job, _ in order(store)] == ["job-sooner", "job-later", "job-old"]


def test_a_job_near_its_deadline_goes_before_another_tenant_by_a_minute_at_most(
    store: Store, clock: Clock
) -> None:
    plan(store, "job-other", 3, tenant="other")
    plan(store, "job-urgent", 4, tenant="urgent", deadline_sec=100.0)
    first, second = found(next_of(store)), found(next_of(store))
    assert {w.lease.job_id for w in (first, second)} == {"job-other", "job-urgent"}, "not yet"
    clock.advance(50.0)
    third, fourth = found(next_of(store)), found(next_of(store))
    assert {w.lease.job_id for w in (third, fourth)} == {"job-other", "job-urgent"}, "half is left"
    clock.advance(1.0)
    fifth, sixth = found(next_of(store)), found(next_of(store))
    assert [w.lease.job_id for w in (fifth, sixth)] == ["job-urgent"] * 2
    for work in (fifth, sixth):
        store.advance(work.lease, Stage.RECORD, RESULTS, StageTiming(40.0))
    assert found(next_of(store)).lease.job_id == "job-other", "it is ahead by 80 seconds"


def test_only_groups_of_the_model_and_the_stage_can_be_had(store: Store) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    assert next_of(store) is None
    assert store.claim_next(Stage.PROPOSE, "big", "w", LEASE_SEC) is None
    assert store.claim_next(Stage.RECORD, "big", "w", LEASE_SEC) is None
    lease = found(store.claim_next(Stage.PROPOSE, "small", "w", LEASE_SEC)).lease
    store.advance(lease, Stage.VERIFY, None, NO_TIME)
    assert next_of(store, model="small") is None
    assert found(next_of(store)).lease.stage is Stage.VERIFY


def test_a_group_whose_holder_vanished_is_claimed_again(store: Store, clock: Clock) -> None:
    ingest(store, groups=1)
    found(next_of(store))
    clock.advance(LEASE_SEC)
    assert found(next_of(store)).lease.token == 2


def test_nothing_of_a_cancelled_job_is_claimed_and_the_sweep_closes_it(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=2)
    found(next_of(store))
    store.request_cancel(JOB)
    clock.advance(LEASE_SEC)
    assert next_of(store) is None
    assert store.close_over() == 1
    assert store.get_job(JOB).stage is Stage.PUBLISH
    assert store.close_over() == 0


def test_used_up_attempts_are_passed_by_and_the_sweep_closes_them(
    store: Store, clock: Clock
) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    store.add_groups(lease, [new_group(0, rows=1)], [], 1, position())
    for _ in range(3):
        found(next_of(store))
        clock.advance(LEASE_SEC)
    assert next_of(store) is None
    assert store.close_over() == 1
    assert [word for _, word, _, _ in store.failed_groups(JOB)] == ["failed"]


def test_a_group_that_cannot_be_proposed_for_goes_on_by_the_sweep(
    store: Store, clock: Clock
) -> None:
    ingest(store, groups=1, first_stage=Stage.PROPOSE)
    for _ in range(3):
        found(store.claim_next(Stage.PROPOSE, "small", "w", LEASE_SEC))
        clock.advance(LEASE_SEC)
    assert store.claim_next(Stage.PROPOSE, "small", "w", LEASE_SEC) is None
    assert store.close_over() == 1
    assert found(next_of(store)).lease.attempt == 1


def test_the_sweep_leaves_what_somebody_may_claim(store: Store) -> None:
    ingest(store, groups=2)
    exhaust(store, 0)  # is cut in halves, which have an attempt left
    open_groups = len(store.due())
    assert store.close_over() == 0
    assert len(store.due()) == open_groups


def test_of_many_claimers_each_gets_another_group(store: Store) -> None:
    plan(store, "job-a", 10, tenant="a")
    plan(store, "job-b", 6, tenant="b")
    claims = successes(together(*[partial(next_of, store, f"w{n}") for n in range(24)]))
    won = [(work.lease.job_id, work.lease.group_index) for work in claims if work is not None]
    assert len(won) == len(set(won)) == 16


def test_claimers_that_race_leave_nothing_that_is_due(store: Store) -> None:
    """A message must not be lost because others were faster."""
    for number in range(12):
        plan(store, f"job-{number:02d}", 1, tenant=f"t{number}")
    claims = successes(together(*[partial(next_of, store, f"w{n}") for n in range(12)]))
    assert all(work is not None for work in claims)
    assert store.due() == []


# --- shares ---------------------------------------------------------------------------------


@pytest.fixture
def weighted(url: str, clock: Clock) -> Iterator[Callable[[dict[str, float]], Store]]:
    """Opens a store with weights of tenants."""
    opened: list[Store] = []

    def open_one(weights: dict[str, float]) -> Store:
        store = open_store(url, max_attempts=3, clock=clock, weights=weights)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def drain(store: Store, claimers: int, others: int) -> list[tuple[str, int]]:
    """(tenant's job, rows) in the order of the claims, until the other tenant's groups are gone.

    So many groups are held at a time, by as many claimers. Who holds a group ends it in turn, the
    oldest first: there is no time, and nothing is random.
    """
    held: deque[GroupWork] = deque()
    claimed = []
    while True:
        work = next_of(store, f"w{len(claimed) % claimers}")
        if work is not None:
            claimed.append((work.lease.job_id, work.rows))
            held.append(work)
            others -= work.lease.job_id == "job-other"
        if not others:
            return claimed
        if len(held) >= claimers or work is None:
            done = held.popleft()
            lease, took = done.lease, StageTiming(float(done.rows))
            store.advance(lease, Stage.RECORD, RESULTS, took)
            lease = found(
                store.claim_group(lease.job_id, lease.group_index or 0, Stage.RECORD, "r", 60)
            ).lease
            store.commit_group(lease, [completion(0)], NO_TIME, {})


def shares(claimed: list[tuple[str, int]], one: str) -> list[float]:
    """The share of `one` in the rows served, after each claim up to its last."""
    last = max(place for place, (job, _) in enumerate(claimed) if job == one)
    rows: Counter[str] = Counter()
    found_shares = []
    for job, count in claimed[: last + 1]:
        rows[job] += count
        found_shares.append(rows[one] / rows.total())
    return found_shares


@pytest.mark.parametrize("claimers", [1, 5])
def test_who_floods_takes_nothing_of_the_others_share(store: Store, claimers: int) -> None:
    """Ten times the groups, and there first: as long as both have work each has its half."""
    plan(store, "job-flood", 120, tenant="flood")
    plan(store, "job-other", 12, tenant="other")
    claimed = drain(store, claimers, others=12)
    for share in shares(claimed, "job-other")[9:]:
        assert share == pytest.approx(0.5, rel=0.1)


def test_many_jobs_of_one_tenant_count_as_one(store: Store) -> None:
    for number in range(10):
        plan(store, f"job-flood-{number}", 12, tenant="flood")
    plan(store, "job-other", 12, tenant="other")
    for share in shares(drain(store, 3, others=12), "job-other")[9:]:
        assert share == pytest.approx(0.5, rel=0.1)


def test_large_groups_do_not_buy_a_larger_share(store: Store) -> None:
    plan(store, "job-flood", 100, rows=12, tenant="flood")
    plan(store, "job-other", 60, rows=4, tenant="other")
    for share in shares(drain(store, 3, others=60), "job-other")[39:]:
        assert share == pytest.approx(0.5, rel=0.1)


def test_tenants_share_by_their_weights(weighted: Callable[[dict[str, float]], Store]) -> None:
    store = weighted({"other": 3.0})
    plan(store, "job-flood", 100, tenant="flood")
    plan(store, "job-other", 60, tenant="other")
    for share in shares(drain(store, 4, others=60), "job-other")[19:]:
        assert share == pytest.approx(0.75, rel=0.1)


def test_who_comes_back_after_idling_has_saved_nothing(store: Store) -> None:
    plan(store, "job-flood", 60, tenant="flood")
    for _ in range(30):
        found(next_of(store))
    plan(store, "job-late", 20, tenant="late")
    claimed = [found(next_of(store)).lease.job_id for _ in range(20)]
    assert 9 <= claimed.count("job-late") <= 11


COST = 4 * ROW_BOUND * SEC_PER_TOKEN  # of a claim of `plan`, before a group has ended


def clocks(store: Store) -> dict[str, tuple[float, float]]:
    """When each tenant's last claim began in virtual time, and what it was served by then."""
    assert isinstance(store, SqlStore)
    with store._db._reader.begin() as connection:
        rows = connection.execute(select(Tenant.tenant, Tenant.started, Tenant.served))
        return {row.tenant: (row.started, row.served) for row in rows}


def test_a_claim_moves_its_tenant_on_by_its_cost(store: Store, clock: Clock) -> None:
    plan(store, "job-a", 4, tenant="a")
    clock.advance(1)
    plan(store, "job-b", 2, tenant="b")
    found(next_of(store))
    assert clocks(store) == {"a": (0.0, COST)}, "the one that waits has no time yet"
    found(next_of(store))
    assert clocks(store) == {"a": (0.0, COST), "b": (0.0, COST)}
    found(next_of(store))
    assert clocks(store)["a"] == (COST, 2 * COST)
    plan(store, "job-late", 1, tenant="late")
    for job in ("job-b", "job-late"):
        assert found(next_of(store)).lease.job_id == job
    assert clocks(store)["late"] == (COST, 2 * COST), "where the furthest of the others began"


def test_the_end_of_an_attempt_charges_what_it_took(store: Store) -> None:
    plan(store, "job-a", 3, tenant="a")
    lease = found(next_of(store)).lease
    store.advance(lease, Stage.RECORD, RESULTS, StageTiming(16.0))
    assert clocks(store)["a"] == (0.0, pytest.approx(16.0))
    lease = found(next_of(store)).lease
    assert clocks(store)["a"] == (pytest.approx(16.0), pytest.approx(32.0)), "as the one before"
    assert store.release(lease, "the worker was stopped", forgiven=True)
    assert clocks(store)["a"][1] == pytest.approx(16.0), "nothing was reported of it"


def test_what_was_charged_too_much_is_not_lost_to_who_claimed_meanwhile(store: Store) -> None:
    """`a` was charged with 1000 seconds and took 10. `b` began at 500 meanwhile, which is no
    reason for `a` to begin there too."""
    for tenant in "ab":
        plan(store, f"job-{tenant}", 9, tenant=tenant)
    for took in (1000.0, 500.0):
        lease = found(next_of(store)).lease
        store.advance(lease, Stage.RECORD, RESULTS, StageTiming(took))
    assert {t: served for t, (_, served) in clocks(store).items()} == {
        "a": pytest.approx(1000.0), "b": pytest.approx(500.0)
    }  # fmt: skip
    second = found(next_of(store)).lease
    assert second.job_id == "job-b"
    third = found(next_of(store)).lease
    assert clocks(store)["a"][1] == pytest.approx(2000.0), third
    store.advance(third, Stage.RECORD, RESULTS, StageTiming(10.0))
    store.advance(second, Stage.RECORD, RESULTS, StageTiming(1600.0))
    next_of_a = found(next_of(store)).lease
    assert next_of_a.job_id == "job-a"
    assert clocks(store)["a"][0] == pytest.approx(1010.0)


class Rules:
    """Who is next and where tenants stand, from the words of the rules. Groups stay open."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.jobs: dict[str, tuple[str, int, list[int]]] = {}  # tenant, class, rows of free groups
        self.times: dict[str, tuple[float, float]] = {}

    def claim(self) -> tuple[str, int] | None:
        """(job, rows): whose tenant begins first, of it the highest class, the oldest job, its
        longest group."""
        due = [(job, *of) for job, of in self.jobs.items() if of[2]]
        if not due:
            return None
        starts = {tenant: self.start(tenant) for _, tenant, _, _ in due}
        job, tenant, _, free = min(due, key=lambda one: (starts[one[1]], one[2], one[0]))
        rows = max(free)
        free.remove(rows)
        cost = rows * ROW_BOUND * SEC_PER_TOKEN / self.weights.get(tenant, 1.0)
        self.times[tenant] = min(starts.values()), starts[tenant] + cost
        return job, rows

    def start(self, tenant: str) -> float:
        """Where a claim of the tenant begins: nowhere behind the others."""
        others = {t for t, _, _ in self.jobs.values() if t != tenant}
        floor = max((self.times.get(other, (0.0, 0.0))[0] for other in others), default=0.0)
        return max(self.times.get(tenant, (0.0, 0.0))[1], floor)


@pytest.mark.parametrize("seed", range(6))
def test_claims_and_the_times_of_tenants_are_those_of_the_rules(
    weighted: Callable[[dict[str, float]], Store], clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    weights = {"a": 1000.0, "b": 3.0, "c": 0.5}
    store, rules = weighted(weights), Rules(weights)
    for number in range(24):
        if number % 3 == 0:
            job, tenant, of_class = (
                f"job-{number:02d}",
                chance.choice("abcd"),
                chance.choice([0, 1]),
            )
            sizes = [chance.randint(1, 12) for _ in range(chance.randint(1, 6))]
            clock.advance(1)
            store.create_job(new_job(job, spec=SPEC, tenant=tenant, priority=of_class))
            lease = found(store.claim_job(job, Stage.INGEST, "i", LEASE_SEC)).lease
            groups = [new_group(index, rows) for index, rows in enumerate(sizes)]
            store.add_groups(lease, groups, [], sum(sizes), position())
            rules.jobs[job] = tenant, of_class, sizes
        work = next_of(store)
        claimed = None if work is None else (work.lease.job_id, work.rows)
        assert claimed == rules.claim()
        assert clocks(store) == {
            tenant: pytest.approx(times) for tenant, times in rules.times.items()
        }


def test_a_claim_is_charged_to_the_weight_that_the_tenant_has_by_then(
    weighted: Callable[[dict[str, float]], Store],
) -> None:
    before, after = weighted({"a": 2.0}), weighted({"a": 4.0})
    plan(before, "job-a", 2, tenant="a")
    for store, weight, served in ((before, 2.0, COST / 2), (after, 4.0, COST / 2 + COST / 4)):
        found(next_of(store))
        assert clocks(store)["a"][1] == served
        assert isinstance(store, SqlStore)
        with store._db._reader.begin() as connection:
            assert connection.scalar(select(Tenant.weight)) == weight


def test_a_claim_by_number_is_charged_when_its_attempt_ends(store: Store) -> None:
    """Nobody chose it for its turn, so there is no estimate."""
    plan(store, "job-a", 2, tenant="a")
    first = found(next_of(store)).lease
    store.advance(first, Stage.RECORD, RESULTS, StageTiming(16.0))
    lease = found(store.claim_group("job-a", 1, Stage.VERIFY, "w", LEASE_SEC)).lease
    assert clocks(store)["a"][1] == pytest.approx(16.0)
    store.advance(lease, Stage.RECORD, RESULTS, StageTiming(10.0))
    assert clocks(store)["a"][1] == pytest.approx(26.0)


def test_one_that_was_never_served_goes_before_one_that_was(
    weighted: Callable[[dict[str, float]], Store], clock: Clock
) -> None:
    store = weighted({"heavy": 1000.0})  # a claim costs it next to nothing
    plan(store, "job-heavy", 2, tenant="heavy")
    found(next_of(store))
    clock.advance(1)
    plan(store, "job-new", 1, tenant="new")
    assert found(next_of(store)).lease.job_id == "job-new"


def test_a_new_group_is_seen_at_once(store: Store) -> None:
    """Reading goes on while groups are claimed."""
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    assert next_of(store) is None
    planned: list[NewGroup] = [new_group(0)]
    store.add_groups(lease, planned, [], 4, position())
    assert found(next_of(store)).lease.group_index == 0


# --- a process that works on one job, as the one of `specbatch serve` ---------------------------


def put_in_line(store: Store, job_id: str, tenant: str) -> str:
    """A batch that waits for its turn; its id."""
    file_id, batch_id = f"file-{job_id}", f"batch-{job_id}"
    store.add_file(StoredFile(file_id, tenant, Purpose.BATCH, "name", 1, "f" * 64, "here"))
    made = (batch_id, tenant, "/v1/completions", file_id, "24h", 86_400.0, "digest", "here")
    store.add_batch(NewBatch(*made), 10)
    store.begin_batch(batch_id, "big", 1)
    store.note_batch_job(batch_id, job_id)
    return batch_id


def claim_of(store: Store, job_id: str, model: str = "big") -> GroupWork | None:
    """The next claim of a process that works on this job alone."""
    serves = replace(serving(F32, model), only_job=job_id)
    return store.claim_next(Stage.VERIFY, model, f"process of {job_id}", LEASE_SEC, serves)


@pytest.mark.parametrize(
    ("of_the_other", "begins"),
    [
        ("is in line", 2 * COST),
        ("is in line and its input is not read", 2 * COST),
        ("waits for a budget", 0.0),
        ("has ended", 0.0),
        ("is not there", 0.0),
    ],
)
def test_a_process_of_one_job_begins_where_tenants_are_whose_batches_are_in_line(
    store: Store, of_the_other: str, begins: float
) -> None:
    """Nobody else claims there, yet a tenant that comes late has nothing of the past."""
    plan(store, "job-other", 4, tenant="other")
    for _ in range(3):
        assert found(claim_of(store, "job-other")).lease.job_id == "job-other"
    plan(store, "job-mine", 2, tenant="mine")
    put_in_line(store, "job-mine", "mine")
    if "not read" in of_the_other:
        store.create_job(new_job("job-unread", tenant="other"))
        put_in_line(store, "job-unread", "other")
    elif of_the_other != "is not there":
        batch_id = put_in_line(store, "job-other", "other")
        if of_the_other == "has ended":
            store.end_batch(batch_id, BatchEnd(BatchStatus.CANCELLED))
        if of_the_other == "waits for a budget":
            store.note_batch_waits(batch_id, "tokens are left tomorrow")
    assert found(claim_of(store, "job-mine")).lease.job_id == "job-mine"
    assert clocks(store)["mine"] == (begins, begins + COST)


def test_a_process_of_one_job_goes_ahead_of_others_and_does_not_take_them_with_it(
    store: Store,
) -> None:
    """One that comes next begins where those are who wait, and not behind who went ahead."""
    plan(store, "job-mine", 3, tenant="mine")
    store.create_job(new_job("job-unread", tenant="other"))
    put_in_line(store, "job-unread", "other")
    for _ in range(3):
        found(claim_of(store, "job-mine"))
    assert clocks(store) == {"mine": (0.0, 3 * COST)}


def test_batches_in_line_are_not_work_for_who_serves_another_model(store: Store) -> None:
    plan(store, "job-mine", 1)
    put_in_line(store, "job-mine", "default")
    worker = serving(F32, "another")
    assert store.claim_next(Stage.VERIFY, "another", "w", LEASE_SEC, worker) is None
    assert claim_of(store, "job-other", "another") is None
    assert found(claim_of(store, "job-mine")).lease.job_id == "job-mine"


def test_the_turn_of_a_running_job_tells_what_its_held_groups_are_charged_with(
    store: Store, clock: Clock
) -> None:
    for tenant in "ab":
        plan(store, f"job-{tenant}", 3, tenant=tenant)
    assert [found(next_of(store)).lease.job_id for _ in range(3)] == ["job-a", "job-b", "job-a"]

    turns = store.in_turn(["job-a", "job-b"])
    assert [(turn.job.job_id, turn.job.served) for turn in turns] == [
        ("job-b", COST), ("job-a", 2 * COST)
    ]  # fmt: skip

    def under_way(running: str | None) -> dict[str, float]:
        turns = store.in_turn(["job-a", "job-b"], running)
        return {turn.job.job_id: turn.job.under_way_sec for turn in turns}

    assert under_way(None) == {"job-a": 0.0, "job-b": 0.0}
    assert under_way("job-a") == {"job-a": pytest.approx(2 * COST), "job-b": 0.0}
    clock.advance(LEASE_SEC)
    assert under_way("job-a") == {"job-a": 0.0, "job-b": 0.0}, "their leases ran out"
