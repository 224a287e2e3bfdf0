"""One trace of a job, whoever works on it: joined by its id from the files of all processes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from specbatch.jobs.chaos.stand_in_model import write_model
from specbatch.pipeline.observe.tracing.context import root_span_id_of, trace_id_of
from specbatch.pipeline.observe.tracing.span_names import ATTRIBUTES
from support.traces import ERROR, Told, read_traces
from support.workers import WorkerProcess, command, worker_of

ROWS, GROUP = 12, 4
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, redis_server: Any) -> dict[str, Any]:
    """A job of two worker processes: the answer of `submit-job`, their spans, and their logs."""
    home = tmp_path_factory.mktemp("traces")
    models = [str(write_model(home / name, name)) for name in ("verifier", "draft")]
    prompts = [f"def number_{i}(x):" for i in range(ROWS)]
    rows = [json.dumps({"id": f"row-{i}", "prompt": said}) for i, said in enumerate(prompts)]
    (home / "in.jsonl").write_text("\n".join(rows))
    (home / "spec.yaml").write_text(
        json.dumps(
            {
                "name": "traced",
                "input": {"uri": "in.jsonl"},
                "output": {"uri": "out"},
                "verifier": models[0],
                "proposer": models[1],
                "sampling": {"max_tokens": 24, "seed": 3},
                "speculation": {"pregenerate": True},
                "group_size": GROUP,
            }
        )
    )
    environment = {
        "SPECBATCH_BROKER_URL": redis_server.url_of(15),
        "SPECBATCH_WORKSPACE": str(home / "work"),
        "SPECBATCH_TRACE_GROUPS": "1",
        "SPECBATCH_TRACE_REQUESTS": "1",
        "SPECBATCH_LOG_FORMAT": "json",
    }
    files = {name: home / f"{name}.jsonl" for name in ("submitter", "others", "verifier")}

    def told_to(name: str) -> dict[str, str]:
        return environment | {"SPECBATCH_TRACES": f"file:{files[name]}"}

    workers: list[WorkerProcess] = []
    with (
        worker_of(
            *("ingest", "propose", "record"),
            models=models,
            environment=told_to("others"),
            cwd=home,
        ) as others,
        worker_of(
            "verify", models=(models[0], "none"), environment=told_to("verifier"), cwd=home
        ) as verifier,
    ):
        workers += [others, verifier]
        report = command(
            *("submit-job", "spec.yaml", "--wait"),
            environment=told_to("submitter") | {"TRACEPARENT": CALLER},
            cwd=home,
        )
        logs = [one.end() for one in workers]
    return {
        "job": report,
        "spans": {name: read_traces(path) for name, path in files.items()},
        "logs": logs,
        "prompts": prompts,
        "raw": "".join(path.read_text() for path in files.values()) + "".join(logs),
    }


def all_spans(seen: dict[str, Any]) -> list[Told]:
    return [span for spans in seen["spans"].values() for span in spans]


def test_one_trace_shows_the_request_crossing_all_four_stages(seen: dict[str, Any]) -> None:
    job_id = seen["job"]["job"]
    spans = all_spans(seen)
    assert {span.trace_id for span in spans} == {f"{trace_id_of(job_id):032x}"}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for row in range(ROWS):
        mine = [span for span in spans if span.request == f"{job_id}/{row}/0"]
        mine.sort(key=lambda span: (span.begun_ns, span.ended_ns))
        crossed = [by_id[span.parent_id] for span in mine]
        assert [span.name for span in crossed] == ["ingest", "propose", "verify", "record"]
        assert {span.attributes["specbatch.group.index"] for span in mine} == {row // GROUP}
        processes = [span.process["service.instance.id"] for span in mine]
        assert processes[0] == processes[1] == processes[3] != processes[2]
        for span in mine:
            parent = by_id[span.parent_id]
            assert parent.begun_ns - 5_000_000 <= span.begun_ns <= span.ended_ns


def test_attempts_lie_under_the_submission(seen: dict[str, Any]) -> None:
    job_id = seen["job"]["job"]
    (submit,) = [span for span in all_spans(seen) if span.name == "submit"]
    assert submit in seen["spans"]["submitter"]
    assert submit.span_id == f"{root_span_id_of(job_id):016x}"
    assert submit.parent_id == ""
    assert submit.links == (CALLER.split("-")[2],)
    assert submit.attributes["messaging.system"] == "redis"
    attempts = [s for s in all_spans(seen) if s.name not in ("submit", "request")]
    groups = ROWS // GROUP
    assert Counter(span.name for span in attempts) == {
        "ingest": 1,
        "propose": groups,
        "verify": groups,
        "record": groups,
        "publish": 1,
    }
    for span in attempts:
        assert span.parent_id == submit.span_id
        assert span.status != ERROR
        assert span.attributes["specbatch.outcome"] == "kept"
        assert span.attributes["specbatch.attempt"] == 1
        assert span.attributes["specbatch.worker"] == span.process["service.instance.id"]
        if span.name in ("propose", "verify", "record"):
            assert span.attributes["specbatch.queue_sec"] >= 0
    assert {span.name for span in seen["spans"]["verifier"]} == {"verify", "request"}


def test_tokens_of_spans_are_those_of_the_job(seen: dict[str, Any]) -> None:
    verified = [span for span in all_spans(seen) if span.name == "verify"]
    told = sum(span.attributes["gen_ai.usage.output_tokens"] for span in verified)
    assert told == seen["job"]["tokens"]
    by_id = {span.span_id: span for span in verified}
    requests = [s for s in all_spans(seen) if s.request and s.parent_id in by_id]
    assert sum(s.attributes["gen_ai.usage.output_tokens"] for s in requests) == told
    assert all(s.attributes["gen_ai.response.finish_reasons"] for s in requests)


def test_attributes_have_listed_names_and_no_text(seen: dict[str, Any]) -> None:
    for span in all_spans(seen):
        assert set(span.attributes) <= set(ATTRIBUTES)
    for prompt in seen["prompts"]:
        assert prompt not in seen["raw"]
    assert "row-" not in seen["raw"]


def test_logs_are_json_with_the_same_ids(seen: dict[str, Any]) -> None:
    job_id = seen["job"]["job"]
    spans = {span.span_id for span in all_spans(seen)}
    for log in seen["logs"]:
        lines = [json.loads(line) for line in log.splitlines()]
        assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
        ours = [line for line in lines if line.get("job") == job_id]
        claimed = [line for line in ours if "generation" in line]
        assert claimed
        assert {line["trace_id"] for line in ours} == {f"{trace_id_of(job_id):032x}"}
        assert {line["span_id"] for line in claimed} <= spans
        assert all({"stage", "worker", "attempt"} <= set(line) for line in claimed)
