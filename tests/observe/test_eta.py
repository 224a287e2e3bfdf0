"""The shown end of a job, on simulated jobs whose end is known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from specbatch.pipeline.observe.terminal.eta import Forecast
from specbatch.pipeline.observe.terminal.progress import EngineCounts, Meter, Reading
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobState

ROWS, MOST, SPEED = 1000, 100, 500.0  # prompts, tokens of one at most, tokens per second
GROUP = 10
STEP_SEC = 0.2
BEGUN = JobProgress(
    job_id="job", state=JobState.RUNNING, rows_total=ROWS, rows_done=0, rows_failed=0,
    groups_total=ROWS // GROUP, groups_done=0, completions=0, prompt_tokens=0, completion_tokens=0,
    proposed=0, accepted=0, verifier_passes=0, queue_sec=0.0, compute_sec=0.0, cost_usd=0.0,
    ingest_done=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What a moment of a simulated job shows."""

    at: float
    progress: JobProgress
    engine: EngineCounts


def job(
    lengths: list[int], at_once: int, speed: Callable[[float], float] = lambda _: SPEED
) -> Iterator[Seen]:
    """A fused batch of `at_once` sequences, all of which advance at the same pace."""
    at, tokens, begun = 0.0, 0.0, 0
    open_rows = [GROUP] * (len(lengths) // GROUP)  # by group
    finished = recorded = groups = 0
    running: dict[int, float] = {}  # tokens to come by prompt
    yield Seen(0.0, BEGUN, EngineCounts())
    while running or begun < len(lengths):
        while begun < len(lengths) and len(running) < at_once:
            running[begun] = float(lengths[begun])
            begun += 1
        each = min(speed(at) * STEP_SEC / len(running), *running.values())
        at += each * len(running) / speed(at)
        tokens += each * len(running)
        running = {row: left - each for row, left in running.items()}
        for row in [row for row, left in running.items() if left < 1e-9]:
            del running[row]
            finished, group = finished + 1, row // GROUP
            open_rows[group] -= 1
            if not open_rows[group]:
                groups += 1
                recorded += sum(lengths[group * GROUP : (group + 1) * GROUP])
        progress = replace(BEGUN, rows_done=GROUP * groups, completion_tokens=recorded)
        yield Seen(at, progress, EngineCounts(finished=finished, tokens=round(tokens)))


def shown(seen: list[Seen], here: bool = True) -> list[Reading]:
    """What is shown at each moment; not `here`: with the store's counts alone."""
    now = 0.0
    meter = Meter(clock=lambda: now, max_tokens=MOST)
    readings = []
    for moment in seen:
        now = moment.at
        readings.append(meter.read(moment.progress, moment.engine if here else None))
    return readings


def after(seen: list[Seen], share: float, here: bool = True) -> tuple[float, Reading]:
    """The real time left and the reading, after this share of the tokens."""
    readings, tokens = shown(seen, here), seen[-1].engine.tokens
    for moment, reading in zip(seen, readings, strict=True):
        if reading.tokens >= share * tokens and reading.eta_sec is not None:
            return seen[-1].at - moment.at, reading
    raise AssertionError("the end is never told")


def lengths_of(kind: str, seed: int) -> list[int]:
    draw = random.Random(seed)
    if kind == "fixed":
        return [MOST] * ROWS
    if kind == "random":  # ends anywhere with the same probability
        return [min(MOST, 1 + int(draw.expovariate(1 / 40))) for _ in range(ROWS)]
    return [min(MOST, max(1, round(draw.gauss(60, 15)))) for _ in range(ROWS)]


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("kind", ["fixed", "random", "bell"])
@pytest.mark.parametrize("at_once", [1, 32])
def test_a_tenth_of_the_work_tells_the_end(kind: str, at_once: int, here: bool) -> None:
    errors, inside = [], []
    for seed in range(7):
        left, reading = after(list(job(lengths_of(kind, seed), at_once)), 0.1, here)
        assert reading.eta_sec is not None
        assert reading.eta_range is not None
        errors.append(abs(reading.eta_sec - left) / left)
        inside.append(reading.eta_range[0] <= left <= reading.eta_range[1])
    assert statistics.median(errors) < 0.15
    assert statistics.fmean(inside) > 0.5


def test_a_first_group_of_short_outputs_does_not_tell_the_others_lengths() -> None:
    lengths = [2] * GROUP + lengths_of("random", 0)[GROUP:]
    left, reading = after(list(job(lengths, 64)), 0.1)
    assert reading.eta_range is not None
    assert reading.eta_range[0] <= left <= reading.eta_range[1]


def test_outputs_of_the_most_tokens_are_told_before_any_has_ended() -> None:
    seen = list(job([MOST] * ROWS, ROWS))
    left, reading = after(seen, 0.1)
    assert reading.eta_sec == pytest.approx(left, rel=0.02)


def test_a_job_that_slows_down_is_followed() -> None:
    seen = list(job([MOST] * ROWS, 8, lambda at: SPEED if at < 50 else SPEED / 2))
    left, reading = after(seen, 0.8)
    assert reading.eta_sec == pytest.approx(left, rel=0.1)


def test_models_that_load_for_long_do_not_count() -> None:
    seen = [replace(moment, at=moment.at + 60.0 * (number > 0))
            for number, moment in enumerate(job([MOST] * ROWS, 8))]  # fmt: skip
    left, reading = after(seen, 0.1)
    assert reading.eta_sec == pytest.approx(left, rel=0.1)


def test_the_end_is_never_in_the_past() -> None:
    forecast = Forecast()
    forecast.see(0.0, 0.0)
    forecast.see(10.0, 500.0)
    late = forecast.left(1000.0, 50.0)
    assert late is not None
    assert late.sec == 0.0
    assert 0.0 <= late.low <= late.sec <= late.high


def test_nothing_is_told_of_a_job_without_tokens() -> None:
    forecast = Forecast()
    forecast.see(0.0, 0.0)
    forecast.see(5.0, 0.0)
    assert forecast.left(5.0, 100.0) is None
