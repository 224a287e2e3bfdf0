"""A finished job with traced completions, in whatever store, to export.

Four groups of six rows; rows 3 and 15 were refused. The second group was cut in two, and one group
failed. Two samples of each row.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ledger.builders import JOB, LEASE_SEC, NO_TIME, RESULTS, new_job, position

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.storage.artefacts import write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    JobState,
    NewGroup,
    PromptRow,
    RejectedRow,
    Stage,
)
from specbatch.schemas.timekeeping import Attempt, Device, NewSession, SessionTime
from support.traced import TracedToken, traced

T = TypeVar("T")

ROWS = 24
REFUSED = (3, 15)
FAILED_GROUP = 3
TAGS = ("de", "en", None)


@dataclass(slots=True)
class ExportedJob:
    """The job, and what is known of it beside the store."""

    store: Store
    workspace: Path
    prompts: dict[int, PromptRow] = field(default_factory=dict)
    completions: list[CompletionRecord] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[TracedToken]] = field(default_factory=dict)
    files: list[Artefact] = field(default_factory=list)

    @property
    def job_id(self) -> str:
        return JOB


def exported_job(
    store: Store,
    workspace: Path,
    ended: bool = True,
    report: Mapping[str, Any] | None = None,
    **job: Any,
) -> ExportedJob:
    """The job in this store; its prompts in this folder. `job`: fields of its row."""
    made = ExportedJob(store, workspace)
    draw = random.Random(11)
    store.create_job(new_job(workspace_uri=str(workspace), **job))
    lease = _found(store.claim_job(JOB, Stage.INGEST, "ingester", LEASE_SEC)).lease
    groups = []
    for index in range(4):
        rows = [
            PromptRow(i, f"row-{i}", _prompt(draw), seed=i, tag=TAGS[i % 3], n=2)
            for i in range(index * 6, index * 6 + 6)
            if i not in REFUSED
        ]
        made.prompts |= {row.row_index: row for row in rows}
        file = Objects().put_bytes(f"{workspace}/prompts-{index}.arrow", write_prompts(rows))
        made.files.append(file)
        first = position(index * 6)
        bounds = (len(rows) * 99, 99)
        groups.append(NewGroup(index, first, len(rows), len(rows) * 3, file, Stage.VERIFY, *bounds))
    refused = [RejectedRow(row, None, "null_prompt", "it is null") for row in REFUSED]
    store.add_groups(lease, groups, refused, ROWS, position(ROWS))
    store.finish_ingest(lease, ROWS, report or {})
    work = _found(store.claim_group(JOB, 1, Stage.VERIFY, "w", LEASE_SEC))
    other = store.split_group(work.lease, 2)
    store.release(work.lease, "it was cut", forgiven=True)
    for group, of in ((0, range(6)), (1, range(6, 8)), (2, range(12, 18)), (other, range(8, 12))):
        _commit(made, draw, group, [row for row in of if row in made.prompts])
    for attempt in range(3):
        work = _found(store.claim_group(JOB, FAILED_GROUP, Stage.VERIFY, "w", LEASE_SEC))
        store.release(work.lease, f"out of memory {attempt}", whole=True)
    _tell_time(made)
    if ended:
        publish = _found(store.claim_job(JOB, Stage.PUBLISH, "p", LEASE_SEC))
        store.finish_job(publish.lease, JobState.PARTIAL)
    made.completions.sort(key=lambda c: (c.row_index, c.sample_index))
    return made


def _tell_time(made: ExportedJob) -> None:
    """Two sessions, one of them on a dearer device; one attempt came to nothing."""
    for name, price in (("session-1", 200_000), ("session-2", 98_000_000)):
        device = Device("cpu" if price < 10**6 else "h200", "eu", "spot", price)
        made.store.begin_session(NewSession(name, "w", device, age_ticks=10**9))
        told = {
            Attempt(JOB, group, 1, Stage.VERIFY): Ticks(prefill=group + 1, verify=10**8, padding=3)
            for group in range(3)
        }
        made.store.report_time(SessionTime(name, seen=10**9), told)


def _commit(made: ExportedJob, draw: random.Random, index: int, rows: list[int]) -> None:
    store = made.store
    work = _found(store.claim_group(JOB, index, Stage.VERIFY, "w", LEASE_SEC))
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    work = _found(store.claim_group(JOB, index, Stage.RECORD, "w", LEASE_SEC))
    records = []
    for row in rows:
        for sample in (0, 1):
            record, tokens = traced(draw, row, sample, made.prompts[row].tag)
            records.append(record)
            made.tokens[row, sample] = tokens
    store.commit_group(work.lease, records, NO_TIME, {})
    made.completions += records


def _prompt(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(300) for _ in range(draw.randrange(1, 6)))


def _found(work: T | None) -> T:
    assert work is not None, "the claim was refused"
    return work
