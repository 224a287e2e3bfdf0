"""What an engine announces is what it takes: measured in a process of its own, its caches full."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from specbatch.benchmarks.memory import TOLERANCE, measure_apart
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.memory import (
    MemoryBudget,
    budget_of,
    free_for_another,
    give_back_freed,
    resident_bytes,
)
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec
from support.engines import complete, decided, make_engine
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # loads models


def test_the_demo_pair_s_peak_is_within_a_tenth_of_what_is_announced(tmp_path: Path) -> None:
    row = measure_apart("demo", "bfloat16", 16, tmp_path)
    announced = row["announced"]
    parts = [announced[part] for part in ("process", "weights", "kv_cache", "workspace")]
    assert sum(parts) == announced["total"]
    assert abs(row["peak_to_announced"] - 1) <= TOLERANCE
    # The interpreter must not hide the rest: both caches were filled, and nothing grew beyond.
    ours = row["peak"] - announced["process"]
    assert announced["weights"] + announced["kv_cache"] < ours
    assert ours <= (1 + TOLERANCE) * (announced["total"] - announced["process"])


def test_a_budget_adds_up_its_models() -> None:
    models = [MemoryBudget(10, 200, 3000, 32), MemoryBudget(1, 2, 3, 64)]
    budget = budget_of(models, on_processor=False)
    assert (budget.process, budget.weights, budget.kv_cache, budget.workspace) == (0, 11, 202, 3003)
    assert budget.total == 3216
    assert budget.cache_tokens == 64
    assert budget_of(models, on_processor=True).process > 50 << 20


def test_a_budget_is_one_line_of_mib() -> None:
    budget = budget_of([MemoryBudget(1 << 20, 2 << 20, 3 << 20, 1)], on_processor=False)
    assert str(budget) == "6 MiB (process 0, weights 1, kv cache 2, workspace 3)"


def test_what_a_process_holds_is_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\n")
    assert resident_bytes(status) == 2000 << 10
    assert resident_bytes(tmp_path / "none") is None
    give_back_freed()
    assert (resident_bytes() or 0) > 0


@pytest.mark.parametrize("models", [1, 2])
def test_an_engine_is_announced_before_its_first_step(
    tiny_pair: TinyPair, caplog: pytest.LogCaptureFixture, models: int
) -> None:
    proposer = inspect_model(str(tiny_pair.draft)) if models == 2 else None
    host = EngineHost(
        inspect_model(str(tiny_pair.verifier)), proposer, 4, 64, kv_cache_bytes=8 << 20
    )
    assert host.memory is None
    with caplog.at_level("INFO", logger="specbatch"):
        engine = host.make_engine(EngineSpec(dtype="float32"))
    assert engine.stats.steps == 0
    assert host.memory is not None
    assert f"memory budget of the float32 engine: {host.memory}" in caplog.text
    block = 8 << 20 >> 5  # what does not fill a block is not used
    assert models * (8 << 20) - models * block <= host.memory.kv_cache <= models * (8 << 20)


def test_a_consumed_model_decodes_to_the_same_bits(tiny_pair: TinyPair) -> None:
    """The host lets its runners empty the loaded weights once they are packed."""
    params = SamplingParams(max_tokens=16, temperature=0.8)
    prompts = [[1, 2, 3], [4] * 40]
    host = EngineHost(inspect_model(str(tiny_pair.verifier)), None, 4, 64, kv_cache_bytes=8 << 20)
    consumed = complete(host.make_engine(EngineSpec(dtype="float32")), prompts, params)
    kept = complete(make_engine(tiny_pair.verifier), prompts, params)
    assert decided(consumed) == decided(kept)


def test_what_is_no_more_makes_room_before_anything_is_loaded(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of an engine know each other, so it would stay until somebody collects."""
    host = EngineHost(inspect_model(str(tiny_pair.verifier)), None, 4, 64, kv_cache_bytes=8 << 20)
    order: list[str] = []

    def free(on_gpu: bool) -> None:
        order.append("freed")
        free_for_another(on_gpu)

    def load(*how: Any, **named: Any) -> Any:
        order.append("loads")
        return load_model(*how, **named)

    monkeypatch.setattr("specbatch.pipeline.engines.exact.host.free_for_another", free)
    monkeypatch.setattr("specbatch.pipeline.engines.exact.host.load_model", load)
    host.make_engine(EngineSpec(dtype="float32"))
    assert order == ["freed", "loads"]


def test_what_lies_in_a_cycle_is_freed() -> None:
    class Part:
        whole: object

    free_for_another(on_gpu=False)  # the first engine of a process has nothing to free
    part = Part()
    part.whole = part
    gone = weakref.ref(part)
    gc.disable()
    try:
        del part
        free_for_another(on_gpu=False)
        assert gone() is None
    finally:
        gc.enable()
