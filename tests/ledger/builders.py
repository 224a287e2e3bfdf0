"""Jobs, groups and completions for tests of the store, and a clock that tests move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbatch.schemas.provenance import Provenance, Ticks
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    NewGroup,
    NewJob,
    SourcePosition,
    Stage,
    StageTiming,
)

JOB = "job00000000000001"
LEASE_SEC = 60.0
START = 1_000_000.0
NO_TIME = StageTiming(0.0)
ROW_BOUND = 16  # tokens that a row of these groups can have
RESULTS = Artefact("file:///w/results.arrow", "r" * 64, 20)
DRAFTS = Artefact("file:///w/drafts.arrow", "d" * 64, 30)


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def new_job(job_id: str = JOB, **values: Any) -> NewJob:
    job = NewJob(
        job_id=job_id,
        name="nightly",
        tenant="default",
        spec={"name": "nightly", "sampling": {"temperature": 0.0, "n": 1}, "verifier": "big"},
        spec_digest="digest-1",
        verifier="big",
        proposer="small",
        output_uri="file:///out",
        workspace_uri="file:///work",
    )
    return replace(job, **values)


def position(row: int = 0) -> SourcePosition:
    return SourcePosition("file:///in.parquet", "etag", row // 100, row % 100)


def new_group(index: int, rows: int = 4, first_stage: Stage = Stage.VERIFY) -> NewGroup:
    prompts = Artefact(f"file:///w/prompts-{index}.arrow", "p" * 64, 10)
    bounds = (rows * ROW_BOUND, ROW_BOUND)
    return NewGroup(index, position(index * rows), rows, rows * 5, prompts, first_stage, *bounds)


def completion(row: int, sample: int = 0, **values: Any) -> CompletionRecord:
    record = CompletionRecord(
        row_index=row,
        sample_index=sample,
        row_id=f"row-{row}",
        tag="news",
        seed=2**63 - 1,
        prompt_tokens=5,
        token_ids=(7, 8, 300_000),
        text="a b",
        finish_reason=FinishReason.STOP,
        origins=(0, 1, 2),
        logprobs=(-0.5, -0.25, -2.0),
        proposed=4,
        accepted=1,
        verifier_passes=2,
        cost_usd=0.25,
        verifier="big",
        proposer="small",
        proposed_at_depth=(2, 2),
        accepted_at_depth=(1, 0),
        compute_sec=0.1,
        draft_sec=0.2,
        decode_sec=0.3,
        baseline_sec=0.4,
        provenance=Provenance(
            steps=(5, 9),
            pass_ticks=(40_000, 70),
            sources=("ngram", "draft-model"),
            makers=(1,),
            drafted=(2,),
            rejected=(31,),
        ),
        ticks=Ticks(prefill=3, verify=40_000, draft=50, rejected=17, overhead=2**33),
        price_microusd=2_000_000,
        ahead_ticks=12,
        ahead_price_microusd=200_000,
        numeric_class="exact/f32/1",
        model_fingerprint="9bd2d5427dfd59bbfd4ac82ffd263324",
        receipt=bytes(range(52)),
        reused_from="0000018c2f1aabcdef0123/7/1",
        score=0.75,
        top_logprobs=(((7, 9), (-0.5, -1.5)), ((0, 8), (-0.25, -0.25)), ((6, 1), (-0.5, -2.0))),
    )
    return replace(record, **values)
