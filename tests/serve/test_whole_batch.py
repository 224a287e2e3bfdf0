"""A batch from upload to download through OpenAI's own client, on a model that is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from openai.types.chat import ChatCompletion
from serve.conftest import Served, jsonl, line, serving

from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.runner import run_next
from support.models import TinyPair


@pytest.fixture
def running(tmp_path: Path, tiny_pair: TinyPair) -> Iterator[Served]:
    values = {
        "verifier": str(tiny_pair.verifier),
        "proposer": str(tiny_pair.draft),
        "sampling": {"max_tokens": 6},
        "engine": {"dtype": "float32"},
    }
    with serving(tmp_path / "dir", {"small": ServedModel("small", values, tmp_path)}) as found:
        yield found


def run_until_idle(served: Served) -> None:
    """Take steps, and do jobs here, until no batch is open."""
    while served.store.open_batches():
        served.keeper.step_all()
        run_next(served.settings, served.store, served.service.client)


def test_a_batch_from_upload_to_download(running: Served) -> None:
    client = running.client()
    content = jsonl(
        line("a"),
        line("b", temperature=0.8, seed=7, n=2),
        line("bad", frequency_penalty=99),
        line("c", response_format={"type": "json_object"}, max_tokens=40),
    )
    file = client.files.create(file=("mine.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"night": "monday"},
    )  # fmt: skip
    assert batch.status == "validating"
    run_until_idle(running)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.model == "small"
    assert done.metadata == {"night": "monday"}
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    answers = [orjson.loads(one) for one in client.files.content(done.output_file_id).iter_lines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"]
    bodies = [ChatCompletion.model_validate(answer["response"]["body"]) for answer in answers]
    assert [len(body.choices) for body in bodies] == [1, 2, 1]
    assert {body.model for body in bodies} == {"small"}  # not its folder
    (refused,) = client.files.content(done.error_file_id).iter_lines()
    assert orjson.loads(refused)["custom_id"] == "bad"
    assert orjson.loads(refused)["error"]["code"] == "bad_parameter"
    own = done.to_dict()["specbatch"]
    assert own["rows_done"] == 4  # type: ignore[index]  # an extra field is an object
    assert own["cost_usd"] > 0  # type: ignore[index]  # the same
