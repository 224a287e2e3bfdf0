"""What a process counts: bounded in its labels, read as of one moment, added up over processes."""

from __future__ import annotations

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.metrics import OTHER, Metrics, counted, merged

PROPOSED, DEPTH, BLOCKS = names.PROPOSED.name, names.DEPTH.name, names.KV_BLOCKS.name


def test_labels_from_outside_have_so_many_values_and_nothing_is_lost() -> None:
    metrics = Metrics(most_values=3)
    for job in range(40):
        for tag in range(40):
            metrics.count(names.PROPOSED, f"job-{job}", "ngram", f"tag-{tag}", by=2)
    series = metrics.read()[PROPOSED]
    assert len(series) == 4 * 4
    assert sum(value for value in series.values() if isinstance(value, int)) == 40 * 40 * 2
    assert series[OTHER, "ngram", OTHER] == 37 * 37 * 2
    assert series["job-0", "ngram", "tag-2"] == 2


def test_the_bound_of_a_label_holds_over_all_metrics_that_have_it() -> None:
    metrics = Metrics(most_values=1)
    metrics.count(names.COST, "first")
    metrics.observe(names.FIRST_TOKEN, 1.0, "second")
    metrics.ask(names.BREAKER_OPEN, lambda: {("third", "x"): 1.0, ("fourth", "x"): 0.0})
    read = metrics.read()
    assert set(read[names.COST.name]) == {("first",)}
    assert set(read[names.FIRST_TOKEN.name]) == {(OTHER,)}
    assert read[names.BREAKER_OPEN.name] == {(OTHER, "x"): 1.0}, "the highest of what is one now"


def test_labels_of_our_own_are_not_bounded() -> None:
    metrics = Metrics(most_values=1)
    for kind in ("prefill", "verify", "draft"):
        metrics.count(names.DEVICE_SECONDS, kind)
    assert (OTHER,) not in metrics.read()[names.DEVICE_SECONDS.name]


def test_an_observation_is_in_the_first_bucket_that_has_room_for_it() -> None:
    metrics = Metrics()
    for depth, times in ((0, 1), (1, 2), (5, 3), (6, 4), (99, 5)):
        metrics.observe(names.DEPTH, depth, "ngram", times=times)
    found = metrics.read()[DEPTH]["ngram",]
    assert isinstance(found, list)
    by_bound = dict(zip([*names.DEPTH.buckets, "above"], found, strict=False))
    assert {b: n for b, n in by_bound.items() if n} == {0: 1, 1: 2, 6: 7, "above": 5}
    assert found[-1] == 2 + 15 + 24 + 495


def test_what_is_known_beforehand_begins_with_zero() -> None:
    read = Metrics().read()
    assert read[names.RETRIES.name] == {(stage,): 0 for stage in names.STAGES}
    assert read[names.SWEEPS.name] == {(): 0}
    assert read[PROPOSED] == {}


def test_what_was_read_does_not_change_any_more() -> None:
    metrics = Metrics()
    metrics.observe(names.DRIFT, 0.5, "ngram")
    read = metrics.read()
    before = {name: dict(values) for name, values in merged([read]).items()}
    metrics.observe(names.DRIFT, 0.5, "ngram")
    assert {name: dict(values) for name, values in merged([read]).items()} == before


def test_processes_add_up_but_for_gauges_that_say_yes_or_no() -> None:
    one, other = Metrics(), Metrics()
    for metrics, times in ((one, 1), (other, 2)):
        metrics.count(names.PROPOSED, "j", "p", "t", by=times)
        metrics.observe(names.DEPTH, 4, "p", times=times)
        metrics.ask(names.KV_BLOCKS, lambda times=times: {("used",): 5.0 * times})
        metrics.set(names.BUILD, 1, "1.0")
        metrics.ask(names.BREAKER_OPEN, lambda times=times: {("j", "p"): times - 1.0})
    both = merged([one.read(), other.read()])
    assert both[PROPOSED] == {("j", "p", "t"): 3}
    found = both[DEPTH]["p",]
    assert isinstance(found, list)
    assert (sum(found[:-1]), found[-1]) == (3, 12)
    assert both[BLOCKS]["used",] == 15
    assert both[names.BUILD.name] == {("1.0",): 1}
    assert both[names.BREAKER_OPEN.name] == {("j", "p"): 1.0}


def test_figures_of_another_version_are_left_out_where_they_do_not_fit() -> None:
    metrics = Metrics()
    metrics.observe(names.DRIFT, 1.0, "ngram")
    strange = {
        "specbatch_gone_total": {(): 5.0},
        names.DRIFT.name: {("ngram",): [1.0, 2.0, 3.0]},
        names.SWEEPS.name: {(): [1.0]},
    }
    assert merged([metrics.read(), strange]) == merged([metrics.read()])


def test_a_gauge_ends_with_its_process() -> None:
    metrics = Metrics()
    metrics.count(names.SWEEPS)
    metrics.set(names.BUILD, 1, "1.0")
    left = counted(metrics.read())
    assert left[names.SWEEPS.name] == {(): 1}
    assert names.BUILD.name not in left
