"""Every decision is told once, with its reason and the figures that it rests on."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.acceptance import Acceptance
from specbatch.pipeline.policy.breaker import DecisionLog, Lessons, verdict
from specbatch.pipeline.policy.tuning import (
    BREAKER_TESTS,
    FIRST_OPEN_STEPS,
    MOST_DECISIONS,
    MOST_JOBS,
    SAME_TESTS_STEPS,
    STRIKES,
)
from specbatch.schemas.speculation import (
    ALL_PROPOSERS,
    AcceptanceCount,
    Decision,
    DecisionAction,
)


class Ticking:
    """Seconds since the epoch, one more at each reading."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def new_journal() -> DecisionLog:
    return DecisionLog({}, Ticking())


def learn(decision_log: DecisionLog, job: str, proposer: str, agreed: int, tested: int) -> None:
    track = decision_log.track(proposer, 0, job, None)
    for i in range(tested):
        track.observe(1, int(i < agreed))
    decision_log.tracks.fold()


def judge(decision_log: DecisionLog, job: str, proposer: str, step: int, pays: bool) -> None:
    decision_log.record_verdict(job, proposer, step, pays, lambda: 0.4, 8)


def take_out(decision_log: DecisionLog, job: str, proposer: str, step: int) -> None:
    """Looks that find that it does not pay, each at a refused draft more."""
    for _ in range(STRIKES):
        learn(decision_log, job, proposer, 0, 1)
        judge(decision_log, job, proposer, step, pays=False)


def actions(decisions: tuple[Decision, ...]) -> list[DecisionAction]:
    return [decision.action for decision in decisions]


def test_what_was_never_judged_may_be_asked() -> None:
    decision_log = new_journal()
    assert decision_log.allows("a", "block", 0)
    assert decision_log.lessons("a") == Lessons()


def test_a_proposer_is_taken_out_of_its_job_with_its_figures() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 5, 50)
    take_out(decision_log, "a", "block", 100)
    rate, tested = decision_log.tracks.rate_of("block", "a")
    assert not decision_log.allows("a", "block", 101)
    assert decision_log.allows("a", "ngram", 101), "another proposer on the job"
    assert decision_log.allows("b", "block", 101), "the proposer on another job"
    decision = decision_log.lessons("a").decisions[0]
    assert decision == Decision(
        at=1001.0,
        action=DecisionAction.DISABLED,
        proposer="block",
        reason=verdict("block", rate, tested, 0.4, 8, pays=False),
        acceptance=rate,
        break_even=0.4,
        sequences=8,
    )
    assert decision_log.lessons("b") == Lessons()


def test_nobody_is_taken_out_on_a_handful_of_tests() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, BREAKER_TESTS - STRIKES - 2)
    take_out(decision_log, "a", "block", 0)
    assert decision_log.allows("a", "block", 1)
    learn(decision_log, "a", "block", 0, 5)
    take_out(decision_log, "a", "block", 2)
    assert not decision_log.allows("a", "block", 3)


def test_replans_at_the_same_tests_count_as_one() -> None:
    """While it is hardly drafted there are many replans between two tests."""
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 100)
    for step in range(10):
        judge(decision_log, "a", "block", step, pays=False)
    assert decision_log.allows("a", "block", 10)
    for step in range(10, 10 + STRIKES - 1):
        assert decision_log.allows("a", "block", step)
        learn(decision_log, "a", "block", 0, 1)
        judge(decision_log, "a", "block", step, pays=False)
    assert not decision_log.allows("a", "block", 20)


def test_what_is_never_drafted_again_is_taken_out_in_the_end() -> None:
    """Else it would never be tried again: it is only the rest that somebody wakes from."""
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 100)
    last = (STRIKES - 1) * SAME_TESTS_STEPS
    for step in range(0, last + 1, 16):
        assert decision_log.allows("a", "block", step)
        judge(decision_log, "a", "block", step, pays=False)
    assert not decision_log.allows("a", "block", last + 1)


def test_break_even_is_worked_out_only_for_a_decision() -> None:
    decision_log, asked = new_journal(), 0

    def needed() -> float:
        nonlocal asked
        asked += 1
        return 0.4

    learn(decision_log, "a", "block", 0, 100)
    for step in range(STRIKES):
        assert asked == 0
        learn(decision_log, "a", "block", 0, 1)
        decision_log.record_verdict("a", "block", step, False, needed, 8)
    assert asked == 1


