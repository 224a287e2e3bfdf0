"""What a process counts: bounded in its labels, read as of one moment, shown as Prometheus does."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.registry import OTHER, Metrics
from specbatch.schemas.records import ROW_CODES
from support.scraping import reading

# A counter, a gauge and a histogram as they are scraped: users' rules and dashboards rest on this.
SCRAPED = """\
# TYPE specbatch_proposed_tokens_total counter
specbatch_proposed_tokens_total{job="nightly",proposer="ngram",tag="a\\"b\\\\c\\nd"} 7.0
# TYPE specbatch_engine_kv_blocks gauge
specbatch_engine_kv_blocks{state="used"} 3.0
specbatch_engine_kv_blocks{state="free"} 4.0
specbatch_engine_kv_blocks{state="cached"} 0.0
# TYPE specbatch_engine_batch_fill_ratio histogram
specbatch_engine_batch_fill_ratio_bucket{le="0.1"} 0.0
specbatch_engine_batch_fill_ratio_bucket{le="0.2"} 2.0
specbatch_engine_batch_fill_ratio_bucket{le="0.3"} 2.0
specbatch_engine_batch_fill_ratio_bucket{le="0.4"} 2.0
specbatch_engine_batch_fill_ratio_bucket{le="0.5"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="0.6"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="0.7"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="0.8"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="0.9"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="1.0"} 5.0
specbatch_engine_batch_fill_ratio_bucket{le="+Inf"} 6.0
specbatch_engine_batch_fill_ratio_count 6.0
specbatch_engine_batch_fill_ratio_sum 3.9
"""


def test_the_scraped_text_has_these_names_types_and_labels() -> None:
    metrics = Metrics()
    metrics.count(names.PROPOSED, "nightly", "ngram", 'a"b\\c\nd', by=7)
    metrics.ask(names.KV_BLOCKS, lambda: {("used",): 3, ("free",): 4})
    for share, times in ((0.2, 2), (0.5, 3), (2.0, 1)):
        metrics.observe(names.BATCH_FILL, share, times=times)
    shown = [names.PROPOSED.name, names.KV_BLOCKS.name, names.BATCH_FILL.name]
    lines = [line for line in reading(metrics).text.splitlines() if not line.startswith("# HELP")]
    mine = [line for line in lines if any(name in line for name in shown)]
    assert sorted(mine) == sorted(SCRAPED.splitlines())


def test_labels_from_outside_have_so_many_values_and_nothing_is_lost() -> None:
    metrics = Metrics(most_values=3)
    for job in range(40):
        for tag in range(40):
            metrics.count(names.PROPOSED, f"job-{job}", "ngram", f"tag-{tag}", by=2)
    series = reading(metrics).series(names.PROPOSED)
    assert len(series) == 4 * 4
    assert sum(series.values()) == 40 * 40 * 2
    assert series[OTHER, "ngram", OTHER] == 37 * 37 * 2
    assert series["job-0", "ngram", "tag-2"] == 2


def test_the_bound_of_a_label_holds_over_all_metrics_that_have_it() -> None:
    metrics = Metrics(most_values=1)
    metrics.count(names.COST, "first")
    metrics.observe(names.FIRST_TOKEN, 1.0, "second")
    metrics.ask(names.BREAKER_OPEN, lambda: {("third", "x"): 1.0, ("fourth", "x"): 0.0})
    found = reading(metrics)
    assert set(found.series(names.COST)) == {("first",)}
    assert set(found.series(names.FIRST_TOKEN, "_count")) == {(OTHER,)}
    assert found.series(names.BREAKER_OPEN) == {(OTHER, "x"): 1.0}, "the highest of what is one now"


def test_labels_of_our_own_are_not_bounded() -> None:
    metrics = Metrics(most_values=1)
    for kind in ("prefill", "verify", "draft"):
        metrics.count(names.DEVICE_SECONDS, kind)
    assert (OTHER,) not in reading(metrics).series(names.DEVICE_SECONDS)


def test_many_observations_at_once_are_as_many_of_the_client() -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    theirs = Histogram(
        names.DEPTH.name, names.DEPTH.help, names.DEPTH.labels,
        buckets=names.DEPTH.buckets, registry=registry,
    )  # fmt: skip
    for depth, times in ((0, 1), (1, 2), (5, 3), (6, 4), (99, 5)):
        metrics.observe(names.DEPTH, depth, "ngram", times=times)
        for _ in range(times):
            theirs.labels("ngram").observe(depth)
    expected = generate_latest(registry).decode()
    assert 'le="6.0",proposer="ngram"} 10.0' in expected
    assert expected in reading(metrics).text


def test_what_is_known_beforehand_begins_with_zero() -> None:
    found = reading(Metrics())
    assert found.series(names.RETRIES) == {(stage,): 0 for stage in names.STAGES}
    assert found.series(names.SWEEPS) == {(): 0}
    assert found.series(names.PROPOSED) == {}


def test_quarantined_rows_begin_with_zero_for_every_code() -> None:
    # Otherwise a process's first rows of a code are no increase.
    metrics = Metrics()
    assert reading(metrics).series(names.QUARANTINED) == {(code,): 0 for code in ROW_CODES}
    metrics.count(names.QUARANTINED, ROW_CODES[-1], by=600)
    assert reading(metrics).series(names.QUARANTINED)[ROW_CODES[-1],] == 600


def test_a_gauge_that_is_asked_for_shows_the_last_answer_alone() -> None:
    metrics, answer = Metrics(), dict[tuple[str, ...], float]({("a", "x"): 1.0})
    metrics.ask(names.BREAKER_OPEN, lambda: answer)
    assert reading(metrics).series(names.BREAKER_OPEN) == {("a", "x"): 1.0}
    answer.clear()
    assert reading(metrics).series(names.BREAKER_OPEN) == {}


def test_nobody_reads_half_of_what_is_counted_together() -> None:
    metrics, found = Metrics(), []

    def scrape() -> None:
        found.append(reading(metrics).total("specbatch_sweeps_total"))

    thread = threading.Thread(target=scrape)
    with metrics.together():
        metrics.count(names.SWEEPS)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        metrics.count(names.SWEEPS)
    thread.join()
    assert found == [2]
