"""A finished job of many rows, put straight into a SQLite store: one group is recorded as any
other, and the database copies it. Rows of one group differ from each other."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.provenance import TICKS_PER_SEC, Provenance, Ticks
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    JobState,
    NewGroup,
    NewJob,
    RejectedRow,
    SourcePosition,
    Stage,
    StageTiming,
)
from specbatch.schemas.speculation import Decision, DecisionAction
from specbatch.schemas.timekeeping import Device, NewSession, Spent

JOB = "big0000000000000001"
GROUP_ROWS = 500
TAGS = ("news", "code", "<b>bold</b>", None, "文字")
_PRICE = 2_500_000


def make_big_job(path: Path, rows: int, tokens: int = 48) -> str:
    """The id of a job of `rows` rows (a multiple of `GROUP_ROWS`) in the database at `path`."""
    assert rows % GROUP_ROWS == 0
    groups = rows // GROUP_ROWS
    store = open_store(f"sqlite:///{path}")
    try:
        store.create_job(_job())
        work = store.claim_job(JOB, Stage.INGEST, "w", 60)
        assert work is not None
        rejected = [
            RejectedRow(rows + i, f"bad-{i}", "empty_prompt", "the prompt is empty")
            for i in range(200)
        ]
        store.add_groups(work.lease, [_group(i) for i in range(groups)], rejected, rows, _where(0))
        store.finish_ingest(work.lease, rows + 200, {"verifier_sha256": "ab" * 32})
        store.begin_session(NewSession("s1", "w", Device("h200", "eu", "spot", _PRICE), 0))
        verify = store.claim_group(JOB, 0, Stage.VERIFY, "w", 60)
        assert verify is not None
        done = [make_row(row, tokens) for row in range(GROUP_ROWS)]
        ticks = sum((record.ticks for record in done), Ticks())
        results = Artefact("file:///w/results.arrow", "r" * 64, 20)
        timing = StageTiming(ticks.total / TICKS_PER_SEC)
        store.advance(verify.lease, Stage.RECORD, results, timing, Spent("s1", ticks.total, ticks))
        record = store.claim_group(JOB, 0, Stage.RECORD, "w", 60)
        assert record is not None
        store.commit_group(record.lease, done, StageTiming(0.2), {"decode_sec": 1.0})
        store.note_decisions(JOB, [_decision(i) for i in range(60)])
        _copy(path, groups)
        publish = store.claim_job(JOB, Stage.PUBLISH, "w", 60)
        assert publish is not None
        store.finish_job(publish.lease, JobState.PARTIAL)
    finally:
        store.close()
    return JOB


def make_row(row: int, tokens: int = 48) -> CompletionRecord:
    """A completion with passes of random depth."""
    rng = random.Random(row)
    origins: list[int] = []
    drafted: list[int] = []
    passes = 0
    while len(origins) < tokens:
        passes += 1
        depth = rng.choice((0, 0, 1, 2, 4, 8))
        kept = min(depth, int(rng.expovariate(0.5)), tokens - len(origins) - 1)
        last = 0 if depth == 0 else 3 if kept == depth else 2
        origins += [1] * kept + [last]
        if depth:
            drafted.append(depth)
    rejected = tuple(rng.randrange(30_000) for origin in origins if origin == 2)
    step = rng.randrange(40)
    ticks = Ticks(2_000, 40_000 + rng.randrange(90_000), 9_000, 7_000, 0, 900)
    return CompletionRecord(
        row_index=row,
        sample_index=0,
        row_id=f"id-{row}",
        tag=TAGS[row % len(TAGS)],
        seed=row,
        prompt_tokens=20,
        token_ids=tuple(rng.randrange(2048) for _ in origins),
        text=f"</script><script>alert({row})</script> & \u202e text of row {row}",
        finish_reason=FinishReason.STOP if row % 3 else FinishReason.LENGTH,
        origins=tuple(origins),
        logprobs=tuple(-rng.expovariate(1.2) for _ in origins),
        proposed=sum(drafted),
        accepted=sum(origin == 1 for origin in origins),
        verifier_passes=passes,
        cost_usd=ticks.total / TICKS_PER_SEC / 3600 * _PRICE / 1e6,
        verifier="big",
        proposer="small",
        decode_sec=0.01,
        baseline_sec=0.012 + rng.random() / 500,
        provenance=Provenance(
            steps=tuple(range(step, step + passes)),
            pass_ticks=(1_000,) * passes,
            sources=("draft-model", "ngram"),
            makers=tuple(rng.randrange(2) for _ in drafted),
            drafted=tuple(drafted),
            rejected=rejected,
        ),
        ticks=ticks,
        price_microusd=_PRICE,
    )


def _job() -> NewJob:
    return NewJob(
        job_id=JOB,
        name="nightly",
        tenant="default",
        spec={"name": "nightly", "verifier": "big", "sampling": {"temperature": 0.7, "seed": 1}},
        spec_digest="d" * 64,
        verifier="big",
        proposer="small",
        output_uri="file:///out",
        workspace_uri="file:///work",
    )


def _where(row: int) -> SourcePosition:
    return SourcePosition("file:///in.parquet", "etag", 0, row)


def _group(index: int) -> NewGroup:
    prompts = Artefact(f"file:///w/prompts-{index}.arrow", "p" * 64, 10)
    start = _where(index * GROUP_ROWS)
    bounds = (GROUP_ROWS * 148, 148)
    return NewGroup(index, start, GROUP_ROWS, GROUP_ROWS * 20, prompts, Stage.VERIFY, *bounds)


def _decision(number: int) -> Decision:
    action = DecisionAction.OFF if number % 2 else DecisionAction.ON
    return Decision(1_000.0 + number, action, "*", "drafts <pay> & more", 0.4, 0.5, 64)


def _copy(path: Path, groups: int) -> None:
    """The first group's rows and totals for all the others, done one second after another."""
    database = sqlite3.connect(path)
    with database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(completions)")]
        shifted: dict[str, Any] = {
            "row_index": f"row_index + n.value * {GROUP_ROWS}",
            "group_index": "n.value",
        }
        chosen = ", ".join(shifted.get(name, name) for name in columns)
        database.execute(
            f"WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE "
            f"value < {groups - 1}) INSERT INTO completions ({', '.join(columns)}) "
            f"SELECT {chosen} FROM n JOIN completions WHERE group_index = 0 AND {groups} > 1"
        )
        totals = ("compute_sec", "completions", "rows_failed", "completion_tokens", "proposed",
                  "accepted", "verifier_passes", "cost_usd", "taken_usd", "baseline_usd",
                  "device_usd", "stage")  # fmt: skip
        values = ", ".join(
            f"{name} = (SELECT {name} FROM groups WHERE group_index = 0)" for name in totals
        )
        database.execute(f"UPDATE groups SET {values} WHERE group_index > 0")
        database.execute(
            "UPDATE groups SET ready_at = ready_at + group_index, queue_sec = group_index"
        )
        database.execute("UPDATE groups SET taken_usd = taken_usd * (1 + group_index % 7 / 50.0)")
        database.execute("UPDATE jobs SET stage = 'publish', started_at = created_at")
    database.close()
