"""Log-probabilities on request, from the command line to the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from support.models import TinyPair

OWN = ['{"top_logprobs": 1}'] * 4 + [None] * 4 + ['{"logprobs": false}'] * 4


def test_rows_get_what_they_asked_for_with_and_without_drafts(
    cli: Any, job: Any, folder: Path
) -> None:
    given = pq.read_table(folder / "prompts.parquet")
    pq.write_table(given.append_column("own", pa.array(OWN)), folder / "own.parquet")
    flags = [*job, "--local", "--input", "own.parquet", "--sampling-column", "own"]
    flags += ["--top-logprobs", 3, "--temperature", 0.8, "--max-tokens", 12]
    for depth in ("off", 4):
        done = cli("submit-job", *flags, "--depth", depth, "--output", f"out-{depth}")
        assert done.code == 0, done.err
    off, drafted = (
        pq.read_table(folder / f"out-{depth}" / "data/part-00000.parquet").to_pylist()
        for depth in ("off", 4)
    )
    for i, (one, other) in enumerate(zip(off, drafted, strict=True)):
        for name in ("token_ids", "logprobs", "top_logprobs"):
            assert one[name] == other[name]
        if i >= 8:
            assert (one["logprobs"], one["top_logprobs"]) == (None, None)
            continue
        assert len(one["token_ids"]) == len(one["logprobs"]) == len(one["top_logprobs"])
        for token, own, tops in zip(
            one["token_ids"], one["logprobs"], one["top_logprobs"], strict=True
        ):
            assert len(tops) == (1 if i < 4 else 3)
            law = {top["token_id"]: top["logprob"] for top in tops}
            assert list(law.values()) == sorted(law.values(), reverse=True)
            assert law.get(token, own) == own <= tops[0]["logprob"]


def test_the_values_can_be_asked_for_without_any_other_token(
    cli: Any, job: Any, folder: Path
) -> None:
    assert cli("submit-job", *job, "--local", "--logprobs").code == 0
    rows = pq.read_table(folder / "out" / "data/part-00000.parquet").to_pylist()
    assert [row["top_logprobs"] for row in rows] == [[[]] * len(row["token_ids"]) for row in rows]
    assert all(value <= 0 for row in rows for value in row["logprobs"])


def test_openai_bodies_are_answered_as_openai_does(
    cli: Any, job: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    wants: dict[str, dict[str, Any]] = {
        "top": {"logprobs": True, "top_logprobs": 2, "n": 2},
        "own": {"logprobs": True},
        "none": {},
        "many": {"logprobs": True, "top_logprobs": 21},
        "none but two": {"logprobs": False, "top_logprobs": 2},
    }
    with (folder / "batch.jsonl").open("wb") as stream:
        for name, body in wants.items():
            body |= {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            stream.write(orjson.dumps(line | {"body": body}, option=orjson.OPT_APPEND_NEWLINE))
    flags = ["--local", "--input", "batch.jsonl", "--format", "openai", "--temperature", 0.8]
    assert cli("submit-job", *job, *flags).code == 3
    choices = {
        line["custom_id"]: line["response"]["body"]["choices"]
        for line in map(orjson.loads, (folder / "out" / "output.jsonl").read_bytes().splitlines())
    }
    rows = pq.read_table(folder / "out" / "data/part-00000.parquet").to_pylist()
    tokenizer = TextTokenizer.load(str(tiny_pair.verifier))
    assert choices["none"][0]["logprobs"] is None
    assert len(choices["top"]) == 2
    told = [*choices["top"], *choices["own"]]
    for choice, row in zip(told, rows[:3], strict=True):
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [
            tokenizer.decode([t]) for t in row["token_ids"]
        ]
        assert [entry["logprob"] for entry in content] == row["logprobs"]
        for entry, tops in zip(content, row["top_logprobs"], strict=True):
            assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
                (tokenizer.decode([top["token_id"]]), top["logprob"]) for top in tops
            ]
    errors = {
        line["custom_id"]: line["error"]
        for line in map(orjson.loads, (folder / "out" / "errors.jsonl").read_bytes().splitlines())
    }
    assert errors == {
        "many": {
            "code": "bad_parameter",
            "message": "field `top_logprobs`: must be at most 20 (got 21)",
        },
        "none but two": {
            "code": "bad_parameter",
            "message": "top_logprobs 2 needs logprobs to be true",
        },
    }


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--top-logprobs", 21], "sampling.top_logprobs"),
        (["--top-logprobs", 2, "--no-logprobs"], "top_logprobs 2 needs logprobs to be true"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(
    cli: Any, job: Any, flags: list[object], complaint: str
) -> None:
    refused = cli("submit-job", *job, "--local", *flags)
    assert refused.code == 2
    assert complaint in refused.complaint
