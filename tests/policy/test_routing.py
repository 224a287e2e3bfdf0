"""What a draft model is worth, and depths where several of them work in one step."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from specbatch.pipeline.policy.acceptance import Tracks
from specbatch.pipeline.policy.depth import Candidate, Controller
from specbatch.pipeline.policy.routing import (
    Price,
    fade,
    optimistic_rate,
    speedup,
    speedup_behind,
    teams,
)
from specbatch.pipeline.policy.tuning import ROUTE_FADE_STEPS, ROUTE_OPTIMISM

STEP, ROW = 1e-2, 2e-4  # seconds of the verifier
RATES = (0.2, 0.5, 0.8, 0.95)
MODELS = {"a": (1e-4, 4e-4, 1e-5), "b": (1e-4, 3e-3, 2e-5)}  # call, pass, row


@cache
def controller() -> Controller:
    """One that knows the machine."""
    made = Controller()
    for _ in range(8):
        for tokens in range(1, 33):
            for sequences in range(1, 9):
                if tokens >= sequences:
                    step_time = made.knowledge.step_time
                    step_time.observe(tokens, sequences, STEP + ROW * tokens)
    for name, (call, a_pass, row) in MODELS.items():
        for passes, fed in itertools.product(range(1, 9), range(1, 40, 3)):
            sizes = (1.0, float(passes), float(fed))
            made.knowledge.draft_time_of(name).observe(sizes, call + passes * a_pass + fed * row)
    return made


def tokens_per_sec(candidates: list[Candidate], depths: tuple[int, ...]) -> float:
    """The objective, straight from its definition."""
    tokens = seconds = 0.0
    for candidate, depth in zip(candidates, depths, strict=True):
        tokens += sum(candidate.acceptance**j for j in range(depth + 1))
    for name, (call, a_pass, row) in MODELS.items():
        own = [d for c, d in zip(candidates, depths, strict=True) if c.model == name and d]
        if own:
            seconds += call + max(own) * a_pass + sum(own) * row
    return tokens / (seconds + STEP + ROW * (len(candidates) + sum(depths)))


@pytest.mark.parametrize("seed", range(12))
def test_depths_of_two_models_are_near_the_best_of_all(seed: int) -> None:
    """Within 2 %: the models are looked at one after the other, so that a replan stays short."""
    generator = random.Random(seed)
    known = controller()
    for _ in range(3):
        candidates = [
            Candidate(4, generator.choice(RATES), generator.choice(["a", "b", None]))
            for _ in range(generator.randint(2, 4))
        ]
        found = known.promise(candidates).depths
        every = itertools.product(range(5), repeat=len(candidates))
        best = max(tokens_per_sec(candidates, depths) for depths in every)
        assert tokens_per_sec(candidates, found) >= 0.98 * best, (candidates, found)


def test_prices_are_what_was_measured() -> None:
    known = controller()
    price = known.price(8, "b")
    plain = STEP + 8 * ROW
    assert price.call == pytest.approx(1e-4 / plain, rel=0.3)
    assert price.token == pytest.approx((3e-3 + 8 * 2e-5 + 8 * ROW) / plain, rel=0.05)
    assert price.row == pytest.approx(2e-5 / plain, rel=0.2)
    assert known.price(8, None).token == pytest.approx(8 * ROW / plain, rel=0.05)


def test_pace_is_the_best_depths_tokens_for_the_time() -> None:
    price = Price(call=0.02, token=0.1, row=0.0)
    tried = [
        sum(0.8**j for j in range(depth + 1)) / (1.0 + (depth > 0) * 0.02 + depth * 0.1)
        for depth in range(9)
    ]
    assert speedup(0.8, 8, price) == pytest.approx(max(tried))
    assert speedup(0.05, 8, price) == 1.0, "depth 0 is always there"
    assert speedup(0.9, 8, price) > speedup(0.8, 8, price) > speedup(0.8, 8, Price(0.02, 0.3, 0.0))


def test_reading_slows_down_and_less_so_over_a_longer_way() -> None:
    price = Price(call=0.0, token=0.1, row=0.001)
    speedups = [speedup_behind(2.0, behind, price, 8, 100) for behind in (0, 100, 1000)]
    assert speedups[0] == 2.0
    assert speedups == sorted(speedups, reverse=True)
    assert speedup_behind(2.0, 1000, price, 8, 1000) > speedup_behind(2.0, 1000, price, 8, 10)


def test_hope_falls_as_a_model_is_known_and_rises_as_that_grows_old() -> None:
    tracks = Tracks({})
    track = tracks.track("a", "job", "de")
    hopes = []
    for _ in range(4):
        hopes.append(optimistic_rate(track) - track.rate)
        for right in [1, 1, 1, 0, 0] * 5:
            track.observe(1, right)
        track.fold()
    assert hopes == sorted(hopes, reverse=True)
    assert hopes[0] > 2 * hopes[-1]
    assert optimistic_rate(track, idle_steps=10_000) > optimistic_rate(track)
    assert optimistic_rate(tracks.track("a", "job", "fr")) - track.rate > hopes[-1], (
        "a tag nobody knows"
    )


def test_every_set_of_a_few_models_is_weighed_and_of_many_only_each_and_all() -> None:
    assert teams(["a"]) == [("a",)]
    assert teams(["a", "b"]) == [("a",), ("b",), ("a", "b")]
    assert len(teams(list("abcd"))) == 15
    assert len(teams(list("abcdef"))) == 7


@pytest.mark.parametrize(("right", "tested"), [(0, 50), (20, 50), (49, 50), (50, 50), (400, 500)])
def test_a_model_may_have_so_many_deviations_more_than_its_rate(right: int, tested: int) -> None:
    tracks = Tracks({})
    tracks.prime("job", "a", "de", float(right), float(tested))
    track = tracks.track("a", "job", "de")
    rate = track.rate
    for idle, left in ((0, 1.0), (ROUTE_FADE_STEPS, 0.5), (2 * ROUTE_FADE_STEPS, 0.25)):
        deviation = (max(rate * (1.0 - rate), 0.02) / (track.sure * left + 1.0)) ** 0.5
        hoped = min(rate + ROUTE_OPTIMISM * deviation, 0.99)
        assert optimistic_rate(track, idle) == pytest.approx(hoped)
    assert optimistic_rate(track) == optimistic_rate(track, 0)


def test_what_is_known_of_an_unused_route_fades_by_half_and_of_others_stays() -> None:
    tracks = Tracks({})
    tracks.prime("job", "a", "de", 80.0, 100.0)
    track = tracks.track("a", "job", "de")
    fade(track, ROUTE_FADE_STEPS)
    assert [(level.agreed, level.tested) for level in track.levels[1:]] == [
        (80.0, 100.0), (40.0, 50.0),
    ]  # fmt: skip
    fade(track, 0)
    assert track.levels[-1].tested == 50.0


def test_a_model_that_reads_first_drafts_for_the_rest_of_the_way() -> None:
    price = Price(call=0.0, token=0.1, row=0.001)
    reading = 100 * 0.001 * 8  # steps of depth 0
    assert speedup_behind(2.0, 100, price, 8, 50) == pytest.approx(50 / (50 / 2.0 + reading))
    assert speedup_behind(2.0, 100, price, 8, 0) == speedup_behind(2.0, 100, price, 8, 1)


def test_all_tracks_of_a_proposer_are_those_of_its_grades_jobs_and_tags() -> None:
    tracks = Tracks({})
    mine = [tracks.track(label, job, tag) for label in ("a", "a:1") for job in ("x", "y")
            for tag in (None, "de")]  # fmt: skip
    tracks.track("b", "x", None)
    assert set(map(id, tracks.of_proposer("a"))) == set(map(id, mine))