def test_it_is_tried_again_after_its_rest_and_that_is_told_once() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 100)
    rate, _ = decision_log.tracks.rate_of("block", "a")
    end = 100 + FIRST_OPEN_STEPS
    assert not decision_log.allows("a", "block", end - 1)
    assert decision_log.allows("a", "block", end)
    assert decision_log.allows("a", "block", end)
    assert decision_log.allows("a", "block", end + 1)
    told = decision_log.lessons("a").decisions
    assert actions(told) == [DecisionAction.DISABLED, DecisionAction.HALF_OPENED]
    assert (told[1].proposer, told[1].acceptance) == ("block", rate)
    assert "tried again" in told[1].reason
    assert decision_log.tracks.rate_of("block", "a")[1] <= 4.0, "it may be another now"


def test_after_a_rest_it_is_judged_anew_and_not_on_what_was_before() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 0)
    assert decision_log.allows("a", "block", FIRST_OPEN_STEPS)
    take_out(decision_log, "a", "block", FIRST_OPEN_STEPS)
    assert decision_log.allows("a", "block", FIRST_OPEN_STEPS), "next to nothing was seen of it yet"
    learn(decision_log, "a", "block", 0, BREAKER_TESTS)
    take_out(decision_log, "a", "block", 500)
    assert not decision_log.allows("a", "block", 500 + 2 * FIRST_OPEN_STEPS - 1), "a longer rest"
    assert decision_log.allows("a", "block", 500 + 2 * FIRST_OPEN_STEPS)


def test_after_a_rest_all_grades_together_are_next_to_nothing() -> None:
    decision_log = new_journal()
    for bucket in range(1, 7):
        track = decision_log.track("history", bucket, "a", None)
        for _ in range(100):
            track.observe(1, 0)
    decision_log.tracks.fold()
    for step in range(STRIKES):
        decision_log.track("history", 1, "a", None).observe(1, 0)
        decision_log.tracks.fold()
        judge(decision_log, "a", "history", step, pays=False)
    half_opens = STRIKES - 1 + FIRST_OPEN_STEPS
    assert not decision_log.allows("a", "history", half_opens - 1)
    assert decision_log.allows("a", "history", half_opens)
    for replan in range(STRIKES):
        judge(decision_log, "a", "history", half_opens + replan * SAME_TESTS_STEPS, pays=False)
    assert decision_log.allows("a", "history", half_opens + STRIKES * SAME_TESTS_STEPS)


def test_it_is_taken_in_where_new_tests_show_that_it_pays() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 0)
    assert decision_log.allows("a", "block", FIRST_OPEN_STEPS)
    learn(decision_log, "a", "block", 40, 40)
    rate, tested = decision_log.tracks.rate_of("block", "a")
    judge(decision_log, "a", "block", 400, pays=True)
    judge(decision_log, "a", "block", 416, pays=True)
    told = decision_log.lessons("a").decisions
    assert actions(told)[-1] is DecisionAction.ENABLED
    assert actions(told).count(DecisionAction.ENABLED) == 1
    assert told[-1].reason == verdict("block", rate, tested, 0.4, 8, pays=True)
    assert told[-1].acceptance == rate


def test_it_is_not_taken_in_on_hopes_alone() -> None:
    """Other jobs' drafts may promise much: its own must show it, or it swings in and out."""
    decision_log = DecisionLog({"block": Acceptance(agreed=9e5, tested=1e6, decay=1.0)}, Ticking())
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 0)
    assert decision_log.allows("a", "block", FIRST_OPEN_STEPS)
    judge(decision_log, "a", "block", FIRST_OPEN_STEPS, pays=True)
    assert actions(decision_log.lessons("a").decisions) == [
        DecisionAction.DISABLED,
        DecisionAction.HALF_OPENED,
    ]
    learn(decision_log, "a", "block", 0, 40)
    take_out(decision_log, "a", "block", 400)
    assert not decision_log.allows("a", "block", 400 + 2 * FIRST_OPEN_STEPS - 1), "a longer rest"


