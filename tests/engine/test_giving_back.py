"""Requests that the engine has not started can be given back; nothing is lost or done twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.decoding import assert_same, baseline_of, bench, prompts
from hypothesis import given
from hypothesis import strategies as st

from specbatch.pipeline.engines.contract import Completion, Request, RowIds
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.service import EngineService, EngineTicket, last_unstarted
from specbatch.schemas.errors import EngineError, RequestCancelledError
from specbatch.schemas.records import SamplingParams
from support.models import TinyPair

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
WAIT_SEC = 60.0
AT_ONCE = 2


class Reined:
    """An engine that takes a step when it is let, and says when it waits for that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.allowed, self.waits = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        self.waits.release()
        assert self.allowed.acquire(timeout=WAIT_SEC)
        return self._engine.step()


class Bed:
    """A service whose engine runs two sequences at a time."""

    def __init__(self, verifier: Path) -> None:
        self.engine = Reined(bench(verifier, max_sequences=AT_ONCE).engine)
        engine: Any = self.engine
        self.service = EngineService(lambda: engine)

    def until_it_waits(self) -> None:
        assert self.engine.waits.acquire(timeout=WAIT_SEC)

    def step(self) -> None:
        self.engine.allowed.release()
        self.until_it_waits()

    def run(self) -> None:
        self.engine.allowed.release(10_000)


@pytest.fixture
def bed(tiny_pair: TinyPair) -> Iterator[Bed]:
    bed = Bed(tiny_pair.verifier)
    yield bed
    bed.run()
    bed.service.close()


def rows(job: str, count: int, samples: int = 1) -> list[list[Request]]:
    return [
        [Request(f"{job}/{i}/{s}", prompt, PARAMS, seed=10 * i + s) for s in range(samples)]
        for i, prompt in enumerate(prompts(count))
    ]


def flat(units: list[list[Request]]) -> list[Request]:
    return [request for unit in units for request in unit]


def ids(units: list[list[Request]]) -> RowIds:
    return [[request.request_id for request in unit] for unit in units]


@pytest.mark.parametrize("samples", [1, 2])
def test_half_of_what_is_not_started_comes_back_from_the_end(
    bed: Bed, tiny_pair: TinyPair, samples: int
) -> None:
    asked = rows("a", 7, samples)
    bystanders = flat(rows("b", 2))
    ticket = bed.service.submit("a", flat(asked))
    bed.until_it_waits()
    bed.step()  # two sequences are started
    other = bed.service.submit("b", bystanders)
    ticket.ask_back(ids(asked))
    bed.step()
    returned = ticket.next_given_back()
    begun = AT_ONCE // samples
    count = (7 - begun + 1) // 2
    assert returned == flat(asked[-count:]), "rows come back whole"
    bed.run()
    assert list(ticket.next_given_back()) == []
    kept = flat(asked[:-count])
    baseline = baseline_of(tiny_pair.verifier)
    for request, completion in zip(kept, ticket.wait(WAIT_SEC), strict=True):
        assert_same(completion, baseline(request))
    for request, completion in zip(bystanders, other.wait(WAIT_SEC), strict=True):
        assert_same(completion, baseline(request))
    elsewhere = bed.service.submit("a", returned).wait(WAIT_SEC)
    for request, completion in zip(returned, elsewhere, strict=True):
        assert_same(completion, baseline(request))


def test_asked_twice_it_gives_half_of_the_rest(bed: Bed) -> None:
    asked = rows("a", 10)
    ticket = bed.service.submit("a", flat(asked))
    bed.until_it_waits()
    bed.step()
    ticket.ask_back(ids(asked))
    bed.step()
    assert len(ticket.next_given_back()) == 4
    ticket.ask_back(ids(asked))
    bed.step()
    assert [r.request_id for r in ticket.next_given_back()] == ["a/4/0", "a/5/0"]
    bed.run()
    assert len(ticket.wait(WAIT_SEC)) == 4


def test_what_never_began_keeps_its_first_row(bed: Bed) -> None:
    blocking = bed.service.submit("b", flat(rows("b", AT_ONCE)))
    bed.until_it_waits()
    bed.step()
    asked = rows("a", 1)
    ticket = bed.service.submit("a", flat(asked))
    ticket.ask_back(ids(asked))
    bed.run()
    assert list(ticket.next_given_back()) == []
    assert len(ticket.wait(WAIT_SEC)) == len(asked)
    assert len(blocking.wait(WAIT_SEC)) == AT_ONCE


def test_what_is_done_gives_nothing_back(bed: Bed) -> None:
    asked = rows("a", 3)
    ticket = bed.service.submit("a", flat(asked))
    bed.run()
    assert len(ticket.wait(WAIT_SEC)) == 3
    ticket.ask_back(ids(asked))
    assert list(ticket.next_given_back()) == []


def test_the_rest_may_be_done_when_the_last_rows_come_back(bed: Bed) -> None:
    """Nothing is left to wait for then."""
    blocking = bed.service.submit("b", flat(rows("b", AT_ONCE)))
    bed.until_it_waits()
    bed.step()
    bad = Request("a/0/0", (), PARAMS, 0)  # answered at once, with an error
    last = rows("a", 2)[1:]
    ticket = bed.service.submit("a", [bad, *flat(last)])
    bed.step()
    ticket.ask_back([["a/0/0"], *ids(last)])
    bed.step()
    assert ticket.next_given_back() == flat(last)
    assert ticket.next_given_back() == []
    assert [done.error is None for done in ticket.wait(WAIT_SEC)] == [False]
    bed.run()
    assert len(blocking.wait(WAIT_SEC)) == AT_ONCE


def test_a_failed_ticket_says_so_to_who_waits_for_returns(bed: Bed) -> None:
    asked = rows("a", 4)
    ticket = bed.service.submit("a", flat(asked))
    bed.until_it_waits()
    bed.service.cancel("a")
    bed.run()
    assert list(ticket.next_given_back()) == []
    with pytest.raises(RequestCancelledError):
        ticket.wait(WAIT_SEC)


def test_a_ticket_whose_rest_is_done_ends_when_the_others_come_back() -> None:
    asked = flat(rows("a", 3))
    ticket = EngineTicket("a", asked)
    ticket.fail(EngineError("broken"))
    ticket.give_back({"a/2/0"})
    assert ticket.next_given_back() == asked[2:]
    assert ticket.next_given_back() == []
    assert EngineTicket("a", []).next_given_back() == []


UNITS = st.lists(st.integers(1, 3), min_size=1, max_size=12)


@given(sizes=UNITS, data=st.data())
def test_units_come_back_whole_from_the_end_and_never_all(
    sizes: list[int], data: st.DataObject
) -> None:
    units = [[f"{row}/{sample}" for sample in range(size)] for row, size in enumerate(sizes)]
    every = [i for unit in units for i in unit]
    unstarted = set(data.draw(st.lists(st.sampled_from(every))))
    given_back = last_unstarted(units, unstarted)
    assert list(given_back) == units[len(units) - len(given_back) :]
    assert all(i in unstarted for unit in given_back for i in unit)
    assert len(given_back) < len(units)
    tail = 0
    while tail < len(units) and unstarted.issuperset(units[-1 - tail]):
        tail += 1
    assert len(given_back) == min((tail + 1) // 2, len(units) - 1)
