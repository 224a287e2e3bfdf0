"""What the service does for drafting: priors in, lessons out, knowledge kept, each at its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from engine.decoding import baseline_of, bench, prompts

from specbatch.pipeline.engines.contract import Cohort, Completion, EngineStats, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.service import (
    KEEP_AT_END,
    KEEP_EVERY,
    EngineService,
    EngineTicket,
)
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.draft_switches import DraftSwitches
from specbatch.schemas.errors import EngineError
from specbatch.schemas.records import FinishReason, SamplingParams
from specbatch.schemas.speculation import AcceptanceCount, Decision, DecisionAction
from support.models import TinyPair

PATIENCE_SEC = 60.0
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
PRIORS = (AcceptanceCount("block", None, 3.0, 4.0),)


class ScriptedEngine:
    """Completes one request a step, in order, and writes down what it was asked."""

    def __init__(self, observations_per_step: int = 1) -> None:
        self.events: list[str] = []
        self.knowledge = Knowledge()
        self.stats = EngineStats()
        self.broken = False
        self._waiting: deque[Request] = deque()
        self._observations = observations_per_step

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def unfinished(self) -> list[Sequence]:
        return []  # it counts no time

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        self.events.append(f"prime {job} with {len(list(counts))}")

    def add(self, request: Request) -> None:
        self.events.append(f"add {request.request_id}")
        self._waiting.append(request)

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        gone = [r for r in self._waiting if matches(r)]
        self._waiting = deque(r for r in self._waiting if not matches(r))
        return [_completion(r, FinishReason.CANCELLED) for r in gone]

    def prepare(self) -> None:
        """It has nothing to load."""

    def switch(self, switches: DraftSwitches) -> None:
        """It drafts nothing."""

    def step(self) -> list[Completion]:
        if self.broken:
            raise RuntimeError("it broke")
        self.knowledge.step_time.observations += self._observations
        request = self._waiting.popleft()
        self.events.append(f"done {request.request_id}")
        return [_completion(request, FinishReason.LENGTH)]

    def lessons(self, job: str) -> Lessons:
        self.events.append(f"lessons of {job}")
        number = float(len(self.events))
        return Lessons(decisions=(Decision(number, DecisionAction.ON, "*", job),))


def _completion(request: Request, reason: FinishReason) -> Completion:
    empty: tuple[Any, ...] = ()
    counts = {"proposed": 0, "accepted": 0, "verifier_passes": 1}
    seconds = {"compute_sec": 0.0, "decode_sec": 0.0, "baseline_sec": 0.0}
    return Completion(
        request.request_id,
        *(empty, empty, empty),
        reason,
        *counts.values(),
        *seconds.values(),
        proposed_at_depth=(),
        accepted_at_depth=(),
    )


def served(
    engine: ScriptedEngine, keep: Callable[[Knowledge], None] | None = None
) -> EngineService:
    return EngineService(lambda: engine, keep=keep)  # type: ignore[arg-type,return-value]  # a stand-in


def requests(job: str, count: int) -> list[Request]:
    return [Request(f"{job}/{i}", (1,), PARAMS, seed=i, route=Cohort(job)) for i in range(count)]


def test_priors_go_in_before_the_requests_and_lessons_come_with_the_last_completion() -> None:
    engine = ScriptedEngine()
    service = served(engine)
    ticket = service.submit("a", requests("a", 3), PRIORS)
    assert len(ticket.wait(PATIENCE_SEC)) == 3
    service.close()
    assert engine.events == [
        "prime a with 1",
        *("add a/0", "add a/1", "add a/2"),
        *("done a/0", "done a/1", "done a/2"),
        "lessons of a",
    ]
    assert [d.reason for d in ticket.lessons.decisions] == ["a"]


def test_lessons_are_there_when_waiting_ends_and_not_before() -> None:
    ticket = EngineTicket("a", requests("a", 2))
    assert not ticket.lacks_one
    ticket.put(_completion(ticket.requests[0], FinishReason.STOP))
    assert ticket.lacks_one
    assert ticket.lessons == Lessons()
    with pytest.raises(EngineError, match="did not finish"):
        ticket.wait(0.0)


def test_each_ticket_takes_its_own_jobs_lessons_as_they_are_when_it_ends() -> None:
    engine = ScriptedEngine()
    service = served(engine)
    told = []
    for name, job in (("a1", "a"), ("b", "b"), ("a2", "a")):
        ticket = service.submit(job, requests(name, 2), PRIORS)
        ticket.wait(PATIENCE_SEC)
        told.append(ticket.lessons)
    service.close()
    assert [lessons.decisions[0].reason for lessons in told] == ["a", "b", "a"]
    assert engine.events.count("lessons of a") == 2
    assert engine.events.count("lessons of b") == 1


def test_a_ticket_without_requests_has_no_lessons() -> None:
    engine = ScriptedEngine()
    service = served(engine)
    ticket = service.submit("a", [])
    ticket.wait(PATIENCE_SEC)
    service.close()
    assert ticket.lessons == Lessons()
    assert not any(event.startswith("lessons") for event in engine.events)


def test_a_failed_step_leaves_no_lessons() -> None:
    engine = ScriptedEngine()
    engine.broken = True
    service = served(engine)
    ticket = service.submit("a", requests("a", 2), PRIORS)
    with pytest.raises(EngineError, match="it broke"):
        ticket.wait(PATIENCE_SEC)
    service.close()
    assert ticket.lessons == Lessons()


@pytest.mark.parametrize(
    ("per_step", "steps", "kept"),
    [
        (KEEP_EVERY // 2, 5, [KEEP_EVERY, 2 * KEEP_EVERY, 5 * KEEP_EVERY // 2]),
        (KEEP_EVERY, 2, [KEEP_EVERY, 2 * KEEP_EVERY]),  # the end adds nothing
        (1, KEEP_AT_END, [KEEP_AT_END]),
        (1, KEEP_AT_END - 1, []),  # next to nothing was learned
    ],
)
def test_what_was_learned_is_kept_now_and_then_and_at_the_end(
    per_step: int, steps: int, kept: list[int]
) -> None:
    seen: list[int] = []
    engine = ScriptedEngine(per_step)
    service = served(engine, lambda knowledge: seen.append(knowledge.step_time.observations))
    service.submit("a", requests("a", steps)).wait(PATIENCE_SEC)
    service.close()
    assert seen == kept


def test_without_anybody_to_keep_it_nothing_is_kept() -> None:
    engine = ScriptedEngine(KEEP_EVERY)
    service = served(engine)
    service.submit("a", requests("a", 3)).wait(PATIENCE_SEC)
    service.close()
    assert engine.knowledge.step_time.observations == 3 * KEEP_EVERY


# --- with a real engine -------------------------------------------------------------------------


def drafted(tiny: TinyPair, count: int, spoiled: int) -> list[Request]:
    """Requests of job "night" at depth 2, with their outputs as drafts; some of them wrong."""
    made = []
    for i, prompt in enumerate(prompts(count)):
        request = Request(f"{i}", prompt, PARAMS, i, depth=2, route=Cohort("night", f"{i % 2}"))
        output = baseline_of(tiny.verifier)(request).token_ids
        if i < spoiled:
            output = tuple((token + 1) % 256 for token in output)
        made.append(replace(request, draft_ids=output))
    return made


def test_a_tickets_lessons_count_every_draft_token_that_was_looked_at(tiny_pair: TinyPair) -> None:
    made = bench(tiny_pair.verifier)
    service = EngineService(lambda: made.engine)
    asked = drafted(tiny_pair, 6, spoiled=2)
    first = service.submit("night", asked)
    done = first.wait(PATIENCE_SEC)
    second = service.submit("night", [replace(r, request_id=f"again{r.seed}") for r in asked])
    second.wait(PATIENCE_SEC)
    service.close()
    agreed = sum(completion.accepted for completion in done)
    for ticket in (first, second):
        counts = ticket.lessons.counts
        assert {(count.proposer, count.tag) for count in counts} == {("block", "0"), ("block", "1")}
        assert sum(count.agreed for count in counts) == agreed > 0
        assert all(count.agreed < count.tested for count in counts)


def test_a_jobs_priors_are_taken_once(tiny_pair: TinyPair) -> None:
    engine: Engine = bench(tiny_pair.verifier).engine
    service = EngineService(lambda: engine)
    priors = [AcceptanceCount("history", None, 90.0, 100.0)]
    for i in range(3):
        asked = [
            replace(r, request_id=f"{i}/{r.seed}", depth=0)
            for r in drafted(tiny_pair, 2, spoiled=0)
        ]
        ticket = service.submit("night", asked, priors)
        ticket.wait(PATIENCE_SEC)
        assert ticket.lessons.counts == ()
    service.close()
    rate, tested = engine._speculator.decision_log.tracks.rate_of("history", "night")
    assert (rate, tested) == (pytest.approx(0.9), pytest.approx(100.0))
