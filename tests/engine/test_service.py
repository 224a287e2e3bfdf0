"""One engine for many callers: tickets are answered, cancelled, failed, and never forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.decoding import assert_same, baseline_of, bench, prompts

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.service import EngineService, EngineTicket
from specbatch.schemas.errors import (
    DeviceLostError,
    EngineError,
    ModelError,
    RequestCancelledError,
    StepHungError,
)
from specbatch.schemas.records import SamplingParams
from support.models import TinyPair
from support.workers import wait_until

PARAMS = SamplingParams(max_tokens=12, temperature=0.8)
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)
PATIENCE_SEC = 60.0


class Panic(BaseException):
    """As what a panic in Rust becomes: no `Exception`."""


class Tripping:
    """An engine whose steps wait for `may_step` and fail while `broken` is set."""

    def __init__(self, engine: Engine, bed: Bed) -> None:
        self._engine, self._bed = engine, bed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        assert self._bed.may_step.wait(PATIENCE_SEC)
        if self._bed.broken.is_set():
            raise self._bed.error
        return self._engine.step()


class Bed:
    """A service over tiny engines, counted."""

    def __init__(self, verifier: Path) -> None:
        self.may_step, self.broken = threading.Event(), threading.Event()
        self.may_step.set()
        self.made = 0
        self.error: BaseException = RuntimeError("the device fell over")
        self._verifier = verifier
        self.service = EngineService(self._make)

    def _make(self) -> Any:
        self.made += 1
        return Tripping(bench(self._verifier).engine, self)


@pytest.fixture
def bed(tiny_pair: TinyPair) -> Iterator[Bed]:
    bed = Bed(tiny_pair.verifier)
    yield bed
    bed.may_step.set()
    bed.service.close()


def requests(job: str, count: int = 5, params: SamplingParams = PARAMS) -> list[Request]:
    return [
        Request(f"{job}/{i}/0", prompt, params, seed=i) for i, prompt in enumerate(prompts(count))
    ]


def assert_answered(ticket: EngineTicket, asked: list[Request], verifier: Path) -> None:
    got = ticket.wait(PATIENCE_SEC)
    assert [c.request_id for c in got] == [r.request_id for r in asked]
    for request, completion in zip(asked, got, strict=True):
        assert_same(completion, baseline_of(verifier)(request))


def test_tickets_of_many_threads_are_answered_in_the_order_asked(
    bed: Bed, tiny_pair: TinyPair
) -> None:
    asked = {job: requests(job) for job in ("a", "b", "c")}
    answers: dict[str, list[Completion]] = {}

    def ask(job: str) -> None:
        answers[job] = bed.service.submit(job, asked[job]).wait(PATIENCE_SEC)

    threads = [threading.Thread(target=ask, args=(job,)) for job in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SEC)
    for job, mine in asked.items():
        assert [c.request_id for c in answers[job]] == [r.request_id for r in mine]
        for request, completion in zip(mine, answers[job], strict=True):
            assert_same(completion, baseline_of(tiny_pair.verifier)(request))
    assert bed.made == 1
    assert bed.service.stats.finished == 15


def test_a_ticket_without_requests_is_answered_at_once(bed: Bed) -> None:
    assert bed.service.submit("a", []).wait(PATIENCE_SEC) == []


def test_a_refused_request_is_an_answer_too(bed: Bed) -> None:
    good, bad = requests("a", 1)[0], Request("a/9/0", (), PARAMS, 0)
    answers = bed.service.submit("a", [bad, good]).wait(PATIENCE_SEC)
    assert answers[0].error == "prompt of 0 tokens does not fit the context of 2048"
    assert answers[1].error is None


def test_waiting_has_an_end(bed: Bed) -> None:
    bed.may_step.clear()
    with pytest.raises(EngineError, match="did not finish within 0 s"):
        bed.service.submit("a", requests("a")).wait(0.01)


def test_cancelling_a_job_fails_its_tickets_and_no_other(bed: Bed, tiny_pair: TinyPair) -> None:
    others = requests("b")
    gone = [bed.service.submit("a", requests(f"a{i}", 3, ENDLESS)) for i in range(2)]
    kept = bed.service.submit("b", others)
    bed.service.cancel("a")
    for ticket in gone:
        with pytest.raises(RequestCancelledError, match="job a was cancelled"):
            ticket.wait(PATIENCE_SEC)
    assert_answered(kept, others, tiny_pair.verifier)
    bed.service.cancel("nobody")
    again = requests("a")
    assert_answered(bed.service.submit("a", again), again, tiny_pair.verifier)
    assert bed.made == 1


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_failed_step_gives_its_tickets_back_and_the_next_ones_are_served(
    bed: Bed, tiny_pair: TinyPair, kind: type[BaseException]
) -> None:
    bed.error = kind("the device fell over")
    bed.broken.set()
    tickets = [bed.service.submit(job, requests(job)) for job in ("a", "b")]
    for ticket in tickets:
        with pytest.raises(EngineError, match="engine step failed: the device fell over"):
            ticket.wait(PATIENCE_SEC)
    bed.broken.clear()
    asked = requests("a")
    assert_answered(bed.service.submit("a", asked), asked, tiny_pair.verifier)
    assert bed.made >= 2


def test_a_step_s_number_does_not_come_again_with_the_next_engine(bed: Bed) -> None:
    """Session and number name one pass, whatever failed between."""
    before = bed.service.submit("a", requests("a")).wait(PATIENCE_SEC)
    bed.broken.set()
    for _ in range(2):
        with pytest.raises(EngineError, match="engine step failed"):
            bed.service.submit("b", requests("b")).wait(PATIENCE_SEC)
    bed.broken.clear()
    after = bed.service.submit("b", requests("b")).wait(PATIENCE_SEC)
    first, second = (
        {step for c in found for step in c.provenance.steps} for found in (before, after)
    )
    assert first
    assert second
    assert min(second) > max(first)


def test_memory_for_no_pass_at_all_fails_the_tickets_and_the_engine_is_made_anew(
    bed: Bed, tiny_pair: TinyPair
) -> None:
    bed.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAdvice")
    bed.broken.set()
    with pytest.raises(
        EngineError, match=r"^engine step failed: CUDA out of memory.*GiB\.$"
    ) as got:
        bed.service.submit("a", requests("a")).wait(PATIENCE_SEC)
    assert not isinstance(got.value, DeviceLostError)
    bed.broken.clear()
    asked = requests("a")
    assert_answered(bed.service.submit("a", asked), asked, tiny_pair.verifier)
    assert bed.made == 2


@pytest.mark.parametrize(("code", "blameless"), [(719, False), (214, True)])
def test_a_lost_device_fails_all_tickets_and_no_engine_is_made_again(
    bed: Bed, code: int, blameless: bool
) -> None:
    bed.error = torch.AcceleratorError("CUDA error: some words")
    bed.error.error_code = code  # type: ignore[attr-defined] # torch sets it where it raises
    bed.broken.set()
    bed.may_step.clear()
    stepped = bed.service.submit("a", requests("a"))
    wait_until("a step", lambda: bed.service.stepping_since is not None)
    late = bed.service.submit("b", requests("b"))
    bed.may_step.set()
    for ticket, has_no_part in ((stepped, blameless), (late, True)):
        with pytest.raises(DeviceLostError, match="engine step failed: CUDA error") as lost:
            ticket.wait(PATIENCE_SEC)
        assert lost.value.blameless is has_no_part
    bed.broken.clear()
    with pytest.raises(DeviceLostError):
        bed.service.check()
    with pytest.raises(DeviceLostError):
        bed.service.submit("c", requests("c"))
    assert bed.made == 1


def test_a_step_that_does_not_end_is_given_up_and_waited_for_by_nobody(bed: Bed) -> None:
    bed.may_step.clear()
    tickets = [bed.service.submit(job, requests(job)) for job in ("a", "b")]
    wait_until("a step", lambda: bed.service.stepping_since is not None)
    bed.service.give_up(StepHungError("it hangs"))
    for ticket in tickets:
        with pytest.raises(StepHungError, match="it hangs"):
            ticket.wait(PATIENCE_SEC)
    with pytest.raises(StepHungError):
        bed.service.check()
    with pytest.raises(StepHungError):
        bed.service.submit("c", requests("c"))
    bed.service.close()  # at once: its thread still hangs
    assert bed.service.stepping_since is not None
    bed.may_step.set()
    bed.service._thread.join(PATIENCE_SEC)
    assert not bed.service._thread.is_alive(), "nothing comes of a step that ends after all"
    assert bed.made == 1


def test_an_engine_that_cannot_be_made_fails_the_ticket_and_is_tried_again(
    tiny_pair: TinyPair,
) -> None:
    tries = iter([RuntimeError("no memory"), None])

    def make() -> Engine:
        if error := next(tries):
            raise error
        return bench(tiny_pair.verifier).engine

    service = EngineService(make)
    with pytest.raises(EngineError, match="no memory"):
        service.submit("a", requests("a")).wait(PATIENCE_SEC)
    asked = requests("a")
    assert_answered(service.submit("a", asked), asked, tiny_pair.verifier)
    service.close()


@pytest.mark.parametrize("submitted", [0, 2])
def test_closing_fails_what_is_open_and_refuses_what_comes(bed: Bed, submitted: int) -> None:
    bed.may_step.clear()
    tickets = [bed.service.submit(f"{i}", requests(f"{i}")) for i in range(submitted)]
    closing = threading.Thread(target=bed.service.close)
    closing.start()
    bed.may_step.set()
    closing.join(PATIENCE_SEC)
    assert not closing.is_alive()
    for ticket in tickets:
        with pytest.raises(RequestCancelledError, match="closed"):
            ticket.wait(PATIENCE_SEC)
    with pytest.raises(RequestCancelledError, match="the engine is closed"):
        bed.service.submit("late", requests("late"))
    bed.service.close()  # twice is once


def test_a_newer_ticket_for_the_same_requests_takes_them_over(
    bed: Bed, tiny_pair: TinyPair
) -> None:
    """A group whose lease ran out may come back to the worker that still computes it."""
    stale = bed.service.submit("a", requests("a", 3, ENDLESS))
    bystanders, asked = requests("b"), requests("a", 3)
    bystander = bed.service.submit("b", bystanders)
    ticket = bed.service.submit("a", asked)
    assert_answered(ticket, asked, tiny_pair.verifier)
    assert_answered(bystander, bystanders, tiny_pair.verifier)
    with pytest.raises(RequestCancelledError):
        stale.wait(PATIENCE_SEC)
    assert bed.made == 1


def test_steps_run_under_the_gate(tiny_pair: TinyPair) -> None:
    held: list[str] = []

    class Gate:
        def __enter__(self) -> None:
            held.append("in")

        def __exit__(self, *_: object) -> None:
            held.append("out")

    def maker() -> Callable[[], Engine]:
        return lambda: bench(tiny_pair.verifier).engine

    service = EngineService(maker(), Gate())
    service.submit("a", requests("a")).wait(PATIENCE_SEC)
    service.close()
    assert held[:4] == ["in", "out", "in", "out"]
    assert len(held) % 2 == 0


def test_a_model_that_cannot_be_served_is_the_caller_s_to_mend() -> None:
    """And not its rows': they are not tried apart."""

    def refuse() -> Engine:
        raise ModelError("it cannot be shared")

    service = EngineService(refuse)
    with pytest.raises(ModelError, match="cannot be shared"):
        service.submit("a", requests("a")).wait(PATIENCE_SEC)
    service.close()


def test_cancelling_makes_no_engine_for_nobody(bed: Bed) -> None:
    bed.broken.set()
    with pytest.raises(EngineError):
        bed.service.submit("a", requests("a")).wait(PATIENCE_SEC)
    bed.broken.clear()
    bed.service.cancel("another")
    wait_until("it was heard of", lambda: not bed.service._cancelled)
    bed.service.close()
    assert bed.made == 1
