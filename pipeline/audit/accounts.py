"""A job's figures, device time and decisions, as its log pins them at publication. Pure functions.

The log cannot pin what still changes then. While a session is open, workers may report more time of
attempts that were not kept, and more decisions. An audit counts those and says that the log does
not cover them. Everything else must stay unchanged until the job is retried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any

from specbatch.schemas.audit import Finding, FindingKind
from specbatch.schemas.provenance import NO_TICKS, Ticks, in_seconds
from specbatch.schemas.speculation import Decision
from specbatch.schemas.timekeeping import SessionRow, TimeSlice
from specbatch.schemas.usage import COUNTERS

# Columns of a job's row that its stages write, and of its groups'.
OF_JOB = (*("groups_total", "groups_cut", "rows_rejected", "prompt_tokens", "next_row"), "report")
OF_GROUP = (
    *("rows", "rows_kept", "rows_failed", "completions", "prompt_tokens", "completion_tokens"),
    *("proposed", "accepted", "verifier_passes", "queue_sec", "compute_sec", "device_usd"),
    "cost_usd",
)

# Columns of what an attempt used beside devices.
OF_USAGE = ("group_index", "generation", "stage", "prices", *COUNTERS)

_SHOWN = 12  # characters of an id


@dataclass(frozen=True, slots=True)
class AccountRows:
    """The job's accounts in the store now."""

    job: Mapping[str, Any]  # `OF_JOB`
    groups: Sequence[tuple[Any, ...]]  # index, then `OF_GROUP`; by index
    slices: Sequence[TimeSlice]  # by attempt and session
    sessions: Sequence[SessionRow]  # that the job had something of
    decisions: Sequence[tuple[int, Decision]]  # with their ids, by id
    usage: Sequence[tuple[Any, ...]] = ()  # `OF_USAGE` of attempts that were kept, by attempt


@dataclass
class AccountCounts:
    """Counts of what was compared, and of what the log does not cover."""

    groups: int = 0
    slices: int = 0
    ticks: int = 0  # of these slices
    decisions: int = 0
    usage: int | None = None  # attempts; None: the publication pinned none
    late_slices: int = 0
    late_ticks: int = 0
    late_decisions: int = 0


def pinned(rows: AccountRows) -> dict[str, Any]:
    """The accounts as the log entry of the publication pins them."""
    ended = {session.session_id for session in rows.sessions if session.ended_at is not None}
    final = [one for one in rows.slices if _is_final(one, ended)]
    return {
        "job": _digests_of_job(rows.job),
        "groups": {
            "count": len(rows.groups),
            "sums": _sums(rows.groups),
            "digest": _digest("groups", map(_of_group, rows.groups)),
        },
        "sessions": [
            [*_of_session(session), session.session_id in ended] for session in rows.sessions
        ],
        "slices": {
            "count": len(final),
            "ticks": list(astuple(_ticks(final))),
            "digest": _digest("slices", map(_of_slice, final)),
        },
        "usage": {"count": len(rows.usage), "digest": _digest("usage", map(list, rows.usage))},
        "decisions": {
            "ids": _runs([number for number, _ in rows.decisions]),
            "digest": _digest("decisions", map(_of_decision, rows.decisions)),
        },
    }


def compared(
    said: Mapping[str, Any], rows: AccountRows, counts: AccountCounts
) -> Iterator[Finding]:
    """Differences from the accounts at publication. `counts` takes what was compared."""
    yield from _job(said["job"], rows.job)
    yield from _groups(said["groups"], rows.groups, counts)
    yield from _sessions(said["sessions"], rows.sessions)
    ended = {session_id for session_id, *_, has_ended in said["sessions"] if has_ended}
    yield from _slices(said["slices"], rows.slices, ended, counts)
    if "usage" in said:
        yield from _usage(said["usage"], rows.usage, counts)
    yield from _decisions(said["decisions"], rows.decisions, counts)


# --- each kind ------------------------------------------------------------------------------


