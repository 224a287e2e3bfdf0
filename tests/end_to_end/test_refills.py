"""Refills over the broker: what may be asked, what is answered, and that it changes no output."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
import yaml
from pydantic import ValidationError

from specbatch.pipeline.engines.contract import Request, Wanted
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.stages.refill import MOST_OPEN, PATIENCE, PAUSE_SEC, Refills
from specbatch.schemas.messages import (
    HINT_EXPIRES_SEC,
    MAX_HINT_TOKENS,
    MAX_OUTPUT_TOKENS,
    HintMessage,
    RefillMessage,
)
from specbatch.schemas.records import SamplingParams, Stage
from specbatch.schemas.routing import queue_for
from specbatch.schemas.settings import Settings
from specbatch.workers.app import make_app
from specbatch.workers.guard import REFILL_TASK
from specbatch.workers.hints import QUEUE_EXPIRES_SEC, RefillChannel, hint_queue, send_hint
from support import demo
from support.workers import command, worker

JOB = "0123456789abcdef"
REPLY_TO = "hints." + "0" * 32
PATIENCE_SEC = 60.0
TRIES = 3


# --- what is asked --------------------------------------------------------------------------
class Line:
    """Keeps what is asked."""

    reply_to = REPLY_TO

    def __init__(self) -> None:
        self.sent: list[tuple[str, RefillMessage]] = []

    def ask(self, proposer: str, message: RefillMessage) -> None:
        self.sent.append((proposer, message))


class Bed:
    """A worker's refills, at a time that tests move, with a group of 100 rows of two samples."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.line = Line()
        self.refills = Refills(self.line, lambda: self.now)
        self.requests = [
            Request(f"{JOB}/{row}/{sample}", (1,), SamplingParams(), seed=0)
            for row in range(100)
            for sample in range(2)
        ]

    def want(self, row: int, sample: int = 0, output: tuple[int, ...] = (5, 6)) -> None:
        self.refills.want(Wanted(f"{JOB}/{row}/{sample}", output))

    def answer(self, row: int, sample: int = 0) -> str | None:
        return self.refills.answered(hint(row, sample))


def hint(row: int = 0, sample: int = 0, **values: Any) -> HintMessage:
    known = {"job_id": JOB, "row_index": row, "sample_index": sample}
    return HintMessage.model_validate(known | {"position": 2, "token_ids": [7, 8]} | values)


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    with bed.refills.allowed(3, "small", bed.requests):
        yield bed


def test_a_request_is_asked_for_by_where_the_store_has_its_prompt(bed: Bed) -> None:
    bed.want(17, 1, (4, 5, 6))
    [(proposer, message)] = bed.line.sent
    assert proposer == "small"
    assert message == RefillMessage(
        job_id=JOB,
        group_index=3,
        row_index=17,
        sample_index=1,
        output_ids=(4, 5, 6),
        reply_to=REPLY_TO,
    )
    assert bed.answer(17, 1) == f"{JOB}/17/1"


def test_nothing_is_asked_for_others_nor_for_outputs_that_are_too_long(bed: Bed) -> None:
    bed.refills.want(Wanted("another/0/0", ()))
    bed.want(500)
    bed.want(0, output=(1,) * (MAX_OUTPUT_TOKENS + 1))
    assert bed.line.sent == []
    bed.want(0, output=(1,) * MAX_OUTPUT_TOKENS)
    assert len(bed.line.sent) == 1


def test_an_answer_for_a_group_that_is_done_is_nobodys() -> None:
    bed = Bed()
    with bed.refills.allowed(3, "small", bed.requests):
        bed.want(0)
    assert bed.answer(0) is None
    bed.want(1)
    assert len(bed.line.sent) == 1


