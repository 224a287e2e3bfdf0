"""Texts of completions: where they end, and whether they have their response format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbatch.pipeline.ledger.rules import FINISHED
from specbatch.pipeline.outputs.validation import problem_of
from specbatch.pipeline.stages.text_stop import Decode, text_before_stop
from specbatch.schemas.records import CompletionRecord, FinishReason, PromptRow
from specbatch.schemas.spec import JobSpec


def with_text(
    records: Sequence[CompletionRecord],
    texts: Sequence[str],
    rows: Sequence[PromptRow],
    spec: JobSpec,
    decode: Decode,
) -> list[CompletionRecord]:
    """The records with their texts, which end before a stop string, and what is wrong with those
    that have another format than was asked for."""
    params = {row.row_index: spec.sampling.params(dict(row.overrides)) for row in rows}
    done = []
    for record, text in zip(records, texts, strict=True):
        of = params[record.row_index]
        shown = text_before_stop(decode, record.token_ids, text, of.stop, of.min_tokens)
        problem = record.error
        if of.response_format and problem is None and record.finish_reason in FINISHED:
            ended = record.finish_reason is FinishReason.STOP and shown == text
            problem = problem_of(of.response_format, shown, ended)
        done.append(replace(record, text=shown, error=problem))
    return done
