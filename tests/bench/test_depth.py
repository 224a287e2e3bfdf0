"""How `make bench-depth` tells what `auto` makes of drafts beside the best fixed depth."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from specbatch.benchmarks.contenders import random_prompts
from specbatch.benchmarks.depth import Bed, against_others, auto_over_best
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.policy.knowledge import Knowledge


def by_run(**speeds: list[float]) -> list[dict[str, float]]:
    return [dict(zip(speeds, run, strict=True)) for run in zip(*speeds.values(), strict=True)]


def test_the_best_is_the_one_of_the_other_runs() -> None:
    runs = by_run(  # in the first run everything was fast, and k8 more so than it is
        auto=[180.0, 99.0, 98.0, 97.0],
        off=[100.0, 50.0, 50.0, 50.0],
        k2=[200.0, 100.0, 100.0, 100.0],
        k8=[500.0, 60.0, 60.0, 60.0],
    )
    assert auto_over_best(runs) == pytest.approx([0.90, 0.99, 0.98, 0.97])
    found = against_others(runs)
    assert found["best"] == "k2"
    assert found["auto_over_best_by_run"] == [0.9, 0.99, 0.98, 0.97]
    assert found["auto_over_best"] == 0.975
    assert found["auto_over_best_chosen_apart"] == 0.975


def test_of_one_run_the_best_is_its_own() -> None:
    assert auto_over_best(by_run(auto=[90.0], off=[50.0], k2=[100.0])) == [0.9]


def test_where_all_are_the_same_none_looks_better_for_being_chosen() -> None:
    generator = random.Random(5)
    raw, apart = [], []
    for _ in range(400):
        names = ("auto", "off", "2", "4", "8")
        runs = [{n: generator.lognormvariate(0.0, 0.03) for n in names} for _ in range(5)]
        medians = {n: statistics.median(run[n] for run in runs) for n in names}
        raw.append(medians["auto"] / max(medians[n] for n in names[1:]))
        apart.append(statistics.median(auto_over_best(runs)))
    assert statistics.mean(raw) < 0.985
    assert statistics.mean(apart) == pytest.approx(1.0, abs=0.004)


def test_all_modes_are_at_work_at_once_and_write_what_depth_0_writes() -> None:
    model = demo_model()
    bed, prompts = Bed(model, "float32", new_tokens=12), random_prompts(model, 3)
    bed.look_up(prompts, at_once=2)
    assert {len(output) for output in bed.known.values()} == {12}
    race = bed.race(prompts, 2, 0.7, teaching=True)  # asserts equal outputs
    assert set(race.speeds) == set(race.level) == {"off", "auto", "2", "4", "8"}
    assert min(*race.speeds.values(), *race.level.values()) > 0.0
    for name, speed in race.speeds.items():  # passes are most of the time, and no more than it
        between = sorted([1.0, race.luck[name]])
        assert between[0] <= race.level[name] / speed <= between[1]
    assert race.stats.generated_tokens == 36, "one set, where no time is asked for"
    taught = bed.learned.step_time.observations
    counts = bed.race(prompts, 2, 0.7).stats
    learned = bed.learned.step_time.observations - taught
    assert 0 < learned <= counts.steps, "auto alone teaches itself"
    entrant = bed.entrant(prompts, 2, 0, 0.0, Knowledge())
    for _ in range(2):
        entrant.go(math.inf)
        assert entrant.engine.idle
    assert entrant.sets == 2
    assert entrant.engine.stats.generated_tokens == 72
    assert sum(count.tested for count in bed.priors[0.7]) > 0
