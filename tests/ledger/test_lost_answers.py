"""The answer to a COMMIT is lost, as in a fail-over: what was done is not done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from contracts.shorthand import claim, claim_job
from contracts.test_draft_switches import EVERYTHING
from contracts.test_registry import ALL, model
from contracts.test_schedules import run
from contracts.test_serving import BATCH, FILE
from ledger.builders import JOB, START, Clock, new_group, new_job, position
from sqlalchemy.exc import OperationalError

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas import crash_points
from specbatch.schemas.audit import AuditRecord, EntryKind
from specbatch.schemas.budgets import Period
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import Stage
from specbatch.schemas.schedules import RunState
from specbatch.schemas.serving import ApiKey, Page, Scope
from support.databases import new_database

Ask = Callable[..., Any]  # calls a method of the store
OTHER = "job00000000000002"


def of_jobs(store: Store, ask: Ask) -> list[Any]:
    made = ask(store.create_job, new_job(idempotency_key="k"))
    reading = claim_job(store, Stage.INGEST).lease
    groups = [new_group(0), new_group(1)]
    said = [made, ask(store.add_groups, reading, groups, [], 8, position())]
    store.finish_ingest(reading, 8, {})
    held = claim(store, 0).lease
    said += [ask(store.split_group, held, keep) for keep in (3, 2)]
    ask(store.note_action, JOB, EntryKind.EXPORTED, {"to": "somewhere"})
    ask(store.keep_audit, AuditRecord(JOB, 50, 1, 900, True))
    store.create_job(new_job(OTHER))
    store.fail_job(claim_job(store, Stage.INGEST, job_id=OTHER).lease, "it cannot be read")
    said += [ask(store.retry_job, OTHER), ask(store.request_cancel, OTHER)]
    said += [store.audits(JOB)]
    return [*said, store.progress(JOB), *store.log(JOB), *store.log(OTHER)]


def of_the_registry(store: Store, ask: Ask) -> list[Any]:
    said: list[Any] = []
    for name in ("aa", "bb", "cc"):
        said += [ask(store.add_model, model(name)), ask(store.promote, name, ALL, "next")]
    said += [ask(store.roll_back, ALL, "it is bad"), ask(store.retire, "cc")]
    said.append(ask(store.begin_rollout, "aa", ALL, (0.5, 1.0), "trained last night"))
    said.append(ask(store.stop_rollout, ALL, "no"))
    return [*said, store.models(), store.deployments(True), store.rollouts(True)]


def of_operators(store: Store, ask: Ask) -> list[Any]:
    said = [ask(store.switch_drafting_off, EVERYTHING, "an incident")]
    said.append(ask(store.switch_drafting_on, EVERYTHING))
    said.append(ask(store.set_budget, "a", Period.DAY, 100, None, "agreed"))
    said.append(ask(store.remove_budget, "a", Period.DAY, "paid"))
    said.append(ask(store.note_schedule_run, run(state=RunState.QUEUED)))
    claimed = ask(store.claim_schedule_run, run())
    said += [claimed, ask(store.hold_schedule_run, replace(claimed, state=RunState.DONE))]
    said.append(ask(store.note_schedule_runs, [run(START + 1), run(START + 2)]))
    return [*said, store.budgets(True), store.schedule_runs(states=tuple(RunState))]


def of_the_service(store: Store, ask: Ask) -> list[Any]:
    second = replace(BATCH, batch_id="batch_2", idempotency_key="k")
    said = [ask(store.add_file, FILE), ask(store.add_batch, BATCH, 1)]
    said += [ask(store.add_batch, second, 2), store.batches("a", Page(9))]
    said += [ask(store.cancel_batch, "a", made.batch_id) for made in (BATCH, second)]
    key = ApiKey("k", "name", "a", frozenset([Scope.READ]), b"d" * 32)
    said += [ask(store.delete_file, "a", FILE.file_id), ask(store.add_api_key, key)]
    return [*said, store.api_keys()]


STORIES = (of_jobs, of_the_registry, of_operators, of_the_service)


@pytest.mark.parametrize("story", STORIES)
def test_what_was_done_is_not_done_again_because_nobody_heard_of_it(
    story: Callable[[Store, Ask], list[Any]], postgres_url: str
) -> None:
    """On PostgreSQL alone: SQLite's COMMIT is this process's own, and never in doubt."""
    with closing(open_store(new_database(), clock=Clock())) as store:
        expected = story(store, lambda work, *values: work(*values))

    with closing(open_store(postgres_url, clock=Clock())) as store:
        assert story(store, losing) == expected


def losing(work: Callable[..., Any], *values: Any, at: CrashPoint = CrashPoint.COMMITTED) -> Any:
    """Call it while the connection of each transaction is lost once."""
    reached: list[CrashPoint] = []

    def reach(point: CrashPoint) -> None:
        if point is not at:
            return
        reached.append(point)
        if len(reached) % 2:
            lost = Exception("server closed the connection unexpectedly")
            raise OperationalError("COMMIT", {}, lost, connection_invalidated=True)

    crash_points.arm(reach)
    try:
        return work(*values)
    finally:
        crash_points.arm(None)
        assert reached


def test_work_is_done_again_where_its_commit_did_not_arrive(postgres_url: str) -> None:
    with closing(open_store(postgres_url, clock=Clock())) as store:
        made = losing(store.add_file, FILE, at=CrashPoint.SQL_COMMIT)
        assert made == store.file("a", FILE.file_id)
