"""Tokens of many completions at once are what an account of every pass says of each."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from ledger.builders import completion

from specbatch.pipeline.outputs.export_columns import token_batch
from specbatch.pipeline.outputs.token_table import token_table
from specbatch.schemas.errors import StoreError
from specbatch.schemas.provenance import NO_PROVENANCE, Provenance
from specbatch.schemas.records import CompletionRecord
from support.traced import TracedToken, naive_ticks, traced


def expected(record: CompletionRecord, tokens: list[TracedToken]) -> list[dict[str, object]]:
    return [
        {
            "job_id": "job",
            "row_index": record.row_index,
            "sample_index": record.sample_index,
            "position": token.position,
            "token_id": token.token_id,
            "origin": token.origin,
            "proposer": token.proposer,
            "verifier_step": token.step,
            "logprob": token.logprob,
            "draft_position": token.draft_position,
            "rejected_token": token.rejected_token,
            "ticks": ticks,
            "price_microusd": record.price_microusd,
        }
        for token, ticks in zip(tokens, naive_ticks(record, tokens), strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_told_as_it_came_about(seed: int) -> None:
    draw = random.Random(seed)
    pairs = [traced(draw, row, passes=draw.randrange(1, 9)) for row in range(30)]
    batch = token_batch("job", [record for record, _ in pairs])
    batch.validate(full=True)
    naive = [row for record, tokens in pairs for row in expected(record, tokens)]
    assert batch.to_pylist() == naive
    assert len({row["origin"] for row in naive}) == 4


def test_the_tokens_share_the_ticks_of_their_completion_to_the_last_one() -> None:
    record, _ = traced(random.Random(3), row=0, passes=40)
    ticks = token_batch("job", [record]).column("ticks").to_pylist()
    assert sum(ticks) == record.ticks.total > sum(record.provenance.pass_ticks)


def test_one_at_a_time_gives_the_same_as_all_at_once() -> None:
    draw = random.Random(5)
    records = [traced(draw, row)[0] for row in range(12)]
    alone = [row for record in records for row in token_batch("job", [record]).to_pylist()]
    assert token_batch("job", records).to_pylist() == alone


def test_completions_without_tokens_or_provenance_stand_between_others() -> None:
    draw = random.Random(7)
    (first, tokens), (last, more) = traced(draw, row=0), traced(draw, row=3)
    empty = replace(completion(1), token_ids=(), origins=(), logprobs=())
    older = completion(2, provenance=NO_PROVENANCE)
    rows = token_batch("job", [first, empty, older, last]).to_pylist()
    told = [row for row in rows if row["row_index"] != 2]
    assert told == expected(first, tokens) + expected(last, more)
    of_older = [row for row in rows if row["row_index"] == 2]
    assert [row["token_id"] for row in of_older] == [7, 8, 300_000]
    assert [row["draft_position"] for row in of_older] == [None, 0, 1]  # origins tell that much
    for name in ("proposer", "verifier_step", "rejected_token"):
        assert {row[name] for row in of_older} == {None}
    assert [row["ticks"] for row in of_older] == [older.ticks.total, 0, 0]


def test_purged_completions_have_no_tokens() -> None:
    record, _ = traced(random.Random(9), row=0)
    kept = replace(record.provenance, rejected=())
    purged = replace(record, token_ids=(), logprobs=(), text="", provenance=kept)
    assert token_batch("job", [purged]).num_rows == 0


def test_no_completions_have_no_tokens() -> None:
    assert token_table([]).sources == ()
    assert token_batch("job", []).num_rows == 0


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "there are not as many origins as tokens": {"origins": (0,)},
    "2 steps, and 1 are kept": {"provenance": Provenance(steps=(1,))},
    "1 makers, and 0 are kept": {"provenance": Provenance(steps=(1, 2), pass_ticks=(1, 2))},
    "1 rejected tokens, and 2 are kept": {
        "provenance": Provenance((1, 2), (1, 2), ("a",), (0,), (2,), (5, 6))
    },
    "a draft names a source that is not listed": {
        "provenance": Provenance((1, 2), (1, 2), ("a",), (1,), (2,), (5,))
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_named(message: str) -> None:
    values: dict[str, Any] = {"provenance": NO_PROVENANCE, **CONTRADICTIONS[message]}
    wrong = replace(completion(4), **values)
    with pytest.raises(StoreError, match=rf"completion 4\.0 contradicts itself: .*{message}"):
        token_table([completion(3), wrong])
