"""Accounts as a publication pins them, and each change of them: without a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from ledger.builders import JOB

from specbatch.pipeline.audit.accounts import (
    OF_GROUP,
    OF_JOB,
    AccountCounts,
    AccountRows,
    compared,
    pinned,
)
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import Stage
from specbatch.schemas.speculation import Decision, DecisionAction
from specbatch.schemas.timekeeping import Attempt, Device, SessionRow, TimeSlice
from specbatch.schemas.usage import COUNTERS

DEVICE = Device("cpu", "here", "spot", 200_000)
OPEN = SessionRow("open" * 8, "w1", DEVICE, 10.0, None, 90, None, 20, 10, 0, 60)
ENDED = SessionRow("over" * 8, "w2", DEVICE, 10.0, 20.0, 90, 90, 20, 10, 5, 55)


def decision(reason: str) -> Decision:
    return Decision(11.0, DecisionAction.OFF, "ngram", reason, 0.2, 0.5, 3)


def group(index: int, rows: int) -> tuple[object, ...]:
    return index, *(rows if name == "rows" else 2 for name in OF_GROUP)


def slice_of(session: SessionRow, index: int, verify: int, kept: bool) -> TimeSlice:
    attempt = Attempt(JOB, index, 1, Stage.VERIFY)
    return TimeSlice(session.session_id, attempt, Ticks(verify=verify), kept, False, DEVICE)


def test_sessions_are_pinned_as_releases_without_pools_did() -> None:
    in_pool = replace(ENDED, device=replace(DEVICE, pool="eu", each_microusd=100_000))
    rows = replace(ROWS, sessions=[OPEN, in_pool])
    assert pinned(rows)["sessions"] == pinned(ROWS)["sessions"]
    assert pinned(rows)["sessions"][1] == [
        *(ENDED.session_id, "w2", "cpu", "here", "spot", 200_000, 10.0, True)
    ]


ROWS = AccountRows(
    dict.fromkeys(OF_JOB, 3) | {"report": {"saved": 0.5}},
    [group(0, 4), group(1, 4)],
    [slice_of(OPEN, 0, 30, True), slice_of(ENDED, 1, 12, False), slice_of(OPEN, 1, 7, False)],
    [OPEN, ENDED],
    [(3, decision("a")), (4, decision("b")), (8, decision("c"))],
    [(0, 2, "record", "{}", *range(len(COUNTERS)))],
)


def faults(rows: AccountRows) -> tuple[list[str], AccountCounts]:
    counts = AccountCounts()
    return [one.what for one in compared(pinned(ROWS), rows, counts)], counts


def test_what_is_as_it_was_has_no_fault() -> None:
    found, counts = faults(ROWS)
    assert found == []
    assert counts == AccountCounts(
        groups=2, slices=2, ticks=42, decisions=3, usage=1, late_slices=1, late_ticks=7
    )


def test_only_what_cannot_grow_any_more_is_pinned() -> None:
    said = pinned(ROWS)
    assert said["slices"]["count"] == 2
    assert said["slices"]["ticks"] == [0, 42, 0, 0, 0, 0]
    assert said["decisions"]["ids"] == [[3, 4], [8, 8]]
    assert [one[-1] for one in said["sessions"]] == [False, True]
    assert said["groups"]["sums"]["rows"] == 8.0


def test_what_came_later_is_counted_and_no_fault() -> None:
    grown = replace(ROWS.slices[2], ticks=Ticks(verify=50))
    later = [*ROWS.decisions, (9, decision("d"))]
    found, counts = faults(replace(ROWS, slices=[*ROWS.slices[:2], grown], decisions=later))
    assert found == []
    assert (counts.late_ticks, counts.late_decisions) == (50, 1)


CHANGES: dict[str, tuple[Callable[[AccountRows], AccountRows], str]] = {
    "the job's rows": (
        lambda r: replace(r, job={**r.job, "prompt_tokens": 4}),
        "prompt_tokens is 4, it was published with 3",
    ),
    "its report": (
        lambda r: replace(r, job={**r.job, "report": {"saved": 0.6}}),
        "report is not the one with which",
    ),
    "a group's rows": (
        lambda r: replace(r, groups=[group(0, 5), group(1, 4)]),
        "rows come to 9.0, the job was published with 8.0",
    ),
    "two groups' rows": (
        lambda r: replace(r, groups=[group(0, 5), group(1, 3)]),
        "though their sums are as published",
    ),
    "no session": (lambda r: replace(r, sessions=[OPEN]), "session overoverover is missing"),
    "a session's price": (
        lambda r: replace(r, sessions=[replace(OPEN, device=replace(DEVICE, tenure="x")), ENDED]),
        "session openopenopen was changed",
    ),
    "a session's idle time": (
        lambda r: replace(r, sessions=[OPEN, replace(ENDED, idle=21)]),
        "does not balance: it lasted 0.0000090 s",
    ),
    "a kept attempt's time": (
        lambda r: replace(r, slices=[slice_of(OPEN, 0, 31, True), *r.slices[1:]]),
        "with 2 slices with 0.0000042 s, and now there are 2 with 0.0000043 s",
    ),
    "time of a session that has ended": (
        lambda r: replace(r, slices=[r.slices[0], r.slices[2]]),
        "and now there are 1 with",
    ),
    "a decision": (
        lambda r: replace(r, decisions=[(3, decision("z")), *r.decisions[1:]]),
        "decisions about drafting were changed",
    ),
    "what an attempt used": (
        lambda r: replace(r, usage=[(*r.usage[0][:-1], 99)]),
        "what 1 attempts used beside devices, or its prices, was changed",
    ),
    "no decision": (
        lambda r: replace(r, decisions=r.decisions[1:]),
        "1 of the 3 decisions about drafting",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_one_finding_that_names_it(what: str) -> None:
    change, said = CHANGES[what]
    (found,), _ = faults(change(ROWS))
    assert said in found


def test_a_group_without_a_sum_is_pinned_too() -> None:
    endless = replace(ROWS, groups=[(0, *(float("inf") for _ in OF_GROUP))])
    assert set(pinned(endless)["groups"]["sums"].values()) == {None}
    assert set(pinned(replace(ROWS, groups=[]))["groups"]["sums"].values()) == {0.0}
