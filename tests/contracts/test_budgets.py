"""Budgets of tenants, on both databases: what a claim reserves, what a commit books, who waits and
who stops; and random lives of two tenants, after each step of which nothing is overspent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from contracts.shorthand import claim_job, found, serving, successes, together
from ledger.builders import (
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

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.budgets import Account, LeastTokens, Period, Spent
from specbatch.schemas.errors import FencedError, OverBudgetError, UsageError
from specbatch.schemas.records import CompletionRecord, GroupWork, JobState, Lease, Stage

ROWS = 4
GROUP = ROWS * ROW_BOUND  # the bound of a group: 64
OF_ROW = 8  # tokens of each completion here: 5 of the prompt, 3 of the output
DAY = 86_400.0


def ingest(store: Store, job_id: str, tenant: str = "acme", groups: int = 3) -> None:
    store.create_job(new_job(job_id, tenant=tenant))
    lease = claim_job(store, Stage.INGEST, job_id=job_id).lease
    store.add_groups(lease, [new_group(i, ROWS) for i in range(groups)], [], 4 * groups, position())
    store.finish_ingest(lease, 4 * groups, {})


def claim(store: Store, owner: str = "w1", stage: Stage = Stage.VERIFY) -> GroupWork | None:
    return store.claim_next(stage, "big", owner, LEASE_SEC)


def account(store: Store, tenant: str = "acme") -> Account:
    return next(one for one in store.tenant_accounts() if one.tenant == tenant)


def records(work: GroupWork, rows: int | None = None) -> list[CompletionRecord]:
    first = (work.lease.group_index or 0) * 1000 + work.row_start
    mine = range(first, first + (work.rows if rows is None else rows))
    return [completion(row, reused_from=None) for row in mine]


def verify(store: Store, work: GroupWork) -> Lease:
    """Its lease at RECORD."""
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    where = (work.lease.job_id, work.lease.group_index or 0)
    return found(store.claim_group(*where, Stage.RECORD, "r", LEASE_SEC)).lease


def record(store: Store, work: GroupWork, rows: int | None = None) -> None:
    store.commit_group(verify(store, work), records(work, rows), NO_TIME, {})


def limit(store: Store, tokens: int, period: Period = Period.TOTAL, tenant: str = "acme") -> None:
    store.set_budget(tenant, period, tokens, None, "a test")


# --- what is set --------------------------------------------------------------------------------


def test_a_budget_replaces_the_one_of_its_period_and_the_history_has_both(
    url: str, clock: Clock
) -> None:
    store = open_store(url, clock=clock, actor="alice")
    first = store.set_budget("acme", Period.DAY, 100, None, "a trial")
    clock.advance(5)
    second = store.set_budget("acme", Period.DAY, 200, 1.5, "see amqp://me:secret@host")
    month = store.set_budget("acme", Period.MONTH, 900, None, "a plan")
    assert (first.set_by, first.ended_at, second.reason) == (
        "alice",
        None,
        "see amqp://me:***@host",
    )
    assert store.budgets() == [second, month]
    ended = replace(first, ended_at=clock.now, ended_by="alice", end_reason=second.reason)
    assert store.budgets(history=True) == [ended, second, month]
    assert account(store).budgets == (second, month)
    removed = store.remove_budget("acme", Period.DAY, "over")
    assert removed == replace(second, ended_at=clock.now, ended_by="alice", end_reason="over")
    assert store.remove_budget("acme", Period.DAY, "over") is None
    assert store.budgets() == [month]
    with pytest.raises(UsageError, match="name one"):
        store.set_budget("acme", Period.DAY, None, None, "nothing")
    store.close()


# --- reserved and booked ------------------------------------------------------------------------


def test_a_claim_reserves_the_bound_and_the_commit_books_what_was_spent(store: Store) -> None:
    ingest(store, "job-1")
    limit(store, 2 * GROUP)
    work = found(claim(store))
    assert account(store).reserved_tokens == GROUP
    lease = verify(store, work)
    assert account(store).reserved_tokens == GROUP, "its results wait to be recorded"
    store.commit_group(lease, records(work), NO_TIME, {})
    of = account(store)
    assert (of.reserved_tokens, of.spent[Period.TOTAL]) == (0, Spent(ROWS * OF_ROW, ROWS * 0.25))
    assert of.spent[Period.DAY] == of.spent[Period.MONTH] == of.spent[Period.TOTAL]


def test_a_copy_of_an_earlier_completion_is_free(store: Store) -> None:
    ingest(store, "job-1")
    work = found(claim(store))
    done = records(work)
    done[1:] = [replace(one, reused_from="job/0/0") for one in done[1:]]
    store.commit_group(verify(store, work), done, NO_TIME, {})
    assert account(store).spent[Period.TOTAL] == Spent(OF_ROW, 0.25)


def test_a_group_is_claimed_only_if_what_is_left_covers_its_bound(store: Store) -> None:
    ingest(store, "job-1")
    limit(store, 2 * GROUP - 1)
    work = found(claim(store, "w1"))
    assert claim(store, "w2") is None
    assert store.claim_group("job-1", 1, Stage.VERIFY, "w2", LEASE_SEC) is None
    assert store.due(job_id="job-1") == [], "nobody is sent for what nobody may claim"
    assert "reserved" in store.backlog().waiting()["job-1"]
    assert store.stop_overdue() == set(), "what is under way may give some back"
    record(store, work)  # 32 of 127 are spent
    assert store.due(job_id="job-1")
    again = found(claim(store, "w2"))
    store.release(again.lease, "stopped", forgiven=True)
    assert account(store).reserved_tokens == 0, "a release ends the reservation"
    assert store.claim_group("job-1", again.lease.group_index or 0, Stage.VERIFY, "w", LEASE_SEC)


def test_the_longest_group_that_is_covered_is_next(store: Store) -> None:
    store.create_job(new_job("job-1", tenant="acme"))
    lease = claim_job(store, Stage.INGEST, job_id="job-1").lease
    planned = [new_group(index, rows) for index, rows in enumerate((9, 2, 5))]
    store.add_groups(lease, planned, [], 16, position())
    limit(store, 6 * ROW_BOUND)
    assert found(claim(store)).rows == 5
    assert claim(store) is None


def test_other_tenants_are_served_while_one_has_no_tokens(store: Store) -> None:
    for number in range(12):  # more than a round of claims tries
        ingest(store, f"job-{number:02}", groups=1)
    limit(store, GROUP - 1)
    ingest(store, "other", "else")
    assert found(claim(store)).lease.job_id == "other"


def test_drafting_takes_nothing_of_a_budget_and_waits_for_none(store: Store) -> None:
    store.create_job(new_job("job-1", tenant="acme"))
    lease = claim_job(store, Stage.INGEST, job_id="job-1").lease
    store.add_groups(lease, [new_group(0, ROWS, Stage.PROPOSE)], [], ROWS, position())
    limit(store, 1)
    work = found(store.claim_next(Stage.PROPOSE, "small", "w1", LEASE_SEC))
    assert account(store).reserved_tokens == 0
    store.release(work.lease, "stopped", forgiven=True)
    assert store.claim_group("job-1", 0, Stage.PROPOSE, "w1", LEASE_SEC)


def test_an_expired_lease_keeps_its_reservation_until_it_is_claimed_again(
    store: Store, clock: Clock
) -> None:
    """Its holder may still write. Else what it wrote would not be covered."""
    ingest(store, "job-1", groups=2)
    limit(store, GROUP)
    work = found(claim(store, "w1"))
    clock.advance(LEASE_SEC + 1)
    assert account(store).reserved_tokens == GROUP
    limit(store, GROUP // 2)  # lowered meanwhile: what is reserved is covered all the same
    again = found(claim(store, "w2"))
    assert again.lease.group_index == work.lease.group_index
    with pytest.raises(FencedError):
        store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    record(store, again)
    assert account(store).spent[Period.TOTAL].tokens == ROWS * OF_ROW


def test_a_late_holder_is_recorded_within_the_budget(store: Store, clock: Clock) -> None:
    ingest(store, "job-1", groups=2)
    limit(store, GROUP)
    work = found(claim(store, "w1"))
    clock.advance(LEASE_SEC + 1)
    record(store, work)
    assert account(store).spent[Period.TOTAL].tokens == ROWS * OF_ROW
    assert claim(store, "w2") is None


def test_parts_of_a_group_are_bounded_by_their_rows(store: Store) -> None:
    ingest(store, "job-1", groups=1)
    limit(store, GROUP)
    work = found(claim(store, "w1"))
    rest = store.split_group(work.lease, 1)
    assert account(store).reserved_tokens == ROW_BOUND
    other = found(store.claim_group("job-1", rest, Stage.VERIFY, "w2", LEASE_SEC))
    assert account(store).reserved_tokens == GROUP
    record(store, other)
    record(store, work, rows=1)
    assert account(store).spent[Period.TOTAL].tokens == ROWS * OF_ROW


def test_halves_of_a_group_that_waits_to_be_recorded_stay_reserved(store: Store) -> None:
    ingest(store, "job-1", groups=1)
    limit(store, GROUP)
    lease = verify(store, found(claim(store)))
    for _ in range(2):
        store.release(lease, "a bug")
        lease = found(store.claim_group("job-1", 0, Stage.RECORD, "r", LEASE_SEC)).lease
    assert store.release(lease, "a bug").split_off is not None
    assert account(store).reserved_tokens == GROUP


def test_claims_at_once_reserve_no_more_than_there_is(url: str, clock: Clock) -> None:
    store = open_store(url, clock=clock)
    ingest(store, "job-1", groups=8)
    ingest(store, "job-2", groups=8)
    limit(store, 5 * GROUP)
    claims = [partial(claim, store, f"w{number}") for number in range(4)]
    direct = [
        partial(store.claim_group, "job-2", index, Stage.VERIFY, f"d{index}", LEASE_SEC)
        for index in range(4)
    ]
    works = [work for _ in range(2) for work in successes(together(*claims, *direct)) if work]
    assert len(works) == 5
    assert account(store).reserved_tokens == 5 * GROUP
    store.close()


# --- periods ------------------------------------------------------------------------------------


def test_a_job_waits_for_the_next_day(store: Store, clock: Clock) -> None:
    ingest(store, "job-1", groups=2)
    limit(store, GROUP, Period.DAY)
    record(store, found(claim(store)))
    assert claim(store) is None
    assert store.stop_overdue() == set()
    said = store.backlog().waiting()["job-1"]
    assert said.endswith(
        "; and it waits for its tenant's budget of 64 tokens a day: 32 tokens are left, and its "
        "smallest group may take 64; the next day begins at 1970-01-13 00:00 UTC"
    )
    assert [one.period for one in store.figures().backlog.over_budget] == [Period.DAY]
    clock.now = 12 * DAY
    record(store, found(claim(store)))
    assert account(store).spent[Period.DAY].tokens == ROWS * OF_ROW
    assert account(store).spent[Period.MONTH].tokens == 2 * ROWS * OF_ROW


def test_a_reservation_of_yesterday_counts_today(store: Store, clock: Clock) -> None:
    ingest(store, "job-1")
    limit(store, GROUP, Period.DAY)
    clock.now = 12 * DAY - 1
    work = found(claim(store))
    clock.now = 12 * DAY
    assert claim(store) is None
    record(store, work)
    assert account(store).spent[Period.DAY].tokens == ROWS * OF_ROW


def test_a_group_that_no_day_covers_stops_its_job(store: Store) -> None:
    ingest(store, "job-1")
    limit(store, GROUP - 1, Period.DAY)
    assert store.stop_overdue() == {"job-1"}
    reason = store.get_job("job-1").stop_reason
    assert reason == (
        "its tenant's budget of 63 tokens a day is less than its smallest group may take, 64 "
        "tokens: a smaller group_size or max_tokens fits"
    )


# --- stopped, retried, refused ------------------------------------------------------------------


def test_a_job_stops_when_a_total_is_spent_and_goes_on_when_it_is_raised(store: Store) -> None:
    ingest(store, "job-1", groups=2)
    limit(store, GROUP)
    record(store, found(claim(store)))
    assert store.stop_overdue() == {"job-1"}
    job = store.get_job("job-1")
    assert job.stop_reason == (
        "its tenant's budget of 64 tokens in all is spent: 32 tokens are left, and its smallest "
        "group may take 64"
    )
    store.finish_job(claim_job(store, Stage.PUBLISH, job_id="job-1").lease, JobState.CANCELLED)
    with pytest.raises(OverBudgetError, match=r"would stop again: .* `specbatch tenants set acme`"):
        store.retry_job("job-1")
    assert store.get_job("job-1").state is JobState.CANCELLED
    limit(store, 2 * GROUP)
    assert store.retry_job("job-1") == 1
    record(store, found(claim(store)))
    assert store.progress("job-1").completions == 2 * ROWS


@pytest.mark.parametrize("period", [Period.TOTAL, Period.DAY])
def test_a_job_does_not_stop_while_smaller_groups_may_come(store: Store, period: Period) -> None:
    """Whenever the sweeper looks: while the input is read, or while drafts are made."""
    limit(store, GROUP, period)
    store.create_job(new_job("job-1", tenant="acme"))
    lease = claim_job(store, Stage.INGEST, job_id="job-1").lease
    add = partial(store.add_groups, lease, rejected=[], next_row=14, cursor=position())
    add([new_group(0, 10)])
    assert store.stop_overdue() == set()
    assert store.waiting_for_budget(["job-1"]) == {}, "its input is read"
    add([new_group(1, ROWS, Stage.PROPOSE)])
    store.finish_ingest(lease, 14, {})
    assert store.stop_overdue() == set()
    assert claim(store) is None
    (short,) = store.budget_shortfalls()
    assert short.words.endswith("may take 160; groups to come may take less")
    drafted = found(store.claim_next(Stage.PROPOSE, "small", "p", LEASE_SEC))
    store.advance(drafted.lease, Stage.VERIFY, None, NO_TIME)
    record(store, found(claim(store)))
    assert store.stop_overdue() == {"job-1"}


def test_a_spent_total_stops_a_job_whatever_is_to_come(store: Store) -> None:
    store.set_budget("acme", Period.TOTAL, None, 0.5, "a test")
    store.create_job(new_job("job-1", tenant="acme"))
    lease = claim_job(store, Stage.INGEST, job_id="job-1").lease
    store.add_groups(lease, [new_group(0, ROWS), new_group(1, ROWS)], [], 8, position())
    record(store, found(claim(store)))
    assert store.stop_overdue() == {"job-1"}


def test_a_job_whose_budget_is_raised_in_that_moment_does_not_stop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(store, "job-1", groups=2)
    limit(store, GROUP)
    record(store, found(claim(store)))
    look = store._exhausted  # type: ignore[attr-defined]  # where the database is asked

    def raised_since() -> list[tuple[str, str]]:
        over: list[tuple[str, str]] = look()
        limit(store, 2 * GROUP)
        return over

    monkeypatch.setattr(store, "_exhausted", raised_since)
    assert look(), "it is over its budget"
    assert store.stop_overdue() == set()
    assert not store.get_job("job-1").cancel_requested
    record(store, found(claim(store)))


def test_accounts_of_several_tenants_are_those_of_each(store: Store) -> None:
    for number, name in enumerate(("acme", "else", "new")):
        ingest(store, f"job-{number}", name)
        limit(store, 9 * GROUP + number, tenant=name)
    store.set_budget("else", Period.DAY, None, 5.0, "a test")
    record(store, found(claim(store)))
    held = found(claim(store))
    each = [store.tenant_accounts(name)[0] for name in ("acme", "else", "new")]
    assert store.tenant_accounts() == each
    assert sum(of.reserved_tokens for of in each) == GROUP
    assert sum(of.spent[Period.TOTAL].tokens for of in each) == ROWS * OF_ROW
    assert [len(of.budgets) for of in each] == [1, 2, 1]
    store.release(held.lease, "stopped", forgiven=True)


def test_a_retry_does_not_bring_back_results_that_are_not_covered(store: Store) -> None:
    ingest(store, "job-1", groups=1)
    ingest(store, "job-2", groups=1)
    limit(store, 2 * GROUP)
    lost = found(claim(store))
    lease = verify(store, lost)
    for _ in range(2):
        store.release(lease, "a full disk", whole=True)
        where = (lost.lease.job_id, 0, Stage.RECORD)
        lease = found(store.claim_group(*where, "r", LEASE_SEC)).lease
    store.release(lease, "a full disk", whole=True)  # fails
    record(store, found(claim(store)))
    limit(store, GROUP)  # half of it is spent
    where = (lost.lease.job_id, Stage.PUBLISH, "p", LEASE_SEC)
    store.finish_job(found(store.claim_job(*where)).lease, JobState.PARTIAL)
    with pytest.raises(OverBudgetError, match="lacks 32 tokens"):
        store.retry_job(lost.lease.job_id)


def test_rows_that_were_kept_are_booked_and_not_reserved_again(store: Store) -> None:
    ingest(store, "job-1", groups=1)
    limit(store, GROUP)
    work = found(claim(store))
    store.request_cancel("job-1")
    store.keep_part(work.lease, records(work, 3), NO_TIME, {})
    assert account(store).spent[Period.TOTAL].tokens == 3 * OF_ROW
    store.finish_job(claim_job(store, Stage.PUBLISH, job_id="job-1").lease, JobState.CANCELLED)
    store.retry_job("job-1")
    assert found(claim(store)).rows_kept == 3
    assert account(store).reserved_tokens == ROW_BOUND


@pytest.mark.parametrize(
    ("period", "row_tokens", "sure_tokens", "said"),
    [
        (Period.TOTAL, 40, 2, "32 tokens are left .* one row may take 40: lower max_tokens"),
        (Period.TOTAL, 10, 33, "32 tokens are left .* its rows take 33 at least"),
        (Period.TOTAL, 32, 32, None),
        (Period.DAY, 65, 0, "the budget is of 64 tokens a day, and one row may take 65"),
        (Period.DAY, 64, 1000, None),
    ],
)
def test_a_job_that_cannot_be_covered_is_refused(
    store: Store, period: Period, row_tokens: int, sure_tokens: int, said: str | None
) -> None:
    ingest(store, "job-1", groups=1)
    record(store, found(claim(store)))
    limit(store, GROUP, period)
    job = new_job("job-2", tenant="acme", least=LeastTokens(row_tokens, sure_tokens))
    if said is None:
        assert store.create_job(job)[1]
        return
    with pytest.raises(OverBudgetError, match=f"tenant acme cannot submit this job: .*{said}"):
        store.create_job(job)
    assert [one.job_id for one in store.list_jobs()] == ["job-1"]
    assert store.create_job(replace(job, tenant="else"))[1]


# --- money --------------------------------------------------------------------------------------


def test_money_is_passed_by_at_most_what_groups_under_way_cost(store: Store) -> None:
    ingest(store, "job-1", groups=6)
    store.set_budget("acme", Period.TOTAL, None, 2.5, "a test")
    record(store, found(claim(store)))  # $1 for 32 tokens, so a bound of 64 is taken for $2
    work = found(claim(store, "w1"))
    assert claim(store, "w2") is None, "$1 is spent, and $2 may be under way"
    record(store, work)
    last = found(claim(store, "w1"))
    record(store, last)
    assert account(store).spent[Period.TOTAL].usd == 3.0
    assert claim(store) is None
    assert store.stop_overdue() == {"job-1"}
    reason = store.get_job("job-1").stop_reason
    assert reason == "its tenant's budget of $2.50 in all is spent: $3.00 is spent"


# --- random lives -------------------------------------------------------------------------------


class Lives:
    """Two tenants' jobs, and workers that do anything at any time."""

    def __init__(self, store: Store, clock: Clock, seed: int) -> None:
        self.store, self.clock, self.draw = store, clock, random.Random(seed)
        self.works: list[GroupWork] = []
        self.booked = {"acme": 0, "else": 0}
        self.limits = {"acme": 9 * GROUP, "else": 5 * GROUP}
        for tenant, tokens in self.limits.items():
            limit(store, tokens, tenant=tenant)
            for number in range(2):
                ingest(store, f"{tenant}-{number}", tenant, groups=5)

    def step(self) -> None:
        acts = (self.claim, self.claim, self.finish, self.finish, self.give_back, self.split)
        self.draw.choice((*acts, self.wait, self.stop, self.claim_one))()

    def claim(self) -> None:
        if work := claim(self.store, f"w{self.draw.randrange(9)}"):
            self.works.append(work)

    def claim_one(self) -> None:
        job_id = f"{self.draw.choice(('acme', 'else'))}-{self.draw.randrange(2)}"
        where = (job_id, self.draw.randrange(5), Stage.VERIFY)
        if work := self.store.claim_group(*where, "direct", LEASE_SEC):
            self.works.append(work)

    def finish(self) -> None:
        """One of the works, whose lease may be lost, and which may go only half the way."""
        if not self.works:
            return
        work = self.works.pop(self.draw.randrange(len(self.works)))
        try:
            lease = verify(self.store, work)
            if self.draw.random() < 0.2:
                self.store.release(lease, "a full disk", forgiven=True)
                where = (lease.job_id, lease.group_index or 0, Stage.RECORD)
                work_again = found(self.store.claim_group(*where, "r", LEASE_SEC))
                lease = work_again.lease
            tokens = self.draw.randrange(1, ROW_BOUND - 5)
            ids = {"token_ids": (7,) * tokens, "origins": (0,) * tokens}
            done = [replace(one, **ids, logprobs=(0.0,) * tokens) for one in records(work)]
            self.store.commit_group(lease, done, NO_TIME, {})
        except FencedError:
            return
        self.booked[lease.job_id.partition("-")[0]] += len(done) * (5 + tokens)

    def give_back(self) -> None:
        if self.works:
            work = self.works.pop(self.draw.randrange(len(self.works)))
            self.store.release(work.lease, "an error", forgiven=self.draw.random() < 0.5)

    def split(self) -> None:
        splittable = [i for i, work in enumerate(self.works) if work.rows > 1]
        if splittable:
            place = self.draw.choice(splittable)
            work = self.works[place]
            keep = self.draw.randrange(1, work.rows)
            try:
                self.store.split_group(work.lease, keep)
            except FencedError:
                return
            self.works[place] = replace(work, rows=keep)

    def wait(self) -> None:
        self.clock.advance(self.draw.choice((1.0, LEASE_SEC / 2, LEASE_SEC + 1)))

    def stop(self) -> None:
        self.store.close_over()
        self.store.stop_overdue()

    def check(self) -> None:
        for of in self.store.tenant_accounts():
            spent = of.spent[Period.TOTAL].tokens
            assert spent == self.booked[of.tenant]
            assert spent + of.reserved_tokens <= self.limits[of.tenant]

    def end(self) -> None:
        """All that is covered is done, and what is not stops."""
        while not all(job.stage is Stage.PUBLISH for job in self.store.list_jobs()):
            self.clock.advance(LEASE_SEC + 1)
            self.works = []
            for job_id in (f"{tenant}-{n}" for tenant in self.limits for n in range(2)):
                for due in self.store.due(job_id=job_id):
                    if due.stage is Stage.RECORD:
                        self.record_again(job_id, due.group_index or 0)
            self.claim()
            self.finish()
            self.stop()
            self.check()
        assert all(of.reserved_tokens == 0 for of in self.store.tenant_accounts())

    def record_again(self, job_id: str, index: int) -> None:
        work = self.store.claim_group(job_id, index, Stage.RECORD, "r", LEASE_SEC)
        if work is not None:
            done = records(work)
            self.store.commit_group(work.lease, done, NO_TIME, {})
            self.booked[job_id.partition("-")[0]] += len(done) * OF_ROW


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_nothing_is_overspent_whatever_happens(store: Store, clock: Clock, seed: int) -> None:
    lives = Lives(store, clock, seed)
    for _ in range(100):
        lives.step()
        lives.check()
    lives.end()


def test_a_worker_that_serves_a_class_is_held_to_budgets_as_well(store: Store) -> None:
    ingest(store, "job-1")
    limit(store, GROUP)
    serves: Sequence[object] = [
        store.claim_next(Stage.VERIFY, "big", f"w{i}", LEASE_SEC, serving("exact/f32/1"))
        for i in range(2)
    ]
    assert [work is not None for work in serves] == [True, False]
