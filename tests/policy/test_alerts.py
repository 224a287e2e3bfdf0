"""What alerts hear of drafting: what is off, what collapsed, and what operators switched."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specbatch.pipeline.policy.breaker import DecisionLog, Lessons
from specbatch.pipeline.policy.tuning import BREAKER_TESTS, FIRST_OPEN_STEPS, MOST_JOBS, STRIKES
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope
from specbatch.schemas.speculation import ALL_PROPOSERS, DecisionAction

OFF, ON = True, False
WHOLE = DraftSwitch(SwitchScope(proposer="block"), 5.0, "anna", "it writes nonsense")
EVERYTHING = DraftSwitch(SwitchScope(), 6.0, "bert", "an incident")
OF_TAG = DraftSwitch(SwitchScope(tag="news"), 7.0, "cleo", "a trial")


@dataclass
class Heard:
    """A log, and all that it has told."""

    decisions: list[tuple[str, str, bool]] = field(default_factory=list)
    collapses: list[tuple[str, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = DecisionLog(
            {},
            lambda: 1000.0,
            lambda *told: self.decisions.append(told),
            lambda *told: self.collapses.append(told),
        )

    def learn(
        self, agreed: int, tested: int, tag: str | None = None, proposer: str = "block"
    ) -> None:
        track = self.log.track(proposer, 0, "a", tag)
        for i in range(tested):
            track.observe(1, int(i < agreed))
        self.log.tracks.fold()

    def judge(self, step: int, pays: bool, proposer: str = "block") -> None:
        self.log.record_verdict("a", proposer, step, pays, lambda: 0.4, 8)

    def disable(self, step: int = 0, proposer: str = "block") -> None:
        for _ in range(STRIKES):
            self.learn(0, 1, proposer=proposer)
            self.judge(step, pays=False, proposer=proposer)

    def collapse(self, tag: str | None = None) -> None:
        """Good for long, and then it is not; it still pays."""
        self.learn(300, 300, tag)
        self.judge(0, pays=True)
        for _ in range(STRIKES):
            self.learn(0, 200, tag)
            self.judge(1, pays=True)

    def taken(self, taken: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
        found = list(taken)
        taken.clear()
        return found

    def actions(self) -> list[tuple[DecisionAction, str, str]]:
        told = self.log.lessons("a").decisions
        return [(one.action, one.proposer, one.reason) for one in told]


@pytest.fixture
def heard() -> Heard:
    return Heard()


# --- what the engine finds by itself ------------------------------------------------------------
def test_a_proposer_that_does_not_pay_is_heard_of_and_so_is_its_return(heard: Heard) -> None:
    heard.learn(0, 100)
    heard.disable(step=10)
    assert heard.decisions == [("a", "block", OFF)]
    assert heard.log.rests("a", "block")
    assert not heard.log.rests("a", "ngram")
    assert not heard.log.rests("b", "block")
    assert heard.log.allows("a", "block", 10 + FIRST_OPEN_STEPS)
    assert not heard.log.rests("a", "block")
    assert heard.decisions == [("a", "block", OFF), ("a", "block", ON)]
    heard.learn(40, 40)
    heard.judge(300, pays=True)
    assert heard.decisions[2:] == [("a", "block", ON)]
    heard.judge(301, pays=True)
    assert len(heard.decisions) == 3


def test_a_proposer_that_fails_again_on_trial_rests_at_once_and_longer(heard: Heard) -> None:
    heard.learn(0, 300)
    heard.disable(step=0)
    again = FIRST_OPEN_STEPS
    assert heard.log.allows("a", "block", again)
    heard.learn(0, BREAKER_TESTS)
    heard.disable(step=again)
    assert not heard.log.allows("a", "block", again + 2 * FIRST_OPEN_STEPS - 1)
    assert heard.log.allows("a", "block", again + 2 * FIRST_OPEN_STEPS)
    assert [told for *_, told in heard.decisions] == [OFF, ON, OFF, ON]


def test_a_job_that_stops_drafting_is_heard_of_and_so_is_its_next_draft(heard: Heard) -> None:
    for drafting in (True, False, False, True, True):
        heard.log.record_drafting("a", drafting, lambda: "why", 4)
    assert heard.decisions == [
        ("a", ALL_PROPOSERS, ON), ("a", ALL_PROPOSERS, OFF), ("a", ALL_PROPOSERS, ON),
    ]  # fmt: skip


def test_a_route_is_told_once_it_stood_for_two_replans(heard: Heard) -> None:
    for model in ("small", "small", "small", "large", "small", "large", "large"):
        heard.log.record_route("a", "news", model, lambda: "faster", 4)
    assert heard.actions() == [
        (DecisionAction.ROUTED, "small", "faster"), (DecisionAction.ROUTED, "large", "faster"),
    ]  # fmt: skip
    assert heard.decisions == []


def test_a_collapse_is_heard_of_once_and_so_is_its_end(heard: Heard) -> None:
    heard.collapse("news")
    assert heard.collapses == [("a", "block", False), ("a", "block", True)]
    heard.learn(400, 400, "news")
    heard.judge(2, pays=True)
    assert heard.collapses[2:] == [("a", "block", False)]


def test_a_fall_by_less_than_half_or_to_what_it_always_was_is_no_collapse(heard: Heard) -> None:
    heard.learn(300, 300)
    heard.judge(0, pays=True)
    for _ in range(2 * STRIKES):
        heard.learn(120, 200)
        heard.judge(1, pays=True)
    low = Heard()
    low.learn(45, 300)
    low.judge(0, pays=True)
    for _ in range(2 * STRIKES):
        low.learn(0, 200)  # by less than the least that is told
        low.judge(1, pays=True)
    assert heard.collapses == low.collapses == [("a", "block", False)]


# --- samples of what rests ----------------------------------------------------------------------
def test_samples_that_would_pay_end_a_rest_at_once(heard: Heard) -> None:
    heard.learn(0, 100)
    heard.disable()
    heard.log.review(20)
    assert not heard.log.allows("a", "block", 21), "nothing is new"
    heard.learn(10, 100)
    heard.log.review(30)
    assert not heard.log.allows("a", "block", 31), "too few agreed"
    heard.learn(400, 400)
    heard.log.review(40)
    assert heard.log.allows("a", "block", 40)
    assert not heard.log.rests("a", "block")


def test_a_handful_of_samples_ends_no_rest(heard: Heard) -> None:
    heard.learn(0, 100)
    heard.disable()
    heard.log.tracks.soften("block", "a")
    heard.learn(BREAKER_TESTS - 8, BREAKER_TESTS - 8)
    assert heard.log.tracks.rate_of("block", "a")[0] > 0.4
    heard.log.review(40)
    assert not heard.log.allows("a", "block", 40)


def test_samples_tell_of_a_collapse_and_of_its_end(heard: Heard) -> None:
    heard.learn(300, 300)
    heard.judge(0, pays=True)
    heard.disable()
    for step in range(STRIKES):
        assert heard.collapses == [("a", "block", False)]
        heard.learn(0, 300)
        heard.log.review(step)
        heard.log.review(step)  # the same figures count once
    assert heard.collapses[1:] == [("a", "block", True)]
    heard.learn(400, 400)
    heard.log.review(50)
    assert heard.collapses[2:] == [("a", "block", False)]


def test_what_takes_part_is_not_reviewed(heard: Heard) -> None:
    heard.learn(300, 300)
    heard.judge(0, pays=True)
    for step in range(2 * STRIKES):
        heard.learn(0, 300)
        heard.log.review(step)
    assert heard.collapses == [("a", "block", False)]


# --- switches -----------------------------------------------------------------------------------
def test_a_switch_is_noted_once_with_who_and_why_and_so_is_its_end(heard: Heard) -> None:
    for _ in range(3):
        heard.log.record_switched_off("a", {"block": WHOLE, "ngram": EVERYTHING}, everything=False)
    assert heard.actions() == [
        (DecisionAction.SWITCHED_OFF, "block", "switched off by anna: it writes nonsense"),
        (DecisionAction.SWITCHED_OFF, ALL_PROPOSERS, "switched off by bert: an incident"),
    ]
    heard.log.record_switched_on([WHOLE])
    assert heard.actions() == [
        (DecisionAction.SWITCHED_ON, ALL_PROPOSERS, "bert had switched it off: an incident")
    ]
    heard.log.record_switched_on([])
    heard.log.record_switched_on([])
    assert heard.actions() == [
        (DecisionAction.SWITCHED_ON, "block", "anna had switched it off: it writes nonsense")
    ]


def test_a_switch_takes_the_place_of_what_the_engine_had_found(heard: Heard) -> None:
    heard.collapse()
    heard.learn(0, 50, proposer="ngram")
    heard.disable(proposer="ngram")
    heard.log.record_drafting("a", False, lambda: "dear", 4)
    heard.taken(heard.decisions), heard.taken(heard.collapses)
    off = {"block": EVERYTHING, "ngram": EVERYTHING}
    heard.log.record_switched_off("a", off, everything=True)
    assert heard.decisions == [("a", "ngram", ON), ("a", ALL_PROPOSERS, ON)]
    assert heard.collapses == [("a", "block", False)]
    assert heard.log.allows("a", "ngram", 1), "it starts afresh"
    heard.log.record_switched_off("a", off, everything=True)
    assert len(heard.decisions) == 2
    heard.log.record_drafting("a", False, lambda: "dear still", 4)
    assert heard.decisions[2:] == [("a", ALL_PROPOSERS, OFF)], "and alerts again at once"


def test_a_collapse_is_counted_anew_after_a_switch(heard: Heard) -> None:
    heard.collapse()
    heard.log.record_switched_off("a", {"block": WHOLE}, everything=False)
    heard.taken(heard.collapses)
    for _ in range(STRIKES - 1):
        heard.learn(0, 200)
        heard.judge(2, pays=True)
        assert not any(fell for *_, fell in heard.collapses)
    heard.learn(0, 200)
    heard.judge(2, pays=True)
    assert heard.collapses[-1] == ("a", "block", True)


def test_a_switch_for_one_tag_leaves_the_rest_as_it_is(heard: Heard) -> None:
    heard.learn(0, 50)
    heard.disable()
    heard.log.record_drafting("a", False, lambda: "dear", 4)
    heard.taken(heard.decisions)
    heard.log.record_switched_off("a", {"block": OF_TAG}, everything=True)
    heard.log.record_switched_off("a", {"ngram": WHOLE}, everything=False)
    heard.log.record_switched_off("a", {"ngram": WHOLE, "block": OF_TAG}, everything=True)
    assert heard.decisions == []
    assert heard.log.rests("a", "block")
    assert [action for action, *_ in heard.actions()][-2:] == [DecisionAction.SWITCHED_OFF] * 2


def test_what_is_switched_off_before_anything_was_found_is_no_news_to_alerts(heard: Heard) -> None:
    heard.log.record_drafting("a", True, lambda: "it pays", 4)
    heard.judge(0, pays=True)
    heard.taken(heard.decisions)
    heard.log.record_switched_off("a", {"block": EVERYTHING}, everything=True)
    assert (heard.decisions, heard.collapses) == ([], [])


# --- the end of jobs ----------------------------------------------------------------------------
def test_a_forgotten_job_leaves_no_alert_behind(heard: Heard) -> None:
    heard.collapse()
    heard.learn(0, 50, proposer="ngram")
    heard.disable(proposer="ngram")
    heard.log.record_drafting("a", False, lambda: "dear", 4)
    heard.taken(heard.decisions), heard.taken(heard.collapses)
    for number in range(MOST_JOBS):  # the one that was not used for longest makes room
        heard.log.prime(f"job-{number}", [])
    assert heard.decisions == [("a", "ngram", ON), ("a", ALL_PROPOSERS, ON)]
    assert heard.collapses == [("a", "block", False)]
    assert heard.log.lessons("a") == Lessons()
