"""Group artefacts come back as they went in, and equal content gives equal bytes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from ingest.making import completion

from specbatch.pipeline.storage.artefacts import (
    DraftBlock,
    read_drafts,
    read_prompts,
    read_results,
    write_drafts,
    write_prompts,
    write_results,
)
from specbatch.schemas import arrow, completion_rows
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.provenance import NO_PROVENANCE, NO_TICKS
from specbatch.schemas.records import CompletionRecord, FinishReason, PromptRow, Recheck

PROMPTS = [
    PromptRow(0, "a", (1, 2, 3), 2**63 - 1, "news", 2, {"top_p": 0.1, "stop_token_ids": (7, 8)}),
    PromptRow(5, "ü\n", (0,), 0),
]
DRAFTS = [DraftBlock(0, 0, (9, 8), 2**40, 200_000, "3f9a"), DraftBlock(0, 1, (), 0, 0, "3f9a")]
RESULTS = [
    completion(0, proposed_at_depth=(2, 1), accepted_at_depth=(1, 0), compute_sec=0.1),
    completion(0, 1, draft_sec=0.2, decode_sec=0.3, baseline_sec=0.4),
    completion(1, 1, tag="t", text="", token_ids=(), origins=(), logprobs=(), proposer=None),
    completion(2, finish_reason=FinishReason.ERROR, error="out of blocks"),
    completion(
        3, top_logprobs=(((5, 2), (-0.1, -0.5)), ((6, 1), (-1.5, -2.0)), ((9, 3), (0.0, -3)))
    ),
    completion(4, top_logprobs=(((), ()),) * 3),
    completion(5, token_ids=(), origins=(), logprobs=(), top_logprobs=()),
    completion(3, recheck=Recheck(3, 1, 0.25)),
    completion(6, provenance=NO_PROVENANCE, ticks=NO_TICKS, price_microusd=0),
    completion(6, 1, score=0.1 + 0.2),
]


def test_every_field_of_a_record_has_its_column() -> None:
    for record, schema in (
        (PromptRow, arrow.PROMPTS),
        (DraftBlock, arrow.DRAFTS),
        (CompletionRecord, arrow.RESULTS),
    ):
        names = {field.name for field in fields(record)}
        if record is CompletionRecord:  # these two lie flat
            names = names - {"provenance", "ticks"} | set(completion_rows.PROVENANCE)
            names -= {"receipt", "rulings", "score"}  # made when it is stored; beside the columns
        if record is DraftBlock:
            names -= {"proposer"}  # of all of them: beside the columns
        assert names == set(schema.names)


def test_prompts_come_back_as_written() -> None:
    assert read_prompts(write_prompts(PROMPTS)) == PROMPTS
    assert read_prompts(write_prompts([])) == []


def test_drafts_come_back_as_written() -> None:
    assert read_drafts(write_drafts(DRAFTS)) == DRAFTS


def test_results_come_back_as_written() -> None:
    assert read_results(write_results(RESULTS)).records == RESULTS


def test_equal_content_gives_equal_bytes() -> None:
    other_order = {"stop_token_ids": (7, 8), "top_p": 0.1}
    twin = PromptRow(0, "a", (1, 2, 3), 2**63 - 1, "news", 2, other_order)
    assert write_prompts([twin, PROMPTS[1]]) == write_prompts(PROMPTS)
    assert write_results(RESULTS) == write_results(list(RESULTS))


def test_damaged_bytes_are_an_object_error() -> None:
    data = write_drafts(DRAFTS)
    with pytest.raises(ObjectError, match="not an Arrow file"):
        read_drafts(data[:-20])


def test_a_file_of_another_kind_is_an_object_error() -> None:
    with pytest.raises(ObjectError, match="a layout of another version"):
        read_prompts(write_drafts(DRAFTS))
