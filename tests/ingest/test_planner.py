"""Groups over a whole input, and the same groups after a crash anywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest.making import make_spec, write_parquet

from specbatch.pipeline.inputs.planner import PlannedGroup, plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.spec import JobSpec

MakeChecker = Callable[..., RowChecker]


def plan_all(spec: JobSpec, checker: RowChecker, **values: Any) -> list[PlannedGroup]:
    source = open_source(spec.input, Objects())
    return list(plan(source, checker, spec.group_size, **values))


def test_rows_fill_groups_in_order(tmp_path: Path, make_checker: MakeChecker) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": [f"p{i}" for i in range(250)]})
    spec = make_spec(path, group_size=64)
    groups = plan_all(spec, make_checker(spec))
    assert [len(group.rows) for group in groups] == [64, 64, 64, 58]
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [row.row_index for group in groups for row in group.rows] == list(range(250))
    assert groups[1].source == groups[0].cursor
    assert groups[-1].next_row == 250
    assert groups[0].prompt_tokens == sum(len(row.prompt_ids) for row in groups[0].rows)


def test_rejected_rows_count_and_ride_with_their_group(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    prompts = ["a", None, "b", "c", "", "d", None]
    path = write_parquet(tmp_path / "a.parquet", {"prompt": prompts}, 3)
    spec = make_spec(path, group_size=2)
    groups = plan_all(spec, make_checker(spec))
    assert [[row.row_index for row in group.rows] for group in groups] == [[0, 2], [3, 5], []]
    assert [[row.row_index for row in group.rejected] for group in groups] == [[1], [4], [6]]
    assert [group.next_row for group in groups] == [3, 6, 7]
    assert groups[2].source == groups[2].cursor or groups[2].rows == ()


def test_an_input_of_only_bad_rows_is_planned_in_bounded_pieces(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": [""] * 25_000}, 30_000)
    spec = make_spec(path)
    groups = plan_all(spec, make_checker(spec))
    assert [len(group.rejected) for group in groups] == [10_000, 10_000, 5_000]
    assert [group.index for group in groups] == [0, 0, 0]


def test_a_group_stays_under_its_token_limit_unless_one_row_exceeds_it(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["x" * 9, "x" * 9, "x" * 40, "x", "x"]})
    spec = make_spec(path)
    groups = plan_all(spec, make_checker(spec), max_group_tokens=20)
    assert [[len(row.prompt_ids) for row in group.rows] for group in groups] == [
        [10, 10],
        [41],
        [2, 2],
    ]


def test_an_empty_file_plans_to_nothing(tmp_path: Path, make_checker: MakeChecker) -> None:
    import pyarrow as pa

    empty = pa.table({"prompt": pa.array([], pa.string())})
    spec = make_spec(write_parquet(tmp_path / "a.parquet", empty))
    assert plan_all(spec, make_checker(spec)) == []


def test_bad_rows_are_in_no_group(tmp_path: Path, make_checker: MakeChecker) -> None:
    prompts = [None if i % 10 == 0 else "x" * (i % 7 + 1) for i in range(1000)]
    spec = make_spec(write_parquet(tmp_path / "a.parquet", {"prompt": prompts}))
    groups = plan_all(spec, make_checker(spec))
    assert groups[-1].next_row == 1000
    assert sum(len(group.rows) for group in groups) == 900
    bad = [row for group in groups for row in group.rejected]
    assert {row.code for row in bad} == {"null_prompt"}
    assert [row.row_index for row in bad] == list(range(0, 1000, 10))


# --- resume -------------------------------------------------------------------------------------
ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "bb", "", None, "x" * 70]), st.sampled_from("abcdefghij")),
    max_size=40,
)


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.lists(ROWS, min_size=1, max_size=3),
    group_size=st.integers(1, 7),
    rows_per_group=st.integers(1, 9),
    max_tokens=st.integers(3, 12),
    form=st.sampled_from(["parquet", "jsonl", "openai"]),
)
def test_planning_on_from_any_cursor_gives_the_same_groups(
    make_checker: MakeChecker,
    files: list[list[tuple[str | None, str]]],
    group_size: int,
    rows_per_group: int,
    max_tokens: int,
    form: str,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, rows in enumerate(files):
            write_input(Path(folder), number, rows, rows_per_group, form)
        spec = make_spec(folder, group_size=group_size, input={"format": form})
        whole = plan_all(spec, make_checker(spec), max_group_tokens=max_tokens)
        covered = [r.row_index for g in whole for r in g.rows]
        covered += [r.row_index for g in whole for r in g.rejected]
        assert sorted(covered) == list(range(sum(map(len, files))))
        for done, group in enumerate(whole):
            rest = plan_all(
                spec,
                make_checker(spec),
                start=group.cursor,
                next_row=group.next_row,
                next_group=group.index + bool(group.rows),
                max_group_tokens=max_tokens,
            )
            assert rest == whole[done + 1 :]


def write_input(
    folder: Path, number: int, rows: list[tuple[str | None, str]], rows_per_group: int, form: str
) -> None:
    if form == "parquet":
        import pyarrow as pa

        prompts = pa.array([prompt for prompt, _ in rows], pa.string())
        ids = pa.array([row_id for _, row_id in rows], pa.string())
        table = pa.table({"prompt": prompts, "id": ids})
        write_parquet(folder / f"{number}.parquet", table, rows_per_group)
        return
    lines = []
    for prompt, row_id in rows:
        if form == "openai":
            messages = prompt and [{"role": "user", "content": prompt}]
            body = {"model": "m", "messages": messages, "seed": 5}
            lines.append(orjson.dumps({"custom_id": row_id, "body": body}))
        else:
            lines.append(orjson.dumps({"prompt": prompt, "id": row_id}))
    (folder / f"{number}.jsonl").write_bytes(b"\n\n".join(lines))


# --- an input that is another meanwhile ---------------------------------------------------------
def write_unnamed(path: Path, rows: int, form: str) -> None:
    """Good rows without ids."""
    if form == "parquet":
        import pyarrow as pa

        table = pa.table({"prompt": ["p"] * rows, "id": pa.nulls(rows, pa.string())})
        write_parquet(path.with_suffix(".parquet"), table, 3)
    else:
        path.with_suffix(".jsonl").write_bytes(b'{"prompt": "p"}\n' * rows)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("change", ["added", "grown", "removed"])
def test_rows_before_the_cursor_must_stay_as_many(
    tmp_path: Path, make_checker: MakeChecker, form: str, change: str
) -> None:
    """Numbers of rows that are counted anew would be taken for ids of rows still to come."""
    write_unnamed(tmp_path / "b", 2, form)
    write_unnamed(tmp_path / "c", 8, form)
    spec = make_spec(tmp_path, group_size=4)
    first = plan_all(spec, make_checker(spec))[0]
    start = {"start": first.cursor, "next_row": first.next_row, "next_group": 1}
    assert [len(group.rows) for group in plan_all(spec, make_checker(spec), **start)] == [4, 2]
    match change:
        case "added":
            write_unnamed(tmp_path / "a", 6, form)
        case "grown":
            write_unnamed(tmp_path / "b", 3, form)
        case _:
            (tmp_path / f"b.{form}").unlink()
    with pytest.raises(InputError, match=rf"files before {first.cursor.uri} were added, removed"):
        plan_all(spec, make_checker(spec), **start)


def test_a_file_that_reading_cannot_go_on_in_is_named_first(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    for name in "bc":
        write_unnamed(tmp_path / name, 4, "jsonl")
    spec = make_spec(tmp_path, group_size=6)
    first = plan_all(spec, make_checker(spec))[0]
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(InputError, match=rf"{first.cursor.uri} is gone since this job began"):
        plan_all(spec, make_checker(spec), start=first.cursor, next_row=6, next_group=1)
