"""What is left of a completion after all policies were asked. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbatch.pipeline.outputs.tool_calls import calls_in
from specbatch.pipeline.outputs.validation import problem_of
from specbatch.schemas.policies import Ruled, Ruling, outcome
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, FinishReason


def published_as(
    record: CompletionRecord, whole: str, ruled: Sequence[Ruled], form: str
) -> CompletionRecord:
    """The completion as it is published after these verdicts. `whole`: the text of all its tokens.
    No policy has seen what stands behind a stop string, so its tokens go."""
    left = with_form(as_ruled(record, ruled), form)
    return left if record.text == whole else replace(without_text(left), text=left.text)


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
        return bare
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


def with_form(record: CompletionRecord, form: str) -> CompletionRecord:
    """A redacted completion that has lost its form (`SamplingParams.form`) says so, and one that
    calls no function any more has stopped as an answer does; others are unchanged."""
    by = outcome(record.rulings)
    if by is None or by.verdict.ruling is not Ruling.REDACT or not form or record.error is not None:
        return record
    problem = problem_of(form, record.text, record.finish_reason is not FinishReason.LENGTH)
    was_call = record.finish_reason is FinishReason.TOOL_CALLS
    is_call = was_call and problem is None and calls_in(record.text) is not None
    reason = FinishReason.STOP if was_call and not is_call else record.finish_reason
    return replace(record, error=problem, finish_reason=reason)
