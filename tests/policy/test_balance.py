"""Where time and money went: whole units that add up."""

from __future__ import annotations

from specbatch.pipeline.policy.costs.balance import (
    Amount,
    Sheet,
    job_sheet,
    leased,
    rows_sheet,
    sessions_sheet,
)
from specbatch.schemas.provenance import NO_TICKS, Ticks, TimeKind
from specbatch.schemas.records import Stage
from specbatch.schemas.timekeeping import Device, JobTime, RowTime, SessionRow

SOME = Ticks(prefill=1, verify=2, draft=3, rejected=4, padding=5, overhead=6)


def rows(ticks: Ticks = SOME, ahead: int = 0) -> RowTime:
    return RowTime("job", "news", 10, 3, ticks, ahead, 1, 1, 5, 9, 2)


def had(ticks: Ticks, kept: bool = False, in_flight: bool = False, hints: bool = False) -> JobTime:
    return JobTime("job", Stage.VERIFY, 10, kept, in_flight, hints, ticks)


def test_rows_have_their_kinds_and_drafts_their_own_price() -> None:
    sheet = rows_sheet([rows(ahead=7), rows()])
    assert sheet.of(TimeKind.DRAFT) == Amount(3 + 3 + 7, 30 + 30 + 21)
    assert sheet.of(TimeKind.VERIFY) == Amount(4, 40)
    assert sheet.total == Amount(42 + 7, 420 + 21)


def test_all_that_attempts_had_is_somewhere() -> None:
    times = [
        had(SOME, kept=True),
        had(Ticks(verify=100)),
        had(Ticks(verify=30), in_flight=True),
        had(Ticks(draft=8), hints=True),
    ]
    sheet = job_sheet(times, [rows()], is_final=False)
    assert sheet.of(TimeKind.LOST) == Amount(100, 1000)
    assert sheet.of(TimeKind.OVERHEAD) == Amount(6 + 8, 140)
    assert sheet.pending == Amount(30, 300)
    assert sheet.total == Amount(21 + 138, 1590)


def test_what_was_kept_and_is_in_no_row_is_pending_until_the_job_ends() -> None:
    times = [had(SOME, kept=True)]
    assert job_sheet(times, [], is_final=False).pending == Amount(21, 210)
    ended = job_sheet(times, [], is_final=True)
    assert ended.pending == Amount()
    assert ended.of(TimeKind.LOST) == ended.total == Amount(21, 210)


def test_sessions_have_what_no_job_had() -> None:
    device = Device("cpu", "local", "spot", 10)
    ended = SessionRow("a", "w", device, 0.0, 1.0, 9, 100, idle=50, overhead=20, lost=9, spent=21)
    going_on = SessionRow("b", "w", device, 0.0, None, 5, None, idle=1, overhead=2, lost=0, spent=0)
    sheet = sessions_sheet([ended, going_on])
    assert sheet.of(TimeKind.IDLE, TimeKind.OVERHEAD, TimeKind.LOST) == Amount(82, 820)
    whole = sheet + job_sheet([had(SOME, kept=True)], [rows()], is_final=True)
    assert whole.total == leased([ended, going_on]) == Amount(103, 1030)


def test_nothing_is_nothing() -> None:
    assert Sheet().total == job_sheet([had(NO_TICKS)], [], is_final=True).total == Amount()
