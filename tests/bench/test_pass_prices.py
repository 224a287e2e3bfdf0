"""Modes where passes of the same size cost all of them the same."""

from __future__ import annotations

import random

import pytest

from specbatch.benchmarks.pass_prices import Spent, TimedRunner, common_prices, priced_sec
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.records import SamplingParams

PLAIN, DRAFTED = (8, 8, 8), (8, 24, 24)


def test_two_that_make_the_same_passes_take_the_same_however_unlucky_one_was() -> None:
    generator = random.Random(3)
    spent = {"lucky": Spent(), "unlucky": Spent(), "other": Spent()}
    for _ in range(2000):
        spent["lucky"].add(0.0045 + 0.001 * generator.random(), [(DRAFTED, 0.004)])
        slow = 0.004 * (5.0 if generator.random() < 0.05 else 1.0)
        spent["unlucky"].add(slow + 0.001, [(DRAFTED, slow)])
        spent["other"].add(0.0031, [(PLAIN, 0.003)])
    assert spent["unlucky"].pass_sec > 1.15 * spent["lucky"].pass_sec
    prices = common_prices(spent)
    assert prices == pytest.approx({DRAFTED: 0.004, PLAIN: 0.003})
    taken = {name: priced_sec(of, prices) for name, of in spent.items()}
    assert taken["unlucky"] == pytest.approx(taken["lucky"], rel=0.01)
    assert taken["other"] == pytest.approx(2000 * 0.0031)


def test_what_a_mode_does_between_passes_is_its_own() -> None:
    spent = {"quick": Spent(), "slow": Spent()}
    for name, rest in (("quick", 0.001), ("slow", 0.003)):
        spent[name].add(0.004 + rest, [(PLAIN, 0.004)])
    prices = common_prices(spent)
    taken = [priced_sec(spent[name], prices) for name in ("quick", "slow")]
    assert taken == pytest.approx([0.005, 0.007])


def test_a_runner_tells_the_size_of_every_pass() -> None:
    model = demo_model()
    loaded = load_model(inspect_model(str(model.folder)), "float32")
    runner = TimedRunner(loaded, kv_cache_bytes=1 << 22, share_prefixes=False)
    engine = Engine(runner, (), 2)
    for i, prompt in enumerate(([5, 6, 7], [8, 9])):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(Request(str(i), tuple(prompt), params, i))
    while not engine.idle:
        engine.step()
    passes = runner.take_passes()
    assert [size for size, _ in passes] == [(2, 5, 2), (2, 2, 2), (2, 2, 2)]
    assert min(seconds for _, seconds in passes) > 0.0
    assert runner.take_passes() == []
