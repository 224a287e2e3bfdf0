"""How `make bench-depth` tells what `auto` makes of drafts beside the best fixed depth."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from specbatch.jobs.bench.depth import Bed, beside_best
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.policy.knowledge import Knowledge


def test_the_best_is_the_one_of_the_other_runs() -> None:
    auto = [180.0, 99.0, 98.0, 97.0]
    others = {  # in the first run everything was fast, and 8 more so than it is
        "off": [100.0, 50.0, 50.0, 50.0],
        "2": [200.0, 100.0, 100.0, 100.0],
        "8": [500.0, 60.0, 60.0, 60.0],
    }
    assert beside_best(auto, others) == pytest.approx([0.90, 0.99, 0.98, 0.97])


def test_of_one_run_the_best_is_its_own() -> None:
    assert beside_best([90.0], {"off": [50.0], "2": [100.0]}) == [0.9]


def test_where_all_are_the_same_none_looks_better_for_being_chosen() -> None:
    generator = random.Random(5)
    raw, apart = [], []
    for _ in range(400):
        auto, *others = ([generator.lognormvariate(0.0, 0.03) for _ in range(5)] for _ in range(5))
        named = dict(zip(("off", "2", "4", "8"), others, strict=True))
        best = max(named, key=lambda name: statistics.median(named[name]))
        raw.append(statistics.median(auto) / statistics.median(named[best]))
        apart.append(statistics.median(beside_best(auto, named)))
    assert statistics.mean(raw) < 0.985
    assert statistics.mean(apart) == pytest.approx(1.0, abs=0.004)


def test_all_modes_are_at_work_at_once_and_write_what_depth_0_writes() -> None:
    model = demo_model()
    bed, prompts = Bed(model, "float32", new_tokens=12), model.prompts(3)
    bed.look_up(prompts, at_once=2)
    assert {len(output) for output in bed.known.values()} == {12}
    speeds, counts = bed.race(prompts, 2, 0.7, teaching=True)  # asserts equal outputs
    assert set(speeds) == {"off", "auto", "2", "4", "8"}
    assert min(speeds.values()) > 0.0
    assert counts.generated_tokens == 36, "one set, where no time is asked for"
    taught = bed.learned.step_time.observations
    _, counts = bed.race(prompts, 2, 0.7)
    learned = bed.learned.step_time.observations - taught
    assert 0 < learned <= counts.steps, "auto alone teaches itself"
    entrant = bed.entrant(prompts, 2, 0, 0.0, Knowledge())
    for _ in range(2):
        entrant.go(math.inf)
        assert entrant.engine.idle
    assert entrant.sets == 2
    assert entrant.engine.stats.generated_tokens == 72
    assert sum(count.tested for count in bed.priors[0.7]) > 0
