"""Groups on their way into the store: the first at once, then more and more together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from ledger.builders import new_job

from specbatch.pipeline.inputs.planner import (
    MAX_GROUP_TOKENS,
    MOST_ROWS_TOGETHER,
    MOST_TOGETHER,
    PlannedGroup,
    in_batches,
    write_groups,
)
from specbatch.pipeline.storage.artefacts import read_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import JobRow, PromptRow, RejectedRow, SourcePosition, Stage
from support.databases import sqlite_store


def at(row: int) -> SourcePosition:
    return SourcePosition("in.parquet", "v", 0, row)


def job_in(folder: Path) -> JobRow:
    return sqlite_store().create_job(new_job(workspace_uri=str(folder)))[0]


def planned(index: int, rows: int = 2, rejected: int = 0, tokens: int = 3) -> PlannedGroup:
    first = index * rows
    return PlannedGroup(
        index,
        tuple(PromptRow(first + i, f"r{first + i}", (1,) * tokens, seed=i) for i in range(rows)),
        tuple(RejectedRow(first + i, None, "null_prompt", "null") for i in range(rejected)),
        at(first),
        at(first + rows),
        first + rows,
    )


def test_batches_grow_to_the_most_and_hold_every_group_once() -> None:
    groups = [planned(index) for index in range(60)]
    batches = list(in_batches(groups))
    assert [len(batch) for batch in batches] == [1, 2, 4, 8, 16, 16, 13]
    assert max(map(len, batches)) == MOST_TOGETHER
    assert [group for batch in batches for group in batch] == groups
    assert list(in_batches([])) == []


@pytest.mark.parametrize(
    "large",
    [
        planned(0, rows=0, rejected=MOST_ROWS_TOGETHER // 2),
        planned(0, rows=2, tokens=MAX_GROUP_TOKENS // 4),
    ],
    ids=["rows", "tokens"],
)
def test_large_groups_go_by_two(large: PlannedGroup) -> None:
    assert [len(batch) for batch in in_batches([large] * 9)] == [1, 2, 2, 2, 2]


def test_nothing_is_planned_before_it_is_asked_for() -> None:
    asked: list[int] = []

    def source() -> Iterator[PlannedGroup]:
        for index in range(7):
            asked.append(index)
            yield planned(index)

    batches = in_batches(source())
    next(batches)
    assert asked == [0], "a verifier starts with the first group"
    next(batches)
    assert asked == [0, 1, 2]


def test_groups_are_written_with_their_prompts_in_order(tmp_path: Path) -> None:
    batch = [planned(0), planned(1, rows=0, rejected=3), planned(1), planned(2, rows=5)]
    with ThreadPoolExecutor(4) as writers:
        groups = write_groups(
            Objects(),
            job_in(tmp_path),
            batch,
            lambda index: Stage.PROPOSE if index == 1 else Stage.VERIFY,
            writers,
            lambda row: 10 + len(row.prompt_ids),
        )
    assert [group.index for group in groups] == [0, 1, 2]
    assert [group.first_stage for group in groups] == [Stage.VERIFY, Stage.PROPOSE, Stage.VERIFY]
    for group, of in zip(groups, (batch[0], batch[2], batch[3]), strict=True):
        data = Objects().get_bytes(group.prompts.uri, group.prompts)
        assert read_prompts(data) == list(of.rows)
        assert (group.rows, group.source) == (len(of.rows), of.source)
        assert group.prompt_tokens == of.prompt_tokens
        assert group.most_tokens == 10 * len(of.rows) + of.prompt_tokens
        assert group.most_row_tokens == 10 + max(len(row.prompt_ids) for row in of.rows)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "prompts-00000002.arrow").mkdir()
    batch = [planned(index) for index in range(4)]
    with ThreadPoolExecutor(4) as writers:
        write = partial(write_groups, Objects(), job_in(tmp_path), batch, lambda _: Stage.VERIFY)
        with pytest.raises(ObjectError, match="prompts-00000002"):
            write(writers, lambda _: 1)
