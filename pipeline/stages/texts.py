"""Texts of completions: where they end, and whether they have their response format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbatch.pipeline.outputs.tool_calls import calls_in
from specbatch.pipeline.outputs.validation import problem_of
from specbatch.pipeline.stages.text_stop import Decode, text_before_stop
from specbatch.schemas.records import (
    FINISHED,
    CompletionRecord,
    FinishReason,
    PromptRow,
    SamplingParams,
)
from specbatch.schemas.spec import JobSpec


def with_text(
    records: Sequence[CompletionRecord],
    texts: Sequence[str],
    rows: Sequence[PromptRow],
    spec: JobSpec,
    decode: Decode,
) -> list[CompletionRecord]:
    """The records with their texts, which end before a stop string, and what is wrong with those
    that have another format than was asked for. Those that call functions say so."""
    params = {row.row_index: spec.sampling.params(dict(row.overrides)) for row in rows}
    done = []
    for record, text in zip(records, texts, strict=True):
        of = params[record.row_index]
        shown = text_before_stop(decode, record.token_ids, text, of.stop, of.min_tokens)
        problem, reason = record.error, record.finish_reason
        if reason is FinishReason.TOOL_CALLS:  # recorded before, and judged again
            reason = FinishReason.STOP
        if of.form and problem is None and reason in FINISHED:
            ended = reason is FinishReason.STOP and shown == text
            problem = problem_of(of.form, shown, ended)
            if ended and problem is None and _calls(of, shown):
                reason = FinishReason.TOOL_CALLS
        done.append(replace(record, text=shown, error=problem, finish_reason=reason))
    return done


def _calls(params: SamplingParams, text: str) -> bool:
    return not params.response_format and calls_in(text) is not None