def test_a_turn_is_told_when_it_stands() -> None:
    decision_log = new_journal()
    reasons = iter("abcdef")

    def record_drafting(drafting: bool) -> None:
        decision_log.record_drafting("j", drafting, lambda: next(reasons), 4)

    record_drafting(True)  # the first choice at once
    record_drafting(True)
    record_drafting(False)  # one replan says otherwise …
    record_drafting(True)  # … and is not borne out
    record_drafting(False)
    assert actions(decision_log.lessons("j").decisions) == [DecisionAction.ON]
    record_drafting(False)  # the second behind one another
    record_drafting(False)
    told = decision_log.lessons("j").decisions
    assert actions(told) == [DecisionAction.OFF]
    assert (told[0].proposer, told[0].reason, told[0].sequences) == (ALL_PROPOSERS, "b", 4)
    record_drafting(True)
    record_drafting(True)
    assert actions(decision_log.lessons("j").decisions) == [DecisionAction.ON]


def test_the_first_turn_may_be_to_depth_0() -> None:
    decision_log = new_journal()
    decision_log.record_drafting("j", False, lambda: "dear", 4)
    decision_log.record_drafting("j", False, lambda: "dear", 4)
    assert actions(decision_log.lessons("j").decisions) == [DecisionAction.OFF]


def test_a_failing_proposer_is_told_to_every_job() -> None:
    decision_log = new_journal()
    decision_log.prime("a", [])
    decision_log.prime("b", [])
    decision_log.record_disabled("block", "it broke")
    for job in ("a", "b"):
        (decision,) = decision_log.lessons(job).decisions
        assert (decision.action, decision.proposer, decision.reason) == (
            DecisionAction.DISABLED,
            "block",
            "it broke",
        )
    assert decision_log.lessons("c") == Lessons()


def test_lessons_are_handed_out_once() -> None:
    decision_log = new_journal()
    decision_log.prime("a", [])
    learn(decision_log, "a", "block", 3, 5)
    decision_log.track("ngram", 2, "a", "x").observe(4, 0)
    decision_log.record_drafting("a", True, lambda: "why", 1)
    lessons = decision_log.lessons("a")
    assert set(lessons.counts) == {
        AcceptanceCount("block", None, 3, 5),
        AcceptanceCount("ngram:2", "x", 0, 1),
    }
    assert len(lessons.decisions) == 1
    assert decision_log.lessons("a") == Lessons()


def test_priors_are_taken_before_the_first_sight_of_a_job_and_never_again() -> None:
    decision_log = new_journal()
    priors = [AcceptanceCount("block", None, 180.0, 200.0)]
    decision_log.prime("a", priors)
    assert decision_log.tracks.rate_of("block", "a") == (pytest.approx(0.9), pytest.approx(200.0))
    decision_log.prime("a", priors)
    decision_log.prime("a", [AcceptanceCount("block", None, 0.0, 1e6)])
    assert decision_log.tracks.rate_of("block", "a") == (pytest.approx(0.9), pytest.approx(200.0))
    assert decision_log.lessons("a") == Lessons(), "what was read is not new"


def test_another_models_record_under_the_same_name_is_no_prior() -> None:
    decision_log = new_journal()
    decision_log.fingerprints = {"draft-model": "new", "ngram": ""}
    decision_log.prime(
        "a",
        [
            AcceptanceCount("draft-model:2", None, 9.0, 90.0, "old"),
            AcceptanceCount("draft-model", None, 8.0, 80.0),
            AcceptanceCount("ngram", None, 7.0, 70.0),
        ],
    )
    assert decision_log.tracks.rate_of("draft-model", "a") == (0.0, 0.0)
    assert decision_log.tracks.rate_of("ngram", "a")[1] == 70.0
    decision_log.prime("a", [AcceptanceCount("draft-model:2", None, 6.0, 60.0, "new")])
    assert decision_log.tracks.rate_of("draft-model", "a")[1] == 60.0
    learn(decision_log, "a", "draft-model", 3, 5)
    assert decision_log.lessons("a").counts == (AcceptanceCount("draft-model", None, 3, 5, "new"),)


