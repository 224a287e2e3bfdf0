"""What jobs and their stages cost: lines by anything add up, and each figure has its divisor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from specbatch.pipeline.policy.costs.balance import Amount
from specbatch.pipeline.policy.costs.controls import Arm, Controls, Part
from specbatch.pipeline.policy.costs.job_costs import (
    NO_PROPOSER,
    NO_ROW,
    By,
    JobCost,
    line_of,
    lines_by,
)
from specbatch.pipeline.policy.costs.pricing import priced
from specbatch.pipeline.policy.costs.stage_costs import (
    DEVICE,
    StageCost,
    added,
    other_units,
    stage_costs,
)
from specbatch.schemas.provenance import TICKS_PER_SEC, Ticks, TimeKind
from specbatch.schemas.records import CLAIMABLE, NO_TAG, JobRow, JobState, Stage
from specbatch.schemas.timekeeping import Device, JobTime, RowTime
from specbatch.schemas.usage import PARTS, Quantities, StageUsage, cost_by_part

CPU = {"cpu_hour": 48_000, "store_statements": 200_000}
DAY = 86_400.0


ONE = JobRow(
    job_id="one", name="nightly", tenant="a", spec={}, spec_digest="d", state=JobState.DONE,
    stage=Stage.END, verifier="big", proposer=None, output_uri="out", workspace_uri="work",
    idempotency_key=None, cancel_requested=False, error=None, rows_total=6, groups_total=1,
    prompt_tokens=60, created_at=10 * DAY, started_at=None, finished_at=None,
)  # fmt: skip


def job(job_id: str = "one", **values: Any) -> JobRow:
    return replace(ONE, job_id=job_id, **values)


def rows(tag: str | None = "news", tokens: int = 50, **values: Any) -> RowTime:
    ticks = Ticks(prefill=10, verify=20, draft=5, rejected=3)
    found = RowTime("one", tag, 100, 30, ticks, 4, 6, 6, 60, tokens, 9)
    return replace(found, **values)


def had(ticks: int, kept: bool = True, **values: Any) -> JobTime:
    found = JobTime("one", Stage.VERIFY, 100, kept, False, False, Ticks(verify=ticks))
    return replace(found, **values)


def used(cpu: int, kept: bool = True, in_flight: bool = False) -> StageUsage:
    spent = Quantities(cpu_ticks=cpu, store_statements=3)
    return StageUsage("one", Stage.RECORD, kept, in_flight, CPU, spent, 1)


def units_of(usage: StageUsage) -> int:
    return sum(cost_by_part(usage.used, usage.prices).values())


def cost(of: JobRow | None = None, *tags: str | None) -> JobCost:
    """A job whose rows had half of its time; it also used some processor time."""
    done = [rows(tag) for tag in tags or ("news",)]
    return JobCost(of or job(), [had(84 * len(done))], done, [used(1000)])


# --- one job ------------------------------------------------------------------------------------
def test_a_job_costs_its_devices_and_all_else_that_it_used() -> None:
    one = cost()
    device = one.sheet.total
    assert device.units > 84 * 100 - 1
    assert one.total == Amount(device.ticks, device.units + units_of(used(1000)))
    assert other_units([used(1000), used(10, kept=False)]) == units_of(used(1000)) + units_of(
        used(10)
    )


def test_time_that_no_row_has_is_pending_until_the_job_ends_and_lost_then() -> None:
    running = cost(job(state=JobState.RUNNING)).sheet
    ended = cost(job(state=JobState.DONE)).sheet
    assert running.pending.units > 0 == running.of(TimeKind.LOST).units
    assert ended.of(TimeKind.LOST) == running.pending
    assert ended.pending.units == 0


def test_whether_anything_was_drafted_is_told_by_the_report_or_by_any_row() -> None:
    nothing = rows(accepted=0, ahead_ticks=0, ticks=Ticks(verify=5))
    assert not JobCost(job(), [], [nothing]).drafted
    assert JobCost(job(report={"proposed": 3}), [], [nothing]).drafted
    for some in (
        replace(nothing, accepted=1),
        replace(nothing, ahead_ticks=1),
        replace(nothing, ticks=Ticks(verify=5, rejected=1)),
    ):
        assert JobCost(job(), [], [nothing, some]).drafted


def test_a_job_spans_from_its_start_to_its_end_and_one_that_runs_has_no_end() -> None:
    assert JobCost(job(started_at=11.0, finished_at=13.0), [], []).span == (11.0, 13.0)
    assert JobCost(job(started_at=None, finished_at=None), [], []).span == (10 * DAY, math.inf)


# --- lines --------------------------------------------------------------------------------------
def test_a_line_sums_its_jobs_and_has_each_figure_by_its_own_count() -> None:
    line = line_of([cost(), cost(job("two"), "news", "other")], "both")
    assert (line.name, line.jobs, line.documents) == ("both", 2, 18)
    assert (line.completion_tokens, line.accepted, line.drafted) == (150, 27, True)
    assert line.cost == cost().total + cost(None, "news", "other").total
    drafting = 3 * ((5 + 3) * 100 + 4 * 30)
    assert line.drafting.units == drafting
    assert line.usd_per_1k_tokens == pytest.approx(1000 * line.cost.usd / 150)
    assert line.usd_per_document == pytest.approx(line.cost.usd / 18)
    assert line.usd_per_accepted_token == pytest.approx(line.drafting.usd / 27)


def test_a_line_without_rows_has_no_figures_by_row() -> None:
    line = line_of([JobCost(job(), [had(5)], [])])
    assert line.cost.units == 500
    assert line.usd_per_1k_tokens is line.usd_per_document is line.usd_per_accepted_token is None
    assert not line.drafted
    assert line.saved is None


def test_what_jobs_saved_is_told_together() -> None:
    controls = Controls()
    for arm, seconds, tokens in ((Arm.CONTROL, 2.0, 10), (Arm.DRAFTS, 3.0, 20)):
        controls.step(arm, 9.0, 1.0, 0.0, {"one": Part(seconds, tokens, 10)})
    report = {"proposed": 5, "tokens": 30} | controls.take("one").priced(3_600_000_000).report()
    measured = cost(job(report=report, started_at=1.0, finished_at=2.0))
    assert measured.saved is not None
    assert measured.saved.usd == pytest.approx(4.0 - 3.0)
    line = line_of([measured, cost(), measured])
    assert line.saved is not None
    assert line.saved.usd == pytest.approx(2 * (4.0 - 3.0))
    assert line.saved.controls == 2


@pytest.mark.parametrize("by", By)
def test_lines_add_up_and_the_dearest_goes_first(by: By) -> None:
    costs = [
        cost(job("one", tenant="a", proposer="small")),
        cost(job("two", tenant="b", created_at=11 * DAY), "news", None, "other"),
        cost(job("three", tenant="b", created_at=11.5 * DAY), "news"),
    ]
    lines = lines_by(by, costs)
    whole = line_of(costs)
    assert sum(line.cost.units for line in lines) == whole.cost.units
    assert sum(line.cost.ticks for line in lines) == whole.cost.ticks
    assert sum(line.documents for line in lines) == whole.documents
    assert [line.cost.units for line in lines] == sorted(
        (line.cost.units for line in lines), reverse=True
    )
    assert {line.name: (line.jobs, line.documents) for line in lines} == {
        By.TENANT: {"a": (1, 6), "b": (2, 24)},
        By.JOB: {f"{one.job.job_id} ({one.job.name})": (1, 6 * len(one.rows)) for one in costs},
        By.PROPOSER: {"small": (1, 6), NO_PROPOSER: (2, 24)},
        By.TAG: {"news": (3, 18), NO_TAG: (1, 6), "other": (1, 6), NO_ROW: (3, 0)},
        By.DAY: {"1970-01-11": (1, 6), "1970-01-12": (2, 24)},
    }[by]


def test_by_tag_no_line_is_left_for_nothing_and_alike_lines_go_by_name() -> None:
    exact = JobCost(job(), [], [rows("b", ahead_ticks=0), rows("a", ahead_ticks=0)])
    time = exact.rows[0].ticks.total + exact.rows[1].ticks.total
    exact = replace(exact, times=[had(time)])
    lines = lines_by(By.TAG, [exact])
    assert [line.name for line in lines] == ["a", "b"]
    assert [line.cost.units for line in lines] == [time * 100 // 2] * 2


# --- stages -------------------------------------------------------------------------------------
def test_each_stage_has_its_devices_its_usage_and_what_came_to_nothing() -> None:
    times = [
        had(100),
        had(7, kept=False),
        had(20, kept=False, in_flight=True),
        had(3, kept=False, hints=True),
        had(50, stage=Stage.PROPOSE),
    ]
    usage = [used(1000), used(10, kept=False), used(200, kept=False, in_flight=True)]
    found = stage_costs(times, usage)
    assert tuple(found) == CLAIMABLE
    verify, record = found[Stage.VERIFY], found[Stage.RECORD]
    assert verify.device == Amount(130, 13_000)
    assert (verify.lost, verify.pending) == (700, 2000), "hints are neither"
    assert verify.of(DEVICE) == verify.total == 13_000
    assert record.used == Quantities(cpu_ticks=1210, store_statements=9)
    assert record.total == sum(map(units_of, usage)) == sum(record.parts.values())
    assert (record.lost, record.pending) == (units_of(usage[1]), units_of(usage[2]))
    assert record.of(DEVICE) == 0
    assert {part: record.of(part) for part in record.parts} == dict(record.parts)
    assert found[Stage.PROPOSE].total == 5000
    assert found[Stage.INGEST] == StageCost(parts=found[Stage.INGEST].parts)


def test_stages_of_several_jobs_add_up() -> None:
    one = JobCost(job(), [had(100), had(7, kept=False)], [], [used(1000), used(1, kept=False)])
    other = JobCost(job(), [had(20, kept=False, in_flight=True)], [], [used(5)])
    both = JobCost(job(), [*one.times, *other.times], [], [*one.usage, *other.usage])
    found = added([one.by_stage, other.by_stage])
    for stage, of in both.by_stage.items():
        assert (found[stage].device, found[stage].used) == (of.device, of.used)
        assert (found[stage].lost, found[stage].pending) == (of.lost, of.pending)
        assert all(found[stage].of(part) == of.of(part) for part in (DEVICE, *PARTS))
    assert sum(stage.total for stage in both.by_stage.values()) == both.total.units


# --- devices ------------------------------------------------------------------------------------
def test_devices_that_work_as_one_have_their_price_together() -> None:
    book = {"h200/eu/spot": 2.5}
    assert priced("h200", "eu", "spot", book, 1.0, devices=4) == Device(
        "h200", "eu", "spot", 10_000_000
    )
    assert priced("h200", "us", "spot", book, 1.0) == Device("h200", "us", "spot", 1_000_000)
    assert priced("h200", "eu", "spot", book, 1.0, devices=4).each_microusd == 2_500_000
    hour = Amount(3600 * TICKS_PER_SEC, 3600 * TICKS_PER_SEC * 2_500_000)
    assert (hour.sec, hour.usd) == (3600.0, 2.5)


def test_the_price_of_a_device_that_the_book_lacks_is_not_known() -> None:
    book = {"h200/eu/spot": 2.5}
    here = ("h200", "us", "spot")
    assert priced(*here, book, 0.2).each_microusd is None
    assert priced(*here, book, 0.2, is_otherwise_known=True).each_microusd is None
    assert priced(*here, {"cpu_hour": 1.0}, 0.2).each_microusd is None
    known = priced(*here, {"cpu_hour": 1.0}, 0.2, is_otherwise_known=True)
    assert known.each_microusd == 200_000
