"""Tickets have all of the time that their requests took, whatever became of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.jobs.chaos.stand_in_model import CONTEXT_TOKENS, VOCAB_SIZE
from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.service import EngineService, EngineTicket
from specbatch.schemas.errors import EngineError, RequestCancelledError
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import SamplingParams

PATIENCE_SEC = 60.0
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)


class Stepwise(StandInEngine):
    """Steps when it is allowed to, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, CONTEXT_TOKENS, max_sequences=4)
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepped = threading.Event()
        self.breaks = False

    def step(self) -> list[Completion]:
        assert self.may_step.wait(PATIENCE_SEC)
        if self.breaks:
            raise RuntimeError("the device fell over")
        finished = super().step()
        self.stepped.set()
        return finished


class Bed:
    """A service, and all engines that it made."""

    def __init__(self) -> None:
        self.engines: list[Stepwise] = []
        self.service = EngineService(self._make)

    def _make(self) -> Stepwise:
        self.engines.append(Stepwise())
        return self.engines[-1]

    @property
    def counted(self) -> Ticks:
        return sum((engine.stats.ticks for engine in self.engines), NO_TICKS)

    def begin(self, job: str, params: SamplingParams = SHORT, count: int = 6) -> EngineTicket:
        """More requests than the engine has at a time."""
        return self.service.submit(
            job, [Request(f"{job}/{i}/0", (i, 2, 3), params, seed=i) for i in range(count)]
        )

    def since(self) -> int | None:
        return self.service.stepping_since

    def step(self, engine: Stepwise) -> None:
        """At least one more."""
        engine.stepped.clear()
        assert engine.stepped.wait(PATIENCE_SEC)


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    for engine in made.engines:
        engine.may_step.set()
    made.service.close()


def test_tickets_have_what_the_engine_counted_and_completions_have_what_tickets_have(
    bed: Bed,
) -> None:
    tickets = [bed.begin(job) for job in ("a", "b", "c")]
    for ticket in tickets:
        done = ticket.wait(PATIENCE_SEC)
        assert ticket.is_over
        assert ticket.ticks == sum((completion.ticks for completion in done), NO_TICKS)
        assert ticket.ticks.total > 0
    assert sum((ticket.ticks for ticket in tickets), NO_TICKS) == bed.counted


def test_what_was_cancelled_keeps_its_time(bed: Bed) -> None:
    ticket, other = bed.begin("a", ENDLESS), bed.begin("b")
    other.wait(PATIENCE_SEC)
    bed.service.cancel("a")
    with pytest.raises(RequestCancelledError):
        ticket.wait(PATIENCE_SEC)
    assert ticket.ticks.total > 0
    bed.service.close()
    assert ticket.ticks + other.ticks == bed.counted


def test_what_a_newer_attempt_took_over_stays_with_the_older_one(bed: Bed) -> None:
    older = bed.begin("a", ENDLESS)
    while not bed.engines:
        assert not older.is_over
    bed.step(bed.engines[0])
    newer = bed.begin("a", SHORT)
    with pytest.raises(RequestCancelledError, match="newer attempt"):
        older.wait(PATIENCE_SEC)
    taken = older.ticks
    done = newer.wait(PATIENCE_SEC)
    assert taken.total > 0
    assert older.ticks == taken
    assert newer.ticks == sum((completion.ticks for completion in done), NO_TICKS)
    assert older.ticks + newer.ticks == bed.counted


def test_an_engine_that_fails_takes_no_time_along(bed: Bed) -> None:
    failed = bed.begin("a", ENDLESS)
    while not bed.engines:
        assert not failed.is_over
    bed.step(bed.engines[0])
    bed.engines[0].breaks = True
    with pytest.raises(EngineError, match="fell over"):
        failed.wait(PATIENCE_SEC)
    again = bed.begin("a")
    again.wait(PATIENCE_SEC)
    assert failed.ticks.total > 0
    assert failed.ticks + again.ticks == bed.counted


def test_refused_requests_take_no_time(bed: Bed) -> None:
    ticket = bed.service.submit("a", [Request("a/0/0", (), SHORT, seed=1)])
    assert ticket.ticks == NO_TICKS
    ticket.wait(PATIENCE_SEC)
    assert ticket.ticks == NO_TICKS


def test_a_service_says_since_when_it_steps(bed: Bed) -> None:
    assert bed.since() is None
    ticket = bed.begin("a")
    ticket.wait(PATIENCE_SEC)
    engine = bed.engines[0]
    engine.may_step.clear()
    before = now()
    ticket = bed.begin("b")
    since = None
    while since is None:
        assert not ticket.is_over
        since = bed.since()
    assert before <= since <= now()
    engine.may_step.set()
    ticket.wait(PATIENCE_SEC)
    bed.service.close()
    assert bed.since() is None