def test_an_attempt_that_ends_leaves_a_newer_one_of_the_same_group_alone(bed: Bed) -> None:
    """A lease that ran out: the same process holds it again before the first attempt has ended."""
    with ExitStack() as newer:
        with bed.refills.allowed(3, "small", bed.requests):
            newer.enter_context(bed.refills.allowed(3, "small", bed.requests))
            for row in range(MOST_OPEN):
                bed.want(row)
        bed.want(99)
        assert len(bed.line.sent) == MOST_OPEN, "what the newer one asked for is still open"
        assert bed.answer(0) == f"{JOB}/0/0"
    assert bed.answer(0) is None


def test_only_so_many_are_unanswered_at_a_time(bed: Bed) -> None:
    for row in range(MOST_OPEN + 10):
        bed.want(row)
    assert len(bed.line.sent) == MOST_OPEN
    bed.answer(0)
    bed.want(99)
    bed.want(98)
    assert len(bed.line.sent) == MOST_OPEN + 1
    bed.now += HINT_EXPIRES_SEC
    bed.want(98)
    assert len(bed.line.sent) == MOST_OPEN + 2


def test_a_proposer_that_never_answers_is_left_alone_for_a_while(bed: Bed) -> None:
    for _ in range(PATIENCE // MOST_OPEN):
        for row in range(MOST_OPEN):
            bed.want(row)
        bed.now += HINT_EXPIRES_SEC
    asked = len(bed.line.sent)
    assert asked == PATIENCE
    bed.want(0)
    bed.now += PAUSE_SEC - 1
    bed.want(0)
    assert len(bed.line.sent) == asked
    bed.now += 1
    bed.want(0)
    assert len(bed.line.sent) == asked + 1


# --- messages -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrong",
    [
        {"reply_to": "verify.0123456789ab"},
        {"reply_to": "hints." + "0" * 31},
        {"reply_to": REPLY_TO + "\n"},
        {"job_id": "../../etc"},
        {"row_index": -1},
        {"output_ids": [0] * (MAX_OUTPUT_TOKENS + 1)},
        {"output_ids": [-1]},
        {"path": "/etc/passwd"},
    ],
    ids=lambda values: ",".join(values),
)
def test_a_malformed_refill_message_is_refused(wrong: dict[str, Any]) -> None:
    good = {"job_id": JOB, "group_index": 0, "row_index": 0, "sample_index": 0}
    good |= {"output_ids": [1], "reply_to": REPLY_TO}
    RefillMessage.model_validate(good)
    with pytest.raises(ValidationError):
        RefillMessage.model_validate(good | wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"position": -1}, {"token_ids": []}, {"token_ids": [0] * (MAX_HINT_TOKENS + 1)}, {"x": 1}],
    ids=lambda values: ",".join(values),
)
def test_a_malformed_hint_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        hint(**wrong)


# --- brokers --------------------------------------------------------------------------------
@contextmanager
def line_over(broker_url: str) -> Iterator[tuple[Any, RefillChannel, list[HintMessage], Any]]:
    """(app, line, hints that came, the event of the next one)."""
    app = make_app(Settings(broker_url=broker_url, workspace="unused"))
    line, came, arrived = RefillChannel(app), [], threading.Event()

    def take(message: HintMessage) -> None:
        came.append(message)
        arrived.set()

    line.start(take)
    try:
        yield app, line, came, arrived
    finally:
        line.close()


def asked_of(app: Any, line: RefillChannel, message: RefillMessage) -> Any:
    """The message as its proposer finds it. A request may be lost with a connection, so it is made
    again, as a verifier would for its next sequence."""
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.amqp.queues[queue_for(Stage.PROPOSE, "small")])
        for _ in range(TRIES):
            line.ask("small", message)
            with suppress(queue.Empty):
                task = queue.get(timeout=PATIENCE_SEC / TRIES)
                task.ack()
                queue.close()
                return task
    raise AssertionError("no request arrived")


