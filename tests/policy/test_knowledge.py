"""What was learned survives being written down."""

from __future__ import annotations

import json

import pytest

from specbatch.pipeline.policy.knowledge import Knowledge


def test_state_survives_json() -> None:
    knowledge = Knowledge()
    for tokens in (8, 16, 24, 32) * 5:
        knowledge.step_time.observe(tokens, 8, 1e-3 + 1e-5 * tokens)
        knowledge.draft_time.observe((1.0, tokens / 8, tokens), 1e-4 * tokens)
        knowledge.acceptance_of("block").observe(4, 3)
    again = Knowledge.restored(json.loads(json.dumps(knowledge.state())))
    assert again.state() == knowledge.state()
    assert again.acceptance_of("block").rate == knowledge.acceptance_of("block").rate != 0.6
    assert again.acceptance_of("other").rate == 0.6


def test_something_else_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Knowledge.restored({"step_time": {}})