def test_a_jobs_decisions_are_bounded_and_what_was_first_is_kept() -> None:
    decision_log = new_journal()
    decision_log.prime("a", [])
    for i in range(MOST_DECISIONS + 10):
        decision_log.record_disabled("block", str(i))
    told = decision_log.lessons("a").decisions
    assert [d.reason for d in told] == [str(i) for i in range(MOST_DECISIONS)]
    decision_log.record_disabled("block", "later")
    assert len(decision_log.lessons("a").decisions) == 1


def test_jobs_are_bounded_the_oldest_goes_first() -> None:
    decision_log = new_journal()
    for i in range(MOST_JOBS + 1):
        decision_log.prime(f"{i}", [AcceptanceCount("block", None, 0.0, 100.0)])
    assert decision_log.tracks.rate_of("block", "0")[1] == 0
    assert decision_log.tracks.rate_of("block", "1")[1] > 0
    assert decision_log.tracks.rate_of("block", f"{MOST_JOBS}")[1] > 0


@pytest.mark.parametrize("use", ["prime", "judge", "turned", "lessons"])
def test_a_job_that_is_still_used_outlives_those_that_are_not(use: str) -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 0)
    for i in range(MOST_JOBS - 1):
        decision_log.prime(f"{i}", [])
    match use:
        case "prime":
            decision_log.prime("a", [])
        case "judge":
            judge(decision_log, "a", "never tested", 0, pays=False)
        case "turned":
            decision_log.record_drafting("a", False, lambda: "why", 1)
        case "lessons":
            decision_log.lessons("a")
    decision_log.prime("one more", [])
    assert not decision_log.allows("a", "block", 1)


def test_what_was_off_in_a_job_that_goes_is_told_to_be_off_no_more() -> None:
    told: list[tuple[str, str, bool]] = []
    decision_log = DecisionLog({}, Ticking(), on_decision=lambda *turn: told.append(turn))
    for proposer in ("block", "awake", "fine"):
        learn(decision_log, "a", proposer, 0, 300)
    take_out(decision_log, "a", "awake", 0)
    assert decision_log.allows("a", "awake", FIRST_OPEN_STEPS)
    take_out(decision_log, "a", "block", FIRST_OPEN_STEPS)
    judge(decision_log, "a", "fine", FIRST_OPEN_STEPS, pays=True)
    decision_log.record_drafting("a", False, lambda: "why", 1)
    told.clear()
    for i in range(MOST_JOBS):
        decision_log.prime(f"{i}", [])
    assert told == [("a", "block", False), ("a", ALL_PROPOSERS, False)]


def test_a_failing_proposer_leaves_it_as_it_was_who_goes_first() -> None:
    decision_log = new_journal()
    for i in range(MOST_JOBS):
        decision_log.prime(f"{i}", [AcceptanceCount("block", None, 0.0, 100.0)])
    decision_log.record_disabled("block", "it broke")
    decision_log.prime("one more", [])
    assert [decision_log.tracks.rate_of("block", i)[1] > 0 for i in ("0", "1")] == [False, True]


def test_a_forgotten_job_begins_anew() -> None:
    decision_log = new_journal()
    learn(decision_log, "a", "block", 0, 300)
    take_out(decision_log, "a", "block", 0)
    decision_log.forget("a")
    assert decision_log.allows("a", "block", 1)
    assert decision_log.lessons("a") == Lessons()
    decision_log.forget("never seen")


FOUND = "ngram: acceptance 0.12 over the last 57 tested tokens"


@pytest.mark.parametrize(
    ("needed", "pays", "sentence"),
    [
        (0.4, False, f"{FOUND}; break-even at 8 sequences is 0.40"),
        (0.1, True, f"{FOUND}; break-even at 8 sequences is 0.10"),
        (1.2, False, "no acceptance pays for what drafts of ngram cost at 8 sequences"),
        (0.1, False, f"{FOUND}; it would pay if all 8 sequences in a step had such drafts"),
        (0.4, True, f"{FOUND}; it pays for those of the 8 sequences in a step that do better"),
    ],
)
def test_a_verdict_is_a_sentence_with_its_figures(needed: float, pays: bool, sentence: str) -> None:
    assert verdict("ngram", 0.12, 57.0, needed, 8, pays) == sentence


