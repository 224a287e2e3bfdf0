"""A leased group advances, is recorded or cancelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from sqlalchemy import BindParameter, Connection, Executable, bindparam, update
from sqlalchemy.dialects import sqlite

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import KEPT_BYTES
from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import audit_log, budgets, copying, jobs, shares, time
from specbatch.pipeline.ledger.sql import usage as sql_usage
from specbatch.pipeline.ledger.sql.jobs import FREE
from specbatch.pipeline.ledger.sql.splitting import held_by
from specbatch.pipeline.ledger.sql.transactions import Now
from specbatch.schemas import completion_rows
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.months import month_of
from specbatch.schemas.records import Artefact, CompletionRecord, Lease, Stage, StageTiming
from specbatch.schemas.tables import Completion, Group
from specbatch.schemas.timekeeping import Spent
from specbatch.schemas.usage import UsageMeter

NOTHING: Mapping[str, Any] = MappingProxyType({})


def advance(
    conn: Connection,
    now: Now,
    lease: Lease,
    to: Stage,
    artefact: Artefact | None,
    timing: StageTiming,
    spent: Spent | None = None,
    usage: UsageMeter | None = None,
) -> None:
    """One statement: the fence, the artefact, the timing and the next stage; then the device time,
    and what its tenant is charged for it."""
    rules.check_step(lease.stage, to, artefact is not None)
    column = "drafts" if to is Stage.VERIFY else "results"
    _leave(conn, now, lease, to, {column: artefact and asdict(artefact)}, asdict(timing))
    if spent is not None:
        time.keep(conn, now, lease, spent)
    sql_usage.keep(conn, lease, usage)
    shares.settle(conn, lease, timing.compute_sec)


def cancel(conn: Connection, now: Now, lease: Lease) -> None:
    jobs.lock(conn, lease.job_id)
    _leave(conn, now, lease, Stage.CANCELLED)
    if lease.stage in rules.CANCELLABLE:
        shares.settle_given_back(conn, lease)
    jobs.move_if_done(conn, now, lease.job_id)


def commit(
    conn: Connection,
    now: Now,
    lease: Lease,
    completions: Sequence[CompletionRecord],
    timing: StageTiming,
    report: Mapping[str, float],
    usage: UsageMeter | None = None,
) -> Stage | None:
    """Store everything of a finished group, or nothing at all."""
    if lease.stage is not Stage.RECORD:
        raise rules.fenced(lease)
    due = _keep(conn, now, lease, completions, timing, report, Stage.DONE)
    sql_usage.keep(conn, lease, usage)
    return due


def keep_part(
    conn: Connection,
    now: Now,
    lease: Lease,
    completions: Sequence[CompletionRecord],
    timing: StageTiming,
    report: Mapping[str, float],
    spent: Spent | None = None,
    usage: UsageMeter | None = None,
) -> None:
    """Store the finished rows of a group that its worker stopped; it becomes CANCELLED."""
    _keep(conn, now, lease, completions, timing, report, Stage.CANCELLED)
    if spent is not None:
        time.keep(conn, now, lease, spent)
    sql_usage.keep(conn, lease, usage)
    shares.settle(conn, lease, timing.compute_sec, is_whole=False)


def _keep(
    conn: Connection,
    now: Now,
    lease: Lease,
    completions: Sequence[CompletionRecord],
    timing: StageTiming,
    report: Mapping[str, float],
    to: Stage,
) -> Stage | None:
    """Returns the job's stage that became due, if any."""
    digested = entries.digested(completions)
    values = [
        {**completion_rows.completion_values(lease, record), "digest": digest[:KEPT_BYTES]}
        for record, digest in digested
    ]
    on_postgres = conn.dialect.name == "postgresql"
    if on_postgres:
        # Before the job's row is locked, so that others may commit meanwhile.
        copying.stage(conn, values)
    job = jobs.lock(conn, lease.job_id)
    # Added: some of them may have been kept when the job was stopped.
    keep_best = (job.spec.get("output") or {}).get("keep_best")
    totals = rules.group_totals(completions, keep_best)
    if to is Stage.CANCELLED:
        totals["rows_kept"] = len({c.row_index for c in completions})
    _leave(conn, now, lease, to, added={**asdict(timing), **totals})
    of_job = {"month": month_of(job.created_at), "job_verifier": job.verifier}
    of_job["job_proposer"] = job.proposer
    if on_postgres:
        copying.insert_staged(conn, of_job)
    else:
        _insert(conn, values, of_job)
    kind = EntryKind.GROUP if to is Stage.DONE else EntryKind.KEPT
    assert lease.group_index is not None, "else it would have been fenced"
    said = entries.completed(lease.group_index, lease.token, digested)
    changed = audit_log.link(conn, now, job, kind, said, lease.owner)
    if report:
        changed["report"] = rules.merge_report(job.report, report)
    after = jobs.move_if_done(conn, now, lease.job_id, **changed)
    # Last, as all commits of the tenant add to this row.
    budgets.book(conn, audit_log.clock(conn, now, job), job.tenant, completions)
    before, then = ((Stage(of.stage), of.ingest_resumes_at is not None) for of in (job, after))
    return rules.due_after(*before, *then)


def _leave(
    conn: Connection,
    now: Now,
    lease: Lease,
    to: Stage,
    values: Mapping[str, Any] = NOTHING,
    added: Mapping[str, float] = NOTHING,
) -> None:
    """End the lease at another stage. Raises `FencedError` when it is not current.

    `added` to the group's own: the timing of an attempt with results, and their totals.
    """
    parameters = {
        "of_job": lease.job_id,
        "of_index": lease.group_index,
        "of_token": lease.token,
        "of_owner": lease.owner,
        "of_stage": lease.stage.value,
        "to_stage": to.value,
        **{f"new_{name}": value for name, value in values.items()},
        **{f"more_{name}": value for name, value in added.items()},
    }
    if conn.execute(_leaving(now, tuple(values), tuple(added)), parameters).rowcount != 1:
        raise rules.fenced(lease)


@lru_cache(maxsize=16)
def _leaving(now: Now, names: tuple[str, ...], added: tuple[str, ...]) -> Executable:
    """The statement of `_leave`, cached: every group ends two stages with it."""
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
    for name in added:
        values[name] = getattr(Group, name) + bindparam(f"more_{name}")
    if added:  # there are results; and the store knows the time it waited
        values |= {"last_error": None, "queue_sec": Group.queue_sec + Group.waited_sec}
    of_lease: list[BindParameter[Any]] = [
        bindparam(name) for name in ("of_job", "of_index", "of_token", "of_owner", "of_stage")
    ]
    return (
        update(Group)
        .where(*held_by(*of_lease))
        .values(stage=bindparam("to_stage"), ready_at=now, attempts=0, **FREE, **values)
    )


def _insert(
    conn: Connection, values: Iterable[Mapping[str, Any]], of_job: Mapping[str, Any]
) -> None:
    rows = [completion_rows.beside_job(row, of_job) for row in values]
    if rows:
        conn.execute(sqlite.insert(Completion).on_conflict_do_nothing(), rows)
