"""vLLM's own speculation, as `SPECBATCH_VLLM_OPTIONS` names it."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.pipeline.engines.vllm.core import CoreOptions, arguments_of
from specbatch.pipeline.engines.vllm.parameters import own_speculation
from specbatch.schemas.errors import UsageError

EAGLE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}


def given(speculation: object) -> tuple[dict[str, Any], int]:
    return own_speculation({"speculative_config": speculation}, 8)


def test_its_depth_is_that_of_the_core() -> None:
    own, depth = given(EAGLE)
    assert (own, depth) == ({"method": "eagle3", "model": "head"}, 3)
    made = arguments_of(CoreOptions("m", "float32", 4, 64, depth, own_speculation=own))
    assert made["speculative_config"] == EAGLE


def test_without_a_depth_it_has_the_usual_one() -> None:
    assert given({"method": "suffix"}) == ({"method": "suffix"}, 8)


def test_without_it_the_core_has_a_proposer_that_never_drafts() -> None:
    assert own_speculation({"enforce_eager": True}, 8) == ({}, 8)
    made = arguments_of(CoreOptions("m", "float32", 4, 64, 8))
    assert made["speculative_config"]["method"] == "custom_class"
    assert "speculative_config" not in arguments_of(CoreOptions("m", "float32", 4, 64, 0))


def test_a_pipeline_of_devices_cannot_speculate() -> None:
    for more, depth in (({}, 8), ({"speculative_config": EAGLE}, 0)):
        with pytest.raises(UsageError, match="SPECBATCH_VLLM_MAX_DEPTH=0"):
            own_speculation({"pipeline_parallel_size": 2, **more}, depth)
    assert own_speculation({"pipeline_parallel_size": 2}, 0) == ({}, 0)


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        ("eagle3", "names no method"),
        ({"model": "head"}, "names no method"),
        ({"method": "dspark"}, "cannot have method dspark"),
        ({"method": "custom_class"}, "cannot have method custom_class"),
        (EAGLE | {"draft_sample_method": "probabilistic"}, "draft_sample_method probabilistic"),
        (EAGLE | {"rejection_sample_method": "synthetic"}, "rejection_sample_method synthetic"),
        (EAGLE | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        (EAGLE | {"num_speculative_tokens": "3"}, "num_speculative_tokens is '3'"),
    ],
)
def test_what_would_change_outputs_or_cannot_be_is_refused(speculation: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        given(speculation)