def test_a_proposer_that_pays_alone_is_told_who_is_better() -> None:
    found = verdict("ngram", 0.73, 57.0, 0.17, 8, False, ("history", 0.94))
    assert found == (
        "ngram: acceptance 0.73 over the last 57 tested tokens; it would pay alone at 8 sequences, "
        "but history, with acceptance 0.94, brings more, and both together no more than that"
    )
    worse = verdict("ngram", 0.12, 57.0, 0.17, 8, False, ("history", 0.94))
    assert "break-even at 8 sequences is 0.17" in worse, "it would not pay alone either"


# --- collapses ----------------------------------------------------------------------------------
def collapses(decision_log: DecisionLog) -> list[tuple[str, str, bool]]:
    """What is told, but for that all is well before anything was wrong."""
    heard: list[tuple[str, str, bool]] = []

    def hear(job: str, proposer: str, is_far_below: bool) -> None:
        if is_far_below or heard:
            heard.append((job, proposer, is_far_below))

    decision_log.on_collapse = hear
    return heard


def test_a_proposer_that_is_well_is_told_of_once() -> None:
    decision_log = new_journal()
    told: list[tuple[str, str, bool]] = []
    decision_log.on_collapse = lambda *one: told.append(one)
    replans(decision_log, 0.8)
    assert told == [("a", "block", False)]


def replans(
    decision_log: DecisionLog, share: float, tag: str | None = None, times: int = 4
) -> None:
    """Each after some hundred tests, in two buckets that differ."""
    for _ in range(times):
        for bucket, better in ((0, -0.1), (1, 0.1)):
            track = decision_log.track("block", bucket, "a", tag)
            for i in range(200):
                track.observe(1, int(i < 200 * min(max(share + better, 0.0), 1.0)))
        decision_log.tracks.fold()
        judge(decision_log, "a", "block", 0, pays=share > 0.4)


def test_a_fall_far_below_the_best_is_told_once_and_so_is_its_end() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    replans(decision_log, 0.8)
    assert heard == []
    replans(decision_log, 0.1, times=STRIKES - 1)
    assert heard == [], "a few bad rows"
    replans(decision_log, 0.1, times=3)
    assert heard == [("a", "block", True)]
    replans(decision_log, 0.8)
    assert heard[1:] == [("a", "block", False)]


def test_a_fall_from_what_earlier_jobs_found_is_a_collapse() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    counts = [("block", None, 400.0, 500.0), ("block:2", None, 90.0, 100.0)]
    decision_log.prime("a", [AcceptanceCount(*count) for count in counts])
    replans(decision_log, 0.1)
    assert heard == [("a", "block", True)]


def test_a_collapse_is_told_of_though_nothing_is_drafted_any_more() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    replans(decision_log, 0.8)
    replans(decision_log, 0.1, times=1)
    for step in range(0, STRIKES * SAME_TESTS_STEPS, 16):
        judge(decision_log, "a", "block", step, pays=False)
    assert heard == [("a", "block", True)]


def test_rows_that_are_sorted_by_tag_are_no_collapse() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    replans(decision_log, 0.8, "code")
    replans(decision_log, 0.1, "prose")
    assert heard == []
    replans(decision_log, 0.1, "code")
    assert heard == [("a", "block", True)]


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.6), (0.3, 0.1), (0.2, 0.1), (0.1, 0.1)])
def test_a_smaller_fall_and_what_was_never_good_is_none(before: float, after: float) -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    replans(decision_log, before)
    replans(decision_log, after)
    assert heard == []


def test_a_handful_of_tests_is_no_collapse() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    decision_log.prime("a", [AcceptanceCount("block", None, 5.0, 5.0)])
    for _ in range(STRIKES + 1):
        learn(decision_log, "a", "block", 0, BREAKER_TESTS)
        judge(decision_log, "a", "block", 1, pays=False)
    assert heard == []


def test_a_job_that_is_forgotten_has_not_collapsed_any_more() -> None:
    decision_log = new_journal()
    heard = collapses(decision_log)
    replans(decision_log, 0.8)
    replans(decision_log, 0.1)
    decision_log.forget("a")
    assert heard == [("a", "block", True), ("a", "block", False)]
