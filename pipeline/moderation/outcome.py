"""What is left of a completion after all policies were asked. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbatch.pipeline.outputs.tool_calls import calls_in
from specbatch.schemas.policies import Ruled, Ruling, outcome
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, FinishReason


def as_ruled(record: CompletionRecord, ruled: Sequence[Ruled]) -> CompletionRecord:
    """The completion as it may be published. What a policy objected to is in none of its fields:
    counts, times, costs and the log-probabilities of its tokens stay, tokens and drafts do not."""
    by = outcome(ruled)
    record = replace(record, rulings=tuple(ruled))
    if by is None:
        return record
    verdict = by.verdict
    bare = replace(without_text(record), text=verdict.text or "")
    if verdict.ruling is Ruling.REDACT:
        return _with_calls_that_are_left(bare)
    reason = FinishReason.BLOCKED if verdict.ruling is Ruling.BLOCK else FinishReason.REVIEW
    said = "blocked" if reason is FinishReason.BLOCKED else "held back for review"
    why = f" ({verdict.code})" if verdict.code else ""
    return replace(bare, finish_reason=reason, error=f"{said} by policy `{by.policy}`{why}")


def without_text(record: CompletionRecord) -> CompletionRecord:
    """With nothing that its text could be read from."""
    provenance = record.provenance
    return replace(
        record,
        text="",
        token_ids=(NOT_KEPT,) * len(record.token_ids),
        top_logprobs=None,
        provenance=replace(provenance, rejected=(NOT_KEPT,) * len(provenance.rejected)),
    )


def _with_calls_that_are_left(record: CompletionRecord) -> CompletionRecord:
    if record.finish_reason is not FinishReason.TOOL_CALLS:
        return record
    try:
        found = calls_in(record.text)
    except ValueError:
        found = None
    return record if found is not None else replace(record, finish_reason=FinishReason.STOP)
