"""Whose turn it is, as pure rules: classes, tenants, jobs, and what a claim costs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from specbatch.pipeline.ledger import fair_share, rules
from specbatch.pipeline.ledger.fair_share import Waiting

JOB = Waiting(
    "job", "a", 1, 100.0, True, 0.0, 0.0, credit=0.0, sec_per_token=0.0,
    weight=1.0, deadline_at=None, is_urgent=False, is_budgeted=False,
)  # fmt: skip


def names(*waiting: Waiting) -> list[str]:
    return [turn.job.job_id for turn in fair_share.by_turn(waiting)]


def floor_of(job: Waiting, *others: Waiting) -> float:
    return next(t.floor for t in fair_share.by_turn([job, *others]) if t.job is job)


def test_the_tenant_that_was_served_least_goes_first_whatever_the_priorities() -> None:
    high = replace(JOB, job_id="high", tenant="b", priority=0, served=9.0)
    assert names(high, JOB) == ["job", "high"]


def test_of_a_tenant_the_priority_goes_first_then_the_deadline_then_the_oldest_job() -> None:
    high = replace(JOB, job_id="high", priority=0, created_at=900.0)
    soon = replace(JOB, job_id="soon", deadline_at=2000.0, created_at=800.0)
    later = replace(JOB, job_id="later", deadline_at=3000.0, created_at=1.0)
    newer = replace(JOB, job_id="newer", created_at=200.0)
    assert names(newer, later, JOB, soon, high) == ["high", "soon", "later", "job", "newer"]


def test_an_urgent_job_goes_first_while_its_tenant_is_ahead_by_less_than_the_lead() -> None:
    urgent = replace(JOB, job_id="urgent", tenant="b", deadline_at=2000.0, is_urgent=True)
    at = [(1.0, 59.0, "urgent"), (1.0, 60.0, "job"), (4.0, 14.0, "urgent"), (4.0, 15.0, "job")]
    for weight, served, expected in at:
        ahead = replace(urgent, served=served, started=0.0, weight=weight)
        first, *_ = fair_share.by_turn([JOB, ahead])
        assert first.job.job_id == expected
        assert first.reached == 0.0, "where the one begins that has to wait"


def test_a_job_whose_groups_are_all_held_has_no_turn() -> None:
    assert names(replace(JOB, is_due=False)) == []


def test_who_comes_back_begins_where_the_others_are() -> None:
    others = [
        replace(JOB, job_id=t, tenant=t, served=s + 9.0, started=s)
        for t, s in (("b", 50.0), ("c", 40.0))
    ]
    assert floor_of(JOB, *others) == 50.0
    held = [replace(other, is_due=False) for other in others]
    assert floor_of(JOB, *held) == 50.0, "they have work, though none is due"
    assert floor_of(JOB, replace(JOB, job_id="second", started=70.0, served=70.0)) == 0.0
    given_back = replace(others[0], served=30.0)
    assert floor_of(JOB, given_back) == 30.0, "its last claim was charged too much"


def test_what_estimates_were_too_high_is_no_idle_time() -> None:
    other = replace(JOB, job_id="other", tenant="b", served=59.0, started=50.0)
    behind = replace(JOB, served=10.0, started=5.0, credit=30.0)
    assert [t.reached for t in fair_share.by_turn([behind, other])] == [20.0, 20.0]


def test_the_estimate_is_of_the_tenants_own_groups_else_of_the_others() -> None:
    a, b = (replace(JOB, tenant=t, sec_per_token=r) for t, r in (("b", 0.2), ("c", 0.4)))
    rates = {t.job.tenant: t.sec_per_token for t in fair_share.by_turn([JOB, a, b])}
    assert rates == {"a": pytest.approx(0.3), "b": 0.2, "c": 0.4}
    assert fair_share.by_turn([JOB])[0].sec_per_token == fair_share.SEC_PER_TOKEN


@pytest.mark.parametrize(
    ("late", "spent", "budget", "expected"),
    [
        (False, 0.0, None, None),
        (True, 0.0, None, "its deadline of 1970-01-01 00:16:40 UTC passed"),
        (False, 0.49, 0.5, None),
        (False, 0.5, 0.5, "its budget of $0.5 was spent"),
        (True, 9.0, 0.5, "its deadline of 1970-01-01 00:16:40 UTC passed"),
    ],
)
def test_the_reason_to_stop_says_which_limit_it_was(
    late: bool, spent: float, budget: float | None, expected: str | None
) -> None:
    reason = rules.reason_to_stop(late, 1000.0, spent, budget)
    assert reason == expected
    assert rules.budget_was_spent(reason) == (expected is not None and "budget" in expected)


class Tenants:
    """Tenants with work without end, of groups of their own sizes."""

    def __init__(self, sizes: dict[str, list[float]], weights: dict[str, float]) -> None:
        self.sizes, self.weights = sizes, weights
        self.times: dict[str, tuple[float, float]] = {}
        self.got: Counter[str] = Counter()
        self.chance = random.Random(7)

    def serve(self, *active: str) -> None:
        waiting = []
        for place, name in enumerate(active):
            served, started = self.times.get(name, (0.0, 0.0))
            job = replace(JOB, job_id=name, tenant=name, created_at=float(place))
            waiting.append(replace(job, served=served, started=started))
        turn = fair_share.by_turn(waiting)[0]
        job = turn.job
        cost = self.chance.choice(self.sizes[job.tenant])
        start = max(job.served, turn.floor)
        self.times[job.tenant] = (start + cost / self.weights.get(job.tenant, 1.0), start)
        self.got[job.tenant] += int(cost)


def test_tenants_with_work_share_by_weight_whatever_the_sizes_of_their_groups() -> None:
    tenants = Tenants({"a": [100.0], "b": [3.0, 9.0], "c": [50.0, 1000.0]}, {"c": 2.0})
    for _ in range(30_000):
        tenants.serve("a", "b", "c")
    total = tenants.got.total()
    assert tenants.got["a"] / total == pytest.approx(0.25, rel=0.02)
    assert tenants.got["b"] / total == pytest.approx(0.25, rel=0.02)
    assert tenants.got["c"] / total == pytest.approx(0.50, rel=0.02)


def test_nobody_saves_turns_by_idling_and_nobody_pays_for_having_been_alone() -> None:
    tenants = Tenants({"a": [10.0], "b": [10.0]}, {})
    for _ in range(500):
        tenants.serve("a")
    tenants.got.clear()
    for _ in range(100):
        tenants.serve("a", "b")
    assert abs(tenants.got["a"] - tenants.got["b"]) <= 20
    for _ in range(500):
        tenants.serve("b")
    tenants.got.clear()
    for _ in range(100):
        tenants.serve("a", "b")
    assert abs(tenants.got["a"] - tenants.got["b"]) <= 20


def test_two_that_come_together_do_not_keep_out_who_was_there() -> None:
    tenants = Tenants({"a": [10.0], "b": [10.0], "c": [10.0]}, {})
    for _ in range(500):
        tenants.serve("a")
    tenants.got.clear()
    for _ in range(300):
        tenants.serve("a", "b", "c")
    assert max(tenants.got.values()) - min(tenants.got.values()) <= 20


def test_small_groups_do_not_lose_their_turns_to_large_ones() -> None:
    """Who is behind by a part of another's large claim was not idle."""
    tenants = Tenants({"a": [1000.0], "b": [10.0]}, {})
    for _ in range(101):
        tenants.serve("a", "b")
    assert tenants.got == {"a": 1000, "b": 1000}
