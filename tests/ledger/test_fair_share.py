"""Whose turn it is, as pure rules: classes, tenants, jobs, and what a claim costs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from specbatch.pipeline.ledger import fair_share, rules
from specbatch.pipeline.ledger.fair_share import Waiting

JOB = Waiting("job", "a", 1, 100.0, True, 0.0, 0.0, 10)


def names(*waiting: Waiting) -> list[str]:
    return [job.job_id for job in fair_share.by_turn(waiting)]


def test_a_higher_class_goes_before_whoever_was_served_less() -> None:
    high = replace(JOB, job_id="high", tenant="b", priority=0, served=1e9, created_at=900.0)
    low = replace(JOB, job_id="low", tenant="c", priority=2)
    assert names(low, JOB, high) == ["high", "job", "low"]


def test_within_a_class_who_was_served_least_goes_first_and_then_the_oldest_job() -> None:
    other = replace(JOB, job_id="other", tenant="b", served=5.0, created_at=1.0)
    newer = replace(JOB, job_id="newer", created_at=200.0)
    assert names(newer, other, JOB) == ["job", "newer", "other"]


def test_a_job_whose_groups_are_all_held_has_no_turn() -> None:
    assert names(replace(JOB, is_due=False)) == []


def test_who_comes_back_begins_where_the_others_are() -> None:
    others = [replace(JOB, tenant=t, served=s + 9.0, started=s) for t, s in (("b", 50), ("c", 40))]
    assert fair_share.floor_of(JOB, [JOB, *others]) == 50.0
    held = [replace(other, is_due=False) for other in others]
    assert fair_share.floor_of(JOB, [JOB, *held]) == 50.0, "they have work, though none is due"
    elsewhere = [replace(other, priority=0) for other in others]
    assert fair_share.floor_of(JOB, [JOB, *elsewhere]) == 0.0
    assert fair_share.floor_of(JOB, [JOB, replace(JOB, started=70.0)]) == 0.0, "that is itself"


def test_a_claim_costs_its_tokens_by_weight() -> None:
    assert fair_share.cost_of(4, 20, 10, 1.0) == 60.0
    assert fair_share.cost_of(4, 20, 10, 3.0) == 20.0
    assert fair_share.tokens_per_row(32, 3) == 96
    assert fair_share.tokens_per_row(None, None) == fair_share.MAX_TOKENS == 128


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
        job = fair_share.by_turn(waiting)[0]
        cost = self.chance.choice(self.sizes[job.tenant])
        start = max(job.served, fair_share.floor_of(job, waiting))
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