def assert_round_trip(broker_url: str) -> None:
    message = RefillMessage(
        job_id=JOB,
        group_index=0,
        row_index=4,
        sample_index=0,
        output_ids=(1, 2, 3),
        reply_to=REPLY_TO,
    )
    with line_over(broker_url) as (app, line, came, arrived):
        task = asked_of(app, line, message)
        assert task.headers["task"] == REFILL_TASK
        assert task.headers["expires"], "a proposer that is dead must find nothing to do later"
        assert RefillMessage.model_validate(task.payload[1]) == message
        with app.producer_or_acquire() as producer:  # what is no hint is passed over
            producer.publish(
                {"x": 1},
                serializer="json",
                exchange="",
                routing_key=line.reply_to,
                declare=[hint_queue(line.reply_to)],
            )
        send_hint(app, line.reply_to, hint(4))
        assert arrived.wait(PATIENCE_SEC)
        assert came == [hint(4)]


def test_refills_go_out_and_hints_come_in_over_a_broker_in_memory() -> None:
    assert_round_trip("memory://localhost/")


def test_refills_go_out_and_hints_come_in_over_redis(redis_url: str) -> None:
    assert_round_trip(redis_url)


def test_refills_go_out_and_hints_come_in_over_rabbitmq(rabbit_url: str) -> None:
    assert_round_trip(rabbit_url)


def test_a_hint_that_nobody_fetches_expires_on_redis(redis_url: str) -> None:
    app = make_app(Settings(broker_url=redis_url, workspace="unused"))
    send_hint(app, REPLY_TO, hint())
    client = redis.Redis.from_url(redis_url)
    assert client.llen(REPLY_TO) == 1
    assert 0 < client.pttl(REPLY_TO) <= 1000 * QUEUE_EXPIRES_SEC
    client.close()


# --- processes ------------------------------------------------------------------------------
BLOCK = 16
TOKENS = 400


def spec_of(folder: Path, name: str, depth: int | str) -> str:
    """A job of 6 demo prompts whose blocks are much shorter than their outputs."""
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, 6), folder / "prompts.parquet")
    spec = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": name},
        "verifier": str(demo.VERIFIER),
        "proposer": str(demo.DRAFT),
        "sampling": {"max_tokens": TOKENS, "ignore_eos": True},
        "speculation": {
            "depth": depth,
            "sources": ["block"],
            "pregenerate": True,
            "pregenerate_tokens": BLOCK,
        },
        "group_size": 3,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    return f"{name}.yaml"


def test_blocks_are_refilled_by_another_process_and_outputs_keep_their_bits(
    redis_url: str, tmp_path: Path
) -> None:
    alone = {"SPECBATCH_WORKSPACE": str(tmp_path / "alone")}
    command(
        *("submit-job", spec_of(tmp_path, "plain", "off"), "--local"),
        environment=alone,
        cwd=tmp_path,
    )
    environment = {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
    }
    models = {
        "propose": ("--proposer", str(demo.DRAFT)),
        "verify": ("--verifier", str(demo.VERIFIER)),
    }
    with ExitStack() as stack:
        workers = {
            kind: stack.enter_context(
                worker(kind, *models.get(kind, ()), environment=environment, cwd=tmp_path)
            )
            for kind in ("ingest", "propose", "verify", "record")
        }
        report = command(
            *("submit-job", spec_of(tmp_path, "out", 4), "--wait", "--timeout", "240"),
            environment=environment,
            cwd=tmp_path,
        )
        told = workers["verify"].end()
        workers["propose"].end()
    assert report["state"] == "done"
    expected, got = (read_output(str(tmp_path / name)) for name in ("plain", "out"))
    for column in ("id", "token_ids", "text", "finish_reason", "seed"):
        assert got[column].to_pylist() == expected[column].to_pylist()
    counts = re.search(r"refills: (\d+) asked for, (\d+) answered, (\d+) followed", told)
    assert counts, told[-3000:]
    asked, answered, followed = map(int, counts.groups())
    assert asked >= answered >= followed > 0
