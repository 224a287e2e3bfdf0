"""Messages that were not sent by us are refused; whatever is in them, nothing else happens."""

from __future__ import annotations

import json
import pickle
import zlib
from typing import Any

import pytest
from celery import Celery
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.message import Message

from specbatch.schemas.messages import (
    MAX_OUTPUT_TOKENS,
    MAX_REFILL_BYTES,
    MAX_WORK_BYTES,
    RefillMessage,
    WorkMessage,
)
from specbatch.schemas.records import Stage
from specbatch.workers.guard import REFILL_TASK, WORK_TASK, RefusedMessageError, check

WORK = {"job_id": "0123456789abcdef", "stage": "verify", "group_index": 3}
FOLLOWS: dict[str, Any] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def headers(task: str = WORK_TASK, **values: Any) -> dict[str, Any]:
    """As Celery makes them."""
    made = Celery("any", set_as_current=False).amqp.as_task_v2("an-id", task, (), {}).headers
    return {**made, **values}


def message(
    fields: Any = WORK,
    *,
    arguments: Any = (),
    follows: Any = FOLLOWS,
    body: bytes | str | None = None,
    content_type: str = "application/json",
    **head: Any,
) -> Message:
    if body is None:
        body = json.dumps([arguments, fields, follows])
    return Message(
        body=body,
        content_type=content_type,
        content_encoding="utf-8",
        headers=headers(**head),
        accept={"application/json"},
    )


def refusal(one: Message) -> str:
    with pytest.raises(RefusedMessageError) as caught:
        check(one)
    return str(caught.value)


def test_what_we_send_is_taken() -> None:
    check(message())
    check(message({**WORK, "stage": "ingest", "group_index": None}))
    check(message(expires="2026-01-01T00:00:00"))


def test_the_largest_messages_of_ours_are_taken() -> None:
    most = WorkMessage(job_id="z" * 40, stage=Stage.PUBLISH, group_index=2**31 - 1)
    check(message(most.model_dump(mode="json")))
    refill = RefillMessage(
        job_id="z" * 40,
        group_index=2**31 - 1,
        row_index=2**63 - 1,
        sample_index=2**31 - 1,
        output_ids=(2**31 - 1,) * MAX_OUTPUT_TOKENS,
        reply_to=f"hints.{'0' * 32}",
    )
    check(message(refill.model_dump(mode="json"), task=REFILL_TASK))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (message(task="celery.backend_cleanup"), "names no task of this program"),
        (message(task="specbatch.work2"), "names no task of this program"),
        (message({**WORK, "path": "/etc/passwd"}), "wrong fields: path"),
        (message({**WORK, "stage": "shell"}), "wrong fields: stage"),
        (message({**WORK, "job_id": "../../etc"}), "wrong fields: job_id"),
        (message({**WORK, "group_index": -1}), "wrong fields: group_index"),
        (message({}), "wrong fields: job_id, stage"),
        (message(WORK, task=REFILL_TASK), "wrong fields:"),
        (message(arguments=["x"]), "it has positional arguments"),
        (message([1]), "it has positional arguments"),
        (message(follows={**FOLLOWS, "chain": [{"task": "x"}]}), "a chain, group or chord"),
        (message(follows={**FOLLOWS, "callbacks": [{"task": "x"}]}), "a chain, group or chord"),
        (message(follows={"other": None}), "a chain, group or chord"),
        (message(eta="2999-01-01T00:00:00"), "its header `eta` is set"),
        (message(retries=3), "its header `retries` is set"),
        (message(timelimit=[1, None]), "its header `timelimit` is set"),
        (message(id={"a": 1}), "its header `id` is not a short text"),
        (message(argsrepr="x" * 10_000), "its header `argsrepr` is not a short text"),
        (message(compression="application/x-gzip"), "it is compressed"),
        (message(body=b"\xff\xfe"), "it cannot be read"),
        (message(body=b"{"), "it cannot be read"),
        (message(body=b"[" * 1500), "it cannot be read"),
        (message(body=b"5"), "not Celery's [args, kwargs, embed]"),
        (message(body=pickle.dumps(WORK), content_type="application/x-python-serialize"),
         "it cannot be read (ContentDisallowed)"),
        (message(body=b"x", content_type="application/data"), "not Celery's"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(one: Message, reason: str) -> None:
    assert reason in refusal(one)


@pytest.mark.parametrize(
    ("task", "most"), [(WORK_TASK, MAX_WORK_BYTES), (REFILL_TASK, MAX_REFILL_BYTES)]
)
def test_a_large_body_is_refused_before_anybody_parses_it(
    task: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(_: Message) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(Message, "decode", parse)
    large = message(body=b" " * (most + 1), task=task)
    assert refusal(large) == f"it has {most + 1} bytes, where {most} are the most"


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kombu unpacks before anybody sees a message, unless it is told not to."""
    from kombu import compression

    from specbatch.workers.consumer import refuse_compression

    monkeypatch.setattr(compression, "_decoders", dict(compression._decoders))
    refuse_compression()
    packed = zlib.compress(b"0" * (64 << 20))
    one = message(body=packed, compression="application/x-gzip")
    assert one.body == packed
    assert refusal(one) == "it is compressed"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "job_id": JSON | st.from_regex(r"[0-9a-z]{8,40}", fullmatch=True),
        "stage": JSON | st.sampled_from([stage.value for stage in Stage]),
        "group_index": JSON | st.integers(),
        "row_index": JSON,
        "reply_to": JSON,
        "__class__": JSON,
    },
)


@given(
    fields=FIELDS | JSON,
    arguments=JSON,
    follows=JSON | st.just(FOLLOWS),
    head=st.dictionaries(
        st.sampled_from(["task", "eta", "id", "retries", "timelimit", "compression", "stamps"]),
        JSON | st.just(WORK_TASK),
        max_size=2,
    ),
)
@example(fields=WORK, arguments=[], follows=FOLLOWS, head={})
def test_a_message_is_refused_or_means_exactly_one_unit(
    fields: Any, arguments: Any, follows: Any, head: dict[str, Any]
) -> None:
    one = Message(
        body=json.dumps([arguments, fields, follows]),
        content_type="application/json",
        content_encoding="utf-8",
        headers={**headers(), **{k: v for k, v in head.items() if k != "compression"}},
        accept={"application/json"},
    )
    one.headers.update(head)
    try:
        check(one)
    except RefusedMessageError:
        return
    assert not arguments
    assert not any((follows or {}).values())
    WorkMessage.model_validate(fields)


@given(body=st.binary(max_size=200), head=JSON, content_type=st.text(max_size=30))
def test_no_bytes_do_more_than_be_refused(body: bytes, head: Any, content_type: str) -> None:
    one = Message(body=body, content_type=content_type, content_encoding="utf-8", accept=set())
    one.headers = head
    with pytest.raises(RefusedMessageError):
        check(one)