def _job(said: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[Finding]:
    now = _digests_of_job(job)
    for name, was in said.items():
        if now.get(name) == was:
            continue
        if name == "report":
            yield _found("the job's report is not the one with which it was published")
        else:
            yield _found(f"the job's {name} is {now.get(name)!r}, it was published with {was!r}")


def _groups(
    said: Mapping[str, Any], groups: Sequence[tuple[Any, ...]], counts: AccountCounts
) -> Iterator[Finding]:
    counts.groups = said["count"]
    if _digest("groups", map(_of_group, groups)) == said["digest"]:
        return
    sums = _sums(groups)
    wrong = [name for name, was in said["sums"].items() if sums[name] != was]
    for name in wrong:
        yield _found(
            f"the groups' {name} come to {sums[name]}, the job was published with "
            f"{said['sums'][name]}"
        )
    if not wrong:
        yield _found("figures of groups were changed, though their sums are as published")


def _sessions(said: Sequence[Sequence[Any]], sessions: Sequence[SessionRow]) -> Iterator[Finding]:
    known = {session.session_id: session for session in sessions}
    for session_id, *was, _ in said:
        name, session = f"the worker's session {session_id[:_SHOWN]}", known.get(session_id)
        if session is None:
            yield _found(f"{name} is missing, and the job used device time of it")
        elif (now := _of_session(session)[1:]) != was:
            yield _found(f"{name} was changed: its device, price or start is {now}, it was {was}")
    for session in sessions:
        if session.leased is not None and session.leased != session.accounted:
            yield _found(
                f"the worker's session {session.session_id[:_SHOWN]} does not balance: it lasted "
                f"{_exactly(session.leased)}, and {_exactly(session.accounted)} are accounted for: "
                "one of both was changed"
            )


def _slices(
    said: Mapping[str, Any], slices: Sequence[TimeSlice], ended: set[str], counts: AccountCounts
) -> Iterator[Finding]:
    final = [one for one in slices if _is_final(one, ended)]
    late = [one for one in slices if not _is_final(one, ended)]
    counts.slices, counts.ticks = said["count"], sum(said["ticks"])
    counts.late_slices, counts.late_ticks = len(late), _ticks(late).total
    if _digest("slices", map(_of_slice, final)) == said["digest"]:
        return
    before = f"{said['count']} slices with {_exactly(sum(said['ticks']))}"
    yield _found(
        f"the job's device time was changed: it was published with {before}, and now there are "
        f"{len(final)} with {_exactly(_ticks(final).total)}"
    )


def _usage(
    said: Mapping[str, Any], usage: Sequence[tuple[Any, ...]], counts: AccountCounts
) -> Iterator[Finding]:
    counts.usage = said["count"]
    if _digest("usage", map(list, usage)) != said["digest"]:
        yield _found(
            f"what {said['count']} attempts used beside devices, or its prices, was changed since "
            "the job was published"
        )


def _decisions(
    said: Mapping[str, Any], decisions: Sequence[tuple[int, Decision]], counts: AccountCounts
) -> Iterator[Finding]:
    ids = {number for first, last in said["ids"] for number in range(first, last + 1)}
    mine = [one for one in decisions if one[0] in ids]
    counts.decisions, counts.late_decisions = len(ids), len(decisions) - len(mine)
    if len(mine) < len(ids):
        yield _found(
            f"{len(ids) - len(mine)} of the {len(ids)} decisions about drafting, with which the "
            "job was published, are missing"
        )
    elif _digest("decisions", map(_of_decision, mine)) != said["digest"]:
        yield _found("decisions about drafting were changed since the job was published")


# --- their forms ----------------------------------------------------------------------------


def _is_final(one: TimeSlice, ended: set[str]) -> bool:
    """Whether no more time can be added to it."""
    return one.kept or one.session_id in ended


def _digests_of_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job's columns with its report as a digest, because reports name files."""
    return {**{name: job[name] for name in OF_JOB}, "report": _digest("report", [job["report"]])}


def _of_session(session: SessionRow) -> list[Any]:
    """The values of a session that never change."""
    device = session.device
    # As pinned by earlier releases, too, which had no pools.
    values = [device.kind, device.region, device.tenure, device.price_microusd]
    return [session.session_id, session.owner, *values, session.started_at]


def _of_group(group: tuple[Any, ...]) -> list[Any]:
    """The group with money and seconds as floats."""
    index, *figures = group
    named = zip(OF_GROUP, figures, strict=True)
    return [index, *(float(f) if name.endswith(("_sec", "_usd")) else f for name, f in named)]


def _of_slice(one: TimeSlice) -> list[Any]:
    attempt = one.attempt
    where = [attempt.group_index, attempt.generation, one.session_id, attempt.stage.value]
    return [*where, one.kept, *astuple(one.ticks)]


def _of_decision(numbered: tuple[int, Decision]) -> list[Any]:
    number, decision = numbered
    return [number, *astuple(decision)]


def _sums(groups: Sequence[tuple[Any, ...]]) -> dict[str, float | None]:
    """Sums of each column of `OF_GROUP`; None where the values have no sum."""
    columns = list(zip(*groups, strict=True))[1:] or [()] * len(OF_GROUP)
    return {name: _sum(values) for name, values in zip(OF_GROUP, columns, strict=True)}


def _sum(values: Iterable[float]) -> float | None:
    """The exact sum, so that the order does not matter."""
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):
        return None
    return total if math.isfinite(total) else None


def _ticks(slices: Iterable[TimeSlice]) -> Ticks:
    return sum((one.ticks for one in slices), NO_TICKS)


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Rising numbers as [first, last] of each run without a gap."""
    runs = groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    found = [[number for _, number in run] for _, run in runs]
    return [[run[0], run[-1]] for run in found]


def _digest(what: str, rows: Iterable[Any]) -> str:
    digest = sha256(f"specbatch accounts, {what} 1\n".encode())
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _exactly(ticks: int) -> str:
    """Seconds with all digits, because a change may be small."""
    return in_seconds(ticks, digits=7)


def _found(what: str) -> Finding:
    return Finding(FindingKind.ACCOUNTS, what)
