"""Acceptance estimates: what counts as a test, how fast old evidence fades."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.acceptance import Acceptance


def test_without_evidence_the_rate_is_the_prior() -> None:
    assert Acceptance(prior=0.6).rate == pytest.approx(0.6)
    assert Acceptance(prior=0.2).rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("proposed", "accepted", "agreed", "tested"),
    [
        (4, 4, 4, 4),  # all agreed: nothing is known of a fifth
        (4, 0, 0, 1),  # the first was refused: nothing is known of the others
        (4, 2, 2, 3),
        (1, 1, 1, 1),
        (0, 0, 0, 0),
    ],
)
def test_tokens_behind_the_first_refusal_were_not_tested(
    proposed: int, accepted: int, agreed: int, tested: int
) -> None:
    estimate = Acceptance(decay=1.0)
    estimate.observe(proposed, accepted)
    assert (estimate.agreed, estimate.tested) == (agreed, tested)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_the_rate_finds_the_truth_at_any_depth(truth: float, depth: int) -> None:
    generator, estimate = random.Random(1), Acceptance(decay=0.999)
    for _ in range(4000):
        accepted = 0
        while accepted < depth and generator.random() < truth:
            accepted += 1
        estimate.observe(depth, accepted)
    assert estimate.rate == pytest.approx(truth, abs=0.05)


def test_the_estimate_follows_a_change() -> None:
    estimate = Acceptance()
    for _ in range(200):
        estimate.observe(4, 4)
    assert estimate.rate > 0.95
    for _ in range(200):
        estimate.observe(4, 0)
    assert estimate.rate < 0.1


def test_the_rate_is_a_probability_and_rises_with_agreement() -> None:
    generator, estimate = random.Random(2), Acceptance()
    for _ in range(500):
        proposed = generator.randint(0, 8)
        before = estimate.rate
        accepted = generator.choice([0, proposed])
        estimate.observe(proposed, accepted)
        assert 0 < estimate.rate < 1
        if proposed:
            assert estimate.rate > before if accepted else estimate.rate < before
        else:
            assert estimate.rate == before


@pytest.mark.parametrize("batch", [1, 10, 1000, 100_000])
def test_however_many_come_at_once_only_the_last_count(batch: int) -> None:
    """A choice may stand for long: what was learned in it must not be believed for ever."""
    estimate = Acceptance(decay=0.995)
    for _ in range(100_000 // batch):
        estimate.observe_many(batch * 8 // 10, batch)
    assert estimate.tested <= 200.0 + 1e-6
    for _ in range(400):
        estimate.observe(1, 0)
    assert estimate.rate < 0.15


@pytest.mark.parametrize("accepted", [0, 3, 10])
def test_a_batch_counts_as_the_same_tests_one_by_one(accepted: int) -> None:
    at_once, singly = Acceptance(decay=0.995), Acceptance(decay=0.995)
    for _ in range(30):
        at_once.observe_many(accepted, 10)
        for i in range(10):
            singly.observe_many(int(i < accepted), 1)
    assert at_once.tested == pytest.approx(singly.tested)
    assert at_once.rate == pytest.approx(singly.rate, abs=0.01)
