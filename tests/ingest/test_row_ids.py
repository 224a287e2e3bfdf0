"""Which rows have which ids, and which of them are refused for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from ingest.making import make_spec

from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import JobSpec

MakeChecker = Callable[..., RowChecker]


def spec_of(path: Path, lines: list[Any], **values: Any) -> JobSpec:
    """A job over these lines; bytes are taken as they are."""
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else orjson.dumps(x) for x in lines))
    return make_spec(path, **values)


def verdicts(spec: JobSpec, checker: RowChecker, *start: Any) -> list[tuple[str | None, str]]:
    """(id, verdict) of each row, in order."""
    groups = plan(open_source(spec.input, Objects()), checker, spec.group_size, *start)
    rows = [row for group in groups for row in (*group.rows, *group.rejected)]
    return [
        (row.row_id, "good" if isinstance(row, PromptRow) else row.code)
        for row in sorted(rows, key=lambda row: row.row_index)
    ]


HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PLAIN = [b"nope", {"id": "x", "prompt": "a"}, b"[]", *({"id": i, "prompt": "a"} for i in range(4))]
BATCH = [
    {"custom_id": "", "body": HELLO},
    {"custom_id": "x", "body": HELLO},
    {"body": HELLO},
    *({"custom_id": f"{i}", "body": HELLO} for i in range(4)),
]


@pytest.mark.parametrize("lines", [PLAIN, BATCH], ids=["jsonl", "openai"])
def test_a_row_that_cannot_be_read_takes_no_id_from_a_good_one(
    tmp_path: Path, make_checker: MakeChecker, lines: list[Any]
) -> None:
    """Also where reading goes on after it, and the ids before are read once more."""
    spec = spec_of(tmp_path / "in.jsonl", lines, group_size=1)
    expected = [("x", "good"), *((f"{i}", "good") for i in range(4))]
    found = verdicts(spec, make_checker(spec))
    assert [row for row in found if row[1] == "good"] == expected
    assert [row[0] for row in found if row[1] != "good"] == [None, None]
    groups = list(plan(open_source(spec.input, Objects()), make_checker(spec), 1))
    for done, group in enumerate(groups[:5], 1):
        start = (group.cursor, group.next_row, group.index + 1)
        rest = verdicts(spec, make_checker(spec), *start)
        assert [row for row in rest if row[1] == "good"] == expected[done:]


def test_the_number_of_a_row_without_an_id_is_its_own(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    lines = [{"prompt": "a"}, {"id": "0", "prompt": "a"}, {"prompt": ""}, {"id": 2, "prompt": "a"}]
    spec = spec_of(tmp_path / "in.jsonl", lines)
    assert verdicts(spec, make_checker(spec)) == [
        ("0", "good"), ("0", "good"), ("2", "empty_prompt"), ("2", "good"),
    ]  # fmt: skip


def test_a_number_is_no_id_where_reading_goes_on_either(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    lines = [{"prompt": "a"}, {"id": "2", "prompt": "a"}, {"prompt": "a"}]
    lines += [{"id": i, "prompt": "a"} for i in (0, 2, 0)]
    spec = spec_of(tmp_path / "in.jsonl", lines, group_size=1)
    whole = [("0", "good"), ("2", "good"), ("2", "good"), ("0", "good")]
    whole += [("2", "duplicate_id"), ("0", "duplicate_id")]
    assert verdicts(spec, make_checker(spec)) == whole
    groups = list(plan(open_source(spec.input, Objects()), make_checker(spec), 1))
    for done, group in enumerate(groups[:4], 1):
        start = (group.cursor, group.next_row, group.index + 1)
        assert verdicts(spec, make_checker(spec), *start) == whole[done:]


def test_ids_that_no_number_holds_must_be_text(tmp_path: Path, make_checker: MakeChecker) -> None:
    """Of larger numbers than 64 bits many are read as one: no row is refused for another's id."""
    numbers = [2**64 - 1, 2**64, 2**64 + 1, -(2**63) - 1]
    lines = [f'{{"id": {number}, "prompt": "a"}}'.encode() for number in numbers]
    spec = spec_of(tmp_path / "in.jsonl", [*lines, {"id": str(2**64), "prompt": "a"}, {"id": 0.5}])
    found = verdicts(spec, make_checker(spec))
    assert found[0] == (f"{2**64 - 1}", "good")
    assert [verdict for _, verdict in found[1:4]] == ["bad_id"] * 3
    assert found[4:] == [(f"{2**64}", "good"), ("0.5", "null_prompt")]
