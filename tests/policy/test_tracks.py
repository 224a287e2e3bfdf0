"""Acceptance from the general to the particular: who learns from what, and who is asked first."""

from __future__ import annotations

import random

import pytest

from specbatch.pipeline.policy.acceptance import (
    Acceptance,
    Tracks,
    label_of,
    new_level,
    proposer_of,
)
from specbatch.pipeline.policy.tuning import FRESH_RATE, FRESH_TESTS, LEVEL_WEIGHT, OPTIMISM_TESTS


def blocks(tracks: Tracks, label: str, job: str, tag: str | None, rate: float, count: int) -> None:
    """`count` draft tokens one by one, every so many of them accepted; then settled."""
    track = tracks.track(label, job, tag)
    for i in range(count):
        track.observe(1, int((i + 1) * rate) - int(i * rate))
    tracks.fold()


def test_a_label_tells_its_proposer_and_grade_0_is_its_name() -> None:
    assert label_of("ngram", 0) == "ngram"
    assert label_of("ngram", 3) == "ngram:3"
    assert {proposer_of(label_of("draft-model", bucket)) for bucket in range(4)} == {"draft-model"}


def test_without_evidence_a_track_is_its_proposers_prior() -> None:
    known = {"block": Acceptance(agreed=800.0, tested=1000.0)}
    tracks = Tracks(known)
    assert tracks.track("block", "a", None).rate == pytest.approx(0.8, abs=0.01)
    assert tracks.track("block", "a", "x").rate == pytest.approx(0.8, abs=0.01)
    assert tracks.track("other", "a", None).rate == pytest.approx(0.6)
    assert set(known) == {"block", "other"}, "what is learned in general is kept by the owner"


def test_a_source_is_doubted_to_be_better_until_it_was_tried_enough_on_the_job() -> None:
    tracks = Tracks({})
    doubts = []
    for _ in range(8):
        doubts.append(tracks.track("block", "a", None).doubt)
        blocks(tracks, "block", "a", None, 0.3, 8)
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[0] == 0.5, "nothing is known"
    assert 0.05 < doubts[-1] < 0.1
    assert tracks.track("block", "a", None).doubt == 0.0
    assert tracks.track("block", "a", "x").doubt == 0.0, "the job's drafts count, whatever the tag"
    assert tracks.track("block", "b", None).doubt == 0.5
    tracks.prime("b", "block", None, 30.0, 100.0)
    assert tracks.track("block", "b", None).doubt == 0.0, "other nights tried it"


