"""Which jobs a worker leaves to cheaper pools."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from policy.market import Result, Trace, anything, by_price, simulate

from specbatch.pipeline.policy.placement import MARGIN, Choice, Pool, Work, choose

DEAR, CHEAP, SPOT = Pool("dear", 4_000_000), Pool("cheap", 1_000_000), Pool("spot", 500_000, True)
NOW = 1_000.0
PATIENCE = 600.0


def work(job_id: str = "a", **values: Any) -> Work:
    """100 rows of a second each, in groups of 10; two cheap devices, one dear."""
    one = Work(
        job_id=job_id,
        tenant="t",
        priority=1,
        created_at=NOW,
        deadline_at=None,
        rows=100,
        is_read=True,
        sec_per_row=1.0,
        group_rows=10,
        moved_at=NOW,
        devices={DEAR: 1, CHEAP: 2},
    )
    return replace(one, **values)


def chosen(here: Pool, first: Work, *others: Work, **more: Any) -> Choice:
    return choose(NOW, here, [first, *others], PATIENCE, **more)[first.job_id]


def test_a_job_without_a_deadline_is_left_to_the_cheapest() -> None:
    assert chosen(DEAR, work()) == Choice(False, "cheaper pools (cheap) do it")
    assert chosen(CHEAP, work()).takes


def test_pools_of_one_price_leave_each_other_nothing() -> None:
    twin = Pool("twin", CHEAP.price_microusd)
    assert chosen(twin, work(devices={CHEAP: 1, twin: 1})).takes


def test_a_pool_that_is_dead_or_may_not_do_it_is_waited_for_by_nobody() -> None:
    assert chosen(DEAR, work(devices={DEAR: 1})).takes
    assert chosen(DEAR, work(devices={})).takes, "this worker's heartbeat may not be there yet"


def test_a_job_that_cheaper_pools_do_not_continue_is_taken() -> None:
    assert not chosen(DEAR, work(moved_at=NOW - PATIENCE + 1)).takes
    assert chosen(DEAR, work(moved_at=NOW - PATIENCE)).takes


# 100 s of work on two devices, and 10 s of the last group.
NEEDED = MARGIN * (100 / 2 + 10)


@pytest.mark.parametrize(("left", "takes"), [(NEEDED + 1, False), (NEEDED - 1, True), (-5, True)])
def test_a_deadline_decides_when_the_dearer_pool_begins(left: float, takes: bool) -> None:
    assert chosen(DEAR, work(deadline_at=NOW + left)).takes is takes


def test_a_job_whose_speed_nobody_knows_is_taken_if_it_has_a_deadline() -> None:
    unknown = work(deadline_at=NOW + 10_000, sec_per_row=None)
    assert chosen(DEAR, unknown).takes
    assert chosen(DEAR, replace(unknown, sec_per_row=1.0, is_read=False)).takes
    assert not chosen(DEAR, replace(unknown, deadline_at=None)).takes


def test_the_reason_for_an_unknown_speed_is_its_own() -> None:
    why = "nobody knows yet how long it takes"
    devices = {DEAR: 1, CHEAP: 2, SPOT: 2}
    for unknown in ({"sec_per_row": None}, {"is_read": False}):
        one = work(devices=devices, deadline_at=NOW + 10_000, **unknown)
        assert chosen(DEAR, one) == chosen(CHEAP, one) == Choice(True, why)
        assert chosen(SPOT, one).takes


OTHER = work("b", rows=1_000)
AHEAD = {  # what comes first of a job of a thousand seconds, in device seconds
    "another tenant": (replace(OTHER, tenant="u"), 100.0),
    "another tenant's small one": (replace(OTHER, tenant="u", rows=30), 30.0),
    "another tenant's of a higher priority": (replace(OTHER, tenant="u", priority=0), 100.0),
    "another tenant's of a lower priority": (replace(OTHER, tenant="u", priority=2), 100.0),
    "higher priority": (replace(OTHER, priority=0, created_at=NOW + 1), 1_000.0),
    "lower priority": (replace(OTHER, priority=2, created_at=NOW - 1), 0.0),
    "earlier deadline": (replace(OTHER, created_at=NOW + 1, deadline_at=NOW + 1), 1_000.0),
    "later deadline": (replace(OTHER, created_at=NOW - 1, deadline_at=NOW + 10_000), 0.0),
    "no deadline": (replace(OTHER, created_at=NOW - 1), 0.0),
    "of other pools": (replace(OTHER, priority=0, devices={DEAR: 1}), 0.0),
}


@pytest.mark.parametrize("case", AHEAD)
def test_what_goes_first_counts(case: str) -> None:
    other, ahead = AHEAD[case]
    needed = MARGIN * ((100 + ahead) / 2 + 10)
    assert not chosen(DEAR, work(deadline_at=NOW + needed + 1), other).takes
    assert chosen(DEAR, work(deadline_at=NOW + needed - 1), other).takes


@pytest.mark.parametrize(("age", "takes"), [(1, True), (-1, False)])
def test_of_one_deadline_the_older_job_goes_first(age: float, takes: bool) -> None:
    deadline_at = NOW + MARGIN * (100 / 2 + 10) + 1
    other = replace(OTHER, created_at=NOW - age, deadline_at=deadline_at)
    assert chosen(DEAR, work(deadline_at=deadline_at), other).takes is takes


def test_another_tenants_share_goes_by_its_weight() -> None:
    other = replace(OTHER, tenant="u")
    needed = MARGIN * ((100 + 300) / 2 + 10)
    late, in_time = work(deadline_at=NOW + needed - 1), work(deadline_at=NOW + needed + 1)
    assert chosen(DEAR, late, other, weights={"u": 3.0}).takes
    assert not chosen(DEAR, in_time, other, weights={"u": 3.0}).takes


def test_another_tenant_s_share_counts_beside_what_goes_first_of_its_own() -> None:
    older = replace(OTHER, rows=200, priority=0)
    other = replace(OTHER, job_id="c", tenant="u")
    needed = MARGIN * ((100 + 200 + 300) / 2 + 10)
    assert not chosen(DEAR, work(deadline_at=NOW + needed + 1), older, other).takes
    assert chosen(DEAR, work(deadline_at=NOW + needed - 1), older, other).takes


def test_spot_gets_what_can_be_done_twice_before_its_deadline() -> None:
    # Once on two spot devices, once more on the dear one.
    twice = MARGIN * ((100 / 2 + 10) + (100 + 10))
    devices = {DEAR: 1, SPOT: 2}
    enough = work(devices=devices, deadline_at=NOW + twice + 1)
    assert chosen(SPOT, enough).takes
    assert not chosen(DEAR, enough).takes
    short = work(devices=devices, deadline_at=NOW + twice - 1)
    assert not chosen(SPOT, short).takes
    assert chosen(DEAR, short).takes
    assert chosen(SPOT, work(devices=devices)).takes, "without a deadline there is time"


def test_spot_helps_where_those_that_stay_would_not_finish_it_alone() -> None:
    devices = {DEAR: 1, SPOT: 100}
    alone = MARGIN * (100 + 10)
    late = work(devices=devices, deadline_at=NOW + alone - 1)
    assert chosen(SPOT, late) == Choice(True, "pools that stay (dear) would not finish it in time")
    assert chosen(DEAR, late).takes
    in_time = work(devices=devices, deadline_at=NOW + alone + 1)
    assert chosen(SPOT, in_time) == Choice(
        False,
        "too close to its deadline for a device that may be taken away: "
        "pools that stay (dear) finish it in time",
    )
    assert chosen(DEAR, in_time) == Choice(
        True, "too close to its deadline for devices that may be taken away"
    )


def test_spot_takes_what_those_that_stay_do_not_continue() -> None:
    # There is time for one of both, not for both.
    late = work(devices={DEAR: 1, SPOT: 2}, deadline_at=NOW + MARGIN * 150)
    assert not chosen(SPOT, late).takes
    assert chosen(SPOT, replace(late, moved_at=NOW - PATIENCE)).takes


def test_workers_of_one_pool_leave_each_other_nothing() -> None:
    cheap, spot = Pool("dear", 1), Pool("dear", 1, is_spot=True)
    assert chosen(DEAR, work(devices={DEAR: 1, cheap: 5, spot: 5})).takes
    late = work(devices={DEAR: 1, spot: 2}, deadline_at=NOW + MARGIN * 150)
    assert chosen(spot, late).takes


def test_no_job_is_left_for_a_price_that_nobody_knows() -> None:
    unknown = Pool("unknown", None)
    both = work(devices={DEAR: 1, unknown: 5})
    assert chosen(DEAR, both).takes
    assert chosen(unknown, both).takes
    assert not chosen(DEAR, work(devices={DEAR: 1, unknown: 5, CHEAP: 1})).takes


def test_spot_takes_what_nobody_else_may_do() -> None:
    assert chosen(SPOT, work(devices={SPOT: 1}, deadline_at=NOW + 1)).takes


# --- a day of prices that change ----------------------------------------------------------------


SEEDS = range(8)


@cache
def days(seed: int) -> tuple[Trace, Result, Result]:
    """A trace, where any worker takes anything, and where prices decide."""
    trace = Trace.of_seed(seed)
    return trace, simulate(trace, anything), simulate(trace, by_price)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_day_costs_less_and_misses_nothing_that_could_be_met(seed: int) -> None:
    trace, free, priced = days(seed)
    assert priced.misplaced == free.misplaced == 0
    assert sum(priced.by_pool.values()) == sum(job.groups for job in trace.jobs), "all is done"
    assert priced.late <= free.late, "what is met where any worker takes anything"
    assert priced.usd < free.usd


def test_over_many_days_a_quarter_of_the_cost_is_saved() -> None:
    results = [days(seed) for seed in SEEDS]
    assert any(free.late for _, free, _ in results), "some deadlines are tight"
    free_usd = sum(free.usd for _, free, _ in results)
    assert sum(priced.usd for *_, priced in results) < 0.75 * free_usd
