"""The contract of verify engines: kept by ours, by vLLM's on a core without a model, by the
stand-in. `make test-vllm` runs the same tests on vLLM itself."""

from __future__ import annotations

from typing import cast

import pytest
from engine.decoding import bench
from vllm_engine.fake_core import VOCABULARY, FakeCore

from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.pipeline.engines.vllm.core import Core
from specbatch.pipeline.engines.vllm.engine import VllmEngine
from specbatch.pipeline.engines.vllm.probe import Verdict
from support.engine_contract import *  # noqa: F403 - the tests, which take `bed`
from support.engine_contract import Bed, capabilities, documented
from support.models import TinyPair

CONTEXT = 128


@pytest.mark.parametrize("tiny_pair", ["native"], indirect=True)
def test_the_documented_capabilities_are_those_found(tiny_pair: TinyPair) -> None:
    assert capabilities(Bed(lambda: bench(tiny_pair.verifier).engine, 300)) == documented("exact")


@pytest.fixture(params=["exact", "vllm", "stand-in"])
def bed(request: pytest.FixtureRequest, tiny_pair: TinyPair) -> Bed:
    if request.param == "exact":
        return Bed(lambda: bench(tiny_pair.verifier).engine, 300)
    if request.param == "vllm":
        return Bed(vllm_without_vllm, VOCABULARY)
    return Bed(lambda: StandInEngine(300, CONTEXT), 300)


def vllm_without_vllm() -> VllmEngine:
    def make(drafted: bool) -> Core:
        return cast(Core, FakeCore(drafted))

    sound = Verdict(drafts=True, mixed=True, sampled=True, formed=True)
    return VllmEngine(make, lambda _: sound, VOCABULARY, frozenset({2}), 4)