def test_the_particular_outweighs_the_general_as_it_is_tested() -> None:
    tracks = Tracks({"block": Acceptance(agreed=900.0, tested=1000.0, decay=1.0)})
    track = tracks.track("block", "a", None)
    before = track.rate
    rates = [before]
    for _ in range(6):
        blocks(tracks, "block", "a", None, 0.0, 10)
        rates.append(track.rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[1] > 0.4, "ten tests weigh less than the level above"
    assert rates[-1] < 0.25
    # Exactly: the job's tests, and the level above counting as so many.
    above, own = track.levels
    assert track.rate == pytest.approx(
        (own.agreed + LEVEL_WEIGHT * above.rate) / (own.tested + LEVEL_WEIGHT)
    )


def test_a_jobs_verdict_is_that_jobs_alone_but_for_the_general_level() -> None:
    tracks = Tracks({})
    blocks(tracks, "block", "bad", None, 0.0, 100)
    bad, other = (tracks.track("block", job, None) for job in ("bad", "other"))
    assert bad.rate < 0.05
    assert other.rate == FRESH_RATE, "what failed on one job may fit another: it is tried"
    blocks(tracks, "block", "other", None, 0.0, 20)
    assert other.rate < 0.1, "then the general level speaks as well"
    blocks(tracks, "block", "other", None, 1.0, 100)
    assert other.rate > 0.8
    assert bad.rate < 0.1, "tests of another job hardly move a judged one"


def test_a_tags_own_estimate_wins_over_its_jobs() -> None:
    tracks = Tracks({})
    for _ in range(30):
        blocks(tracks, "block", "a", "easy", 1.0, 10)
        blocks(tracks, "block", "a", "hard", 0.0, 10)
    assert tracks.track("block", "a", "easy").rate > 0.9
    assert tracks.track("block", "a", "hard").rate < 0.1
    assert 0.3 < tracks.track("block", "a", None).rate < 0.7
    assert 0.3 < tracks.track("block", "a", "new").rate < 0.7, "a new tag begins with its job"


def test_a_tag_of_another_job_is_another_tag() -> None:
    tracks = Tracks({})
    blocks(tracks, "block", "a", "x", 1.0, 200)
    assert tracks.track("block", "b", "x").levels[2].tested == 0
    assert tracks.track("block", "b", "x").levels[1].tested == 0


def test_tokens_behind_the_first_refusal_were_not_tested() -> None:
    tracks = Tracks({})
    track = tracks.track("block", "a", None)
    track.observe(8, 3)
    track.observe(4, 4)
    track.observe(0, 0)
    assert (track.agreed, track.tested) == (7, 8)
    assert track.judged == 8, "what waits is counted too"
    assert track.rate == pytest.approx(0.6), "but not estimated with until it is settled"
    tracks.fold()
    assert (track.agreed, track.tested) == (0, 0)
    assert track.judged == pytest.approx(8, rel=0.03)
    assert track.rate == pytest.approx((7 + 12 * (7 + 2.4) / 12) / 20, rel=0.01)
    before = track.rate
    tracks.fold()
    assert track.rate == before, "settled once"


def test_rates_follow_a_change_within_some_hundred_tests() -> None:
    tracks = Tracks({})
    blocks(tracks, "block", "a", None, 0.8, 2000)
    track = tracks.track("block", "a", None)
    assert track.rate == pytest.approx(0.8, abs=0.03)
    blocks(tracks, "block", "a", None, 0.05, 600)
    assert track.rate < 0.12
    blocks(tracks, "block", "a", None, 0.8, 600)
    assert track.rate > 0.7


@pytest.mark.parametrize(("truth", "rate"), [(0.8, 0.8), (0.05, 0.05), (0.8, 0.7)])
def test_what_was_expected_is_no_surprise(truth: float, rate: float) -> None:
    tracks, generator = Tracks({}), random.Random(7)
    blocks(tracks, "block", "a", None, rate, 1000)
    track = tracks.track("block", "a", None)
    told = 0
    for _ in range(400):
        for _ in range(32):
            track.observe(1, int(generator.random() < truth))
        told += tracks.surprised()
        track.agreed = track.tested = 0
    assert told <= 8


def test_a_collapse_is_a_surprise_within_a_few_tests_and_a_rise_is_none() -> None:
    tracks = Tracks({})
    blocks(tracks, "block", "a", None, 0.8, 1000)
    track = tracks.track("block", "a", None)
    for _ in range(15):
        track.observe(1, 0)
        assert not tracks.surprised(), "too few to tell"
    track.observe(1, 0)
    assert tracks.surprised()
    tracks.fold()
    assert not tracks.surprised(), "once settled it is expected"
    blocks(tracks, "block", "b", None, 0.1, 1000)
    for _ in range(100):
        tracks.track("block", "b", None).observe(1, 1)
    assert not tracks.surprised(), "it is only worse than expected that must be acted on at once"


def test_an_earlier_night_counts_until_tonight_says_otherwise() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", None, 9e6, 1e7)
    track = tracks.track("block", "a", None)
    assert track.rate > 0.85
    assert track.judged == pytest.approx(200.0), "a million tests count no more than so many"
    assert tracks.track("block", "b", None).rate == pytest.approx(0.6)
    blocks(tracks, "block", "a", None, 0.0, 400)
    assert track.rate < 0.2


def test_few_tests_of_an_earlier_night_count_as_few() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", None, 10.0, 10.0)
    tracks.prime("a", "empty", None, 0.0, 0.0)
    assert tracks.track("block", "a", None).rate == pytest.approx((10 + 0.6 * 12) / 22)
    assert tracks.track("empty", "a", None).rate == pytest.approx(0.6)


def test_an_earlier_nights_tag_tells_of_the_tag_and_a_little_of_the_job() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", "x", 190.0, 200.0)
    assert tracks.track("block", "a", "x").rate > 0.9
    assert tracks.track("block", "a", "y").rate > 0.8
    assert tracks.track("block", "b", "x").rate == pytest.approx(0.6)


def test_the_rate_of_a_proposer_is_over_its_grades_and_tags() -> None:
    tracks = Tracks({})
    tracks.prime("a", "ngram", None, 10.0, 100.0)
    tracks.prime("a", "ngram:2", "x", 90.0, 100.0)
    tracks.prime("a", "ngram-other", None, 100.0, 100.0)
    tracks.prime("b", "ngram", None, 100.0, 100.0)
    rate, tested = tracks.rate_of("ngram", "a")
    assert (rate, tested) == (pytest.approx(0.5), pytest.approx(200.0))
    assert tracks.rate_of("nobody", "a") == (0.0, 0)


def test_softened_it_believes_new_tests_soon_whatever_the_tag() -> None:
    tracks = Tracks({})
    for tag in (None, "x"):
        blocks(tracks, "block", "a", tag, 0.02, 1000)
        blocks(tracks, "block:1", "a", tag, 0.02, 1000)
        blocks(tracks, "other", "a", tag, 0.02, 1000)
        blocks(tracks, "block", "b", tag, 0.02, 1000)
    others = [
        tracks.track(label, job, tag).rate
        for label, job in (("other", "a"), ("block", "b"))
        for tag in (None, "x")
    ]
    tracks.soften("block", "a")
    assert others == [
        tracks.track(label, job, tag).rate
        for label, job in (("other", "a"), ("block", "b"))
        for tag in (None, "x")
    ], "of that proposer on that job alone"
    for label in ("block", "block:1"):
        for tag in (None, "x"):
            track = tracks.track(label, "a", tag)
            assert track.rate < 0.1, "it is not believed to be better, only less surely bad"
            assert track.judged <= 4.0
    for tag in (None, "x"):
        blocks(tracks, "block", "a", tag, 1.0, 32)
        assert tracks.track("block", "a", tag).rate > 0.6


def test_softened_all_grades_together_count_for_a_few_tests_and_keep_their_rates() -> None:
    tracks = Tracks({})
    for bucket in range(1, 7):
        for tag in (None, "x"):
            tracks.prime("a", label_of("history", bucket), tag, 10.0 * bucket, 100.0)
    tracks.soften("history", "a")
    assert tracks.rate_of("history", "a") == (pytest.approx(0.35), pytest.approx(4.0))
    found = [tracks.track(label_of("history", bucket), "a", "x") for bucket in range(1, 7)]
    assert sum(track.judged for track in found) == pytest.approx(4.0), "of the tag as of the job"
    for bucket, track in enumerate(found, 1):
        for level in track.levels[1:]:
            assert level.agreed / level.tested == pytest.approx(bucket / 10)


def test_softening_adds_nothing_to_what_is_hardly_known() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", None, 1.0, 2.0)
    tracks.soften("block", "a")
    assert tracks.rate_of("block", "a") == (pytest.approx(0.5), pytest.approx(2.0))


def test_counts_are_told_once_by_label_and_tag() -> None:
    tracks = Tracks({})
    tracks.track("block", "a", None).observe(8, 3)
    tracks.track("block", "a", "x").observe(2, 2)
    tracks.track("ngram:2", "a", "x").observe(4, 0)
    tracks.track("block", "b", None).observe(5, 5)
    tracks.track("block", "a", "unused")
    assert sorted(tracks.counts("a"), key=str) == [
        ("block", "x", 2, 2),
        ("block", None, 3, 4),
        ("ngram:2", "x", 0, 1),
    ]
    assert tracks.counts("a") == []
    tracks.track("block", "a", None).observe(1, 1)
    tracks.fold()  # a replan in between takes nothing away
    tracks.track("block", "a", None).observe(1, 0)
    assert tracks.counts("a") == [("block", None, 1, 2)]
    assert tracks.counts("b") == [("block", None, 5, 5)]


def test_primed_tests_are_not_told_again() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", "x", 50.0, 100.0)
    tracks.track("block", "a", "x")
    assert tracks.counts("a") == []


def test_a_forgotten_job_leaves_only_what_is_known_in_general() -> None:
    tracks = Tracks({})
    for job in ("a", "b"):
        blocks(tracks, "block", job, "x", 0.0, 300)
    tracks.forget("a")
    again, kept = tracks.track("block", "a", "x"), tracks.track("block", "b", "x")
    assert [level.tested for level in again.levels[1:]] == [0, 0]
    assert again.levels[0] is kept.levels[0]
    assert kept.judged > 100
    assert tracks.counts("a") == []
    assert tracks.counts("b") == [("block", "x", 0, 300)]


# --- what the newest tests say, and how much is known -------------------------------------------
def test_the_newest_tests_of_a_tag_count_once_whatever_labels_they_had() -> None:
    tracks, whole = Tracks({}), new_level()
    for agreed in (1, 0, 2):
        for label in ("block", "block:1"):
            for _ in range(4):
                tracks.track(label, "a", "x").observe(3, agreed)
                tracks.track(label, "b", "x").observe(1, 1)
        tracks.fold()
        whole.observe_many(8 * agreed, 8 * (agreed + 1))
    rate = pytest.approx(whole.agreed / whole.tested)
    assert tracks.lately("block", "a") == {"x": (rate, pytest.approx(whole.tested))}
    tracks.forget("a")
    assert tracks.lately("block", "a") == {}
    assert set(tracks.lately("block", "b")) == {"x"}


@pytest.mark.parametrize("tested", [16, 40, 100])
@pytest.mark.parametrize("agreed_before", [100, 500, 800, 995])
def test_three_deviations_below_what_was_expected_are_a_surprise(
    tested: int, agreed_before: int
) -> None:
    for agreed in range(tested + 1):
        tracks = Tracks({})
        tracks.prime("a", "block", None, agreed_before, 1000.0)
        track = tracks.track("block", "a", None)
        for i in range(tested):
            track.observe(1, int(i < agreed))
        expected, variance = tested * track.rate, tested * track.rate * (1.0 - track.rate)
        # A count is rounded: half a test more is no surprise, however sure the rate is.
        assert tracks.surprised() is (expected - agreed > 3.0 * (variance + 0.5**2) ** 0.5)


def test_one_refusal_where_all_was_accepted_is_no_surprise() -> None:
    tracks = Tracks({"block": Acceptance(agreed=1e6, tested=1e6)})
    tracks.prime("a", "block", None, 1e6, 1e6)
    track = tracks.track("block", "a", None)
    track.observe(15, 15)
    track.observe(1, 0)
    assert not tracks.surprised()
    track.observe(1, 0)
    assert tracks.surprised()


def test_how_sure_a_rate_is_counts_its_own_tests_and_what_a_prior_counts_for() -> None:
    tracks = Tracks({"known": Acceptance(agreed=900.0, tested=1000.0)})
    assert tracks.track("known", "a", None).sure == LEVEL_WEIGHT, "as much as its prior"
    assert tracks.track("new", "a", None).sure == 4.0, "a guess alone"
    tracks.prime("a", "known", None, 3.0, 5.0)
    assert tracks.track("known", "a", None).sure == LEVEL_WEIGHT + 5.0
    assert tracks.track("known", "a", "x").sure == LEVEL_WEIGHT
    track = tracks.track("known", "a", None)
    track.observe(4, 2)
    assert track.sure == LEVEL_WEIGHT + 5.0 + 3.0, "what waits is known too"


def test_what_waits_lowers_doubt() -> None:
    track = Tracks({}).track("block", "a", None)
    doubts = [track.doubt]
    for _ in range(OPTIMISM_TESTS):
        track.observe(1, 0)
        doubts.append(track.doubt)
    assert doubts == sorted(doubts, reverse=True)
    assert len(set(doubts)) == OPTIMISM_TESTS + 1
    assert doubts[3] == pytest.approx(0.25), "by the root of the tests"
    assert doubts[-1] == 0.0 < doubts[-2]


def test_a_job_judges_for_itself_once_it_has_some_tests() -> None:
    tracks = Tracks({"block": Acceptance(agreed=0.0, tested=1000.0)})
    track = tracks.track("block", "a", None)
    for _ in range(FRESH_TESTS):
        assert track.rate > 0.2, "other jobs do not speak against it yet"
        blocks(tracks, "block", "a", None, 0.0, 1)
    assert track.rate < 0.01


def test_a_single_test_of_an_earlier_night_counts_as_one() -> None:
    tracks = Tracks({})
    tracks.prime("a", "block", None, 1.0, 1.0)
    assert tracks.track("block", "a", None).rate == pytest.approx((1 + 0.6 * 12) / 13)
