"""What was learned survives being written down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.pipeline.policy.acceptance import Record
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.tuning import MOST_SEQUENCE_WEIGHT, SEQUENCE_WEIGHT


def test_state_survives_json() -> None:
    knowledge = Knowledge()
    for tokens in (8, 16, 24, 32) * 5:
        knowledge.step_time.observe(tokens, 8, 1e-3 + 1e-5 * tokens)
        knowledge.draft_time_of("draft-model").observe((1.0, tokens / 8, tokens), 1e-4 * tokens)
        knowledge.acceptance_of("block").observe(4, 3)
    again = Knowledge.restored(json.loads(json.dumps(knowledge.state())))
    assert again.state() == knowledge.state()
    assert again.acceptance_of("block").rate == knowledge.acceptance_of("block").rate != 0.6
    assert again.acceptance_of("other").rate == 0.6


def test_how_alike_sequences_are_is_known_to_the_next_engine() -> None:
    knowledge = Knowledge()
    for agreed in (18, 19, 20, 21) * 8:  # who was above the others once is below them then
        earlier, later = Record.of(agreed, 28, 0.7), Record.of(39 - agreed, 28, 0.7)
        knowledge.spread_of("ngram").add(earlier, later)
    assert knowledge.spread_of("ngram").weight == MOST_SEQUENCE_WEIGHT
    state = json.loads(json.dumps(knowledge.state()))
    assert Knowledge.restored(state).spread_of("ngram").weight == MOST_SEQUENCE_WEIGHT
    del state["spreads"]  # as it was kept before
    assert Knowledge.restored(state).spread_of("ngram").weight == SEQUENCE_WEIGHT


def test_each_draft_model_and_label_is_its_own() -> None:
    knowledge, prices = Knowledge(), {"draft-model": 1e-4, "small": 3e-5}
    for tokens in (8, 16, 24, 32) * 10:
        for name, price in prices.items():
            knowledge.draft_time_of(name).observe((1.0, 1.0, tokens), price * tokens)
    for label, accepted in (("ngram", 1), ("ngram:2", 3), ("block", 4)):
        for _ in range(50):
            knowledge.acceptance_of(label).observe(4, accepted)
    again = Knowledge.restored(json.loads(json.dumps(knowledge.state())))
    assert again.state() == knowledge.state()
    for name, price in prices.items():
        assert again.draft_time_of(name).predict((1.0, 1.0, 20.0)) == pytest.approx(
            20 * price, rel=0.1
        )
        again.draft_time_of(name).observe((1.0, 1.0, 20.0), 1e-3)  # it can be gone on from
        again.draft_time_of(name).solve()
    rates = [again.acceptance_of(label).rate for label in ("ngram", "ngram:2", "block")]
    assert rates == sorted(rates)
    assert rates[0] < 0.55 < rates[1] < 0.85 < rates[2]
    again.acceptance_of("ngram").observe_many(0, 2000)
    knowledge.acceptance_of("ngram").observe_many(0, 2000)
    assert again.acceptance_of("ngram").rate == knowledge.acceptance_of("ngram").rate
    assert again.draft_time_of("new").weights == Knowledge().draft_time_of("new").weights


def _taught() -> dict[str, Any]:
    knowledge = Knowledge()
    for tokens in (8, 16, 24, 32):
        knowledge.step_time.observe(tokens, 8, 1e-3 + 1e-5 * tokens)
        knowledge.draft_time_of("draft-model").observe((1.0, tokens / 8, tokens), 1e-4 * tokens)
        knowledge.acceptance_of("block").observe(4, 3)
    knowledge.spread_of("block")
    return dict(json.loads(json.dumps(knowledge.state())))


def test_older_prices_of_passes_are_forgotten_and_the_rest_is_kept() -> None:
    """They had the time between two passes in them, which several in one call do not take."""
    state = _taught()
    state["step_time"] = state.pop("pass_time")
    again = Knowledge.restored(state)
    assert again.step_time.observations == 0
    assert again.state()["acceptance"] == state["acceptance"]
    assert again.state()["draft_times"] == state["draft_times"]


WRONG: dict[str, tuple[tuple[Any, ...], Any]] = {
    "nothing": (("pass_time",), {}),
    "no time": (("pass_time", "cells", 0, 4), 0.0),
    "not a number": (("pass_time", "cells", 0, 4), float("nan")),
    "never seen": (("pass_time", "cells", 0, 5), 0),
    "a short cell": (("pass_time", "cells", 0), [1, 2]),
    "noise": (("pass_time", "noise"), float("inf")),
    "fewer weights": (("draft_times", "draft-model", "weights"), [1e-4]),
    "an infinite weight": (("draft_times", "draft-model", "moment", 0), float("inf")),
    "a square that is none": (("draft_times", "draft-model", "gram"), [1.0]),
    "more than all agreed": (("acceptance", "block", "agreed"), 1e9),
    "no weight": (("spreads", "block"), float("nan")),
    "more weight than any": (("spreads", "block"), 1e9),
    "a word": (("acceptance", "block", "tested"), "many"),
}


@pytest.mark.parametrize("name", WRONG)
def test_something_else_is_refused(name: str) -> None:
    state = _taught()
    Knowledge.restored(state)
    (*path, last), value = WRONG[name]
    place: Any = state
    for part in path:
        place = place[part]
    place[last] = value
    with pytest.raises((KeyError, TypeError, ValueError)):
        Knowledge.restored(state)


@pytest.mark.parametrize(("agreed", "tested"), [(0.0, 0.4), (0.4, 0.4), (0.0, 0.0)])
def test_what_hardly_anything_is_known_of_is_kept_too(agreed: float, tested: float) -> None:
    state = _taught()
    state["acceptance"]["block"] = {"agreed": agreed, "tested": tested}
    known = Knowledge.restored(state).acceptance_of("block")
    assert (known.agreed, known.tested) == (agreed, tested)
