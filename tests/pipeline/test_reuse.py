"""What may be copied: which requests are the same, what is offered, and what a report counts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import pytest
from ledger.builders import JOB, completion, new_job

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.stages.reuse import (
    Reuse,
    known_answers,
    may_reuse,
    offer_answers,
    request_digest,
    reuse_report,
)
from specbatch.pipeline.storage.artefacts import (
    ReuseNotes,
    read_results,
    write_results,
)
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import Answered, FinishReason, JobRow, Origin, SamplingParams
from specbatch.schemas.spec import load_spec
from support.databases import new_database

PARAMS = SamplingParams(max_tokens=3, temperature=0.5)
SPEC = load_spec(
    {
        "input": {"uri": "/in"},
        "output": {"uri": "/out"},
        "verifier": "/big",
        "reuse_outputs": True,
        "reuse_check": 0.0,
    }
)
OTHER: dict[str, Any] = {
    "max_tokens": 4,
    "min_tokens": 1,
    "temperature": 0.25,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "stop_token_ids": (9,),
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": ((5, 1.0),),
    "bad_token_ids": (7,),
    "bad_words": ((1, 2),),
    "stop": ("x",),
    "response_format": '{"type":"json_object"}',
    "tools": "[]",
    "tool_choice": '"none"',
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture
def job() -> JobRow:
    store = SqlStore(new_database())
    try:
        made, _ = store.create_job(new_job(JOB))
    finally:
        store.close()
    return replace(made, numeric_class="exact/f32/1", model_fingerprint="9" * 32)


def request(row: int, **values: Any) -> Request:
    given = {"prompt_ids": (1, 2), "params": PARAMS, "seed": 5} | values
    return Request(f"{JOB}/{row}/0", **given)


def computed(row: int, **values: Any) -> Completion:
    given: dict[str, Any] = {
        **{"token_ids": (7, 8, 9), "origins": (0, 0, 0), "logprobs": (-0.5, -0.25, -2.0)},
        **{"finish_reason": FinishReason.LENGTH, "proposed": 0, "accepted": 0},
        **{"verifier_passes": 3, "compute_sec": 0.1, "decode_sec": 0.0, "baseline_sec": 0.0},
        **{"proposed_at_depth": (), "accepted_at_depth": ()},
    }
    return Completion(f"{JOB}/{row}/0", **given | values)


def test_whatever_an_output_depends_on_makes_another_request(job: JobRow) -> None:
    assert OTHER.keys() == {field.name for field in fields(SamplingParams)}
    one = request_digest(job, request(0))
    assert one == request_digest(job, request(1)), "a row's number says nothing"
    others = [request(0, params=replace(PARAMS, **{name: v})) for name, v in OTHER.items()]
    others += [request(0, prompt_ids=(1, 3)), request(0, seed=6)]
    found = {request_digest(job, other) for other in others}
    found |= {request_digest(replace(job, numeric_class="exact/bf16/1"), request(0))}
    found |= {request_digest(replace(job, model_fingerprint="8" * 32), request(0))}
    assert len(found) == len(others) + 2
    assert one not in found


def test_the_seed_of_a_greedy_request_says_nothing(job: JobRow) -> None:
    greedy = replace(PARAMS, temperature=0.0)
    of_seeds = {request_digest(job, request(0, params=greedy, seed=seed)) for seed in range(9)}
    assert len(of_seeds) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"numeric_class": None},
        {"numeric_class": UNKNOWN},
        {"model_fingerprint": UNKNOWN},
        {"privacy": PrivacyMode.REDACTED},
    ],
    ids=str,
)
def test_nothing_is_copied_where_something_is_not_known_or_not_kept(
    job: JobRow, change: dict[str, Any]
) -> None:
    assert may_reuse(job, SPEC)
    assert not may_reuse(replace(job, **change), SPEC)
    assert not may_reuse(job, SPEC.model_copy(update={"reuse_outputs": False}))


class Knows(SqlStore):
    """A store with one answer, which keeps what it is offered."""

    def __init__(self, answers: dict[bytes, Answered]) -> None:
        super().__init__(new_database())
        self.answers, self.offered = answers, dict[bytes, tuple[int, int]]()

    def answered(self, *_: object) -> dict[bytes, Answered]:  # type: ignore[override]  # of one tenant
        return self.answers

    def offer_answers(self, _job_id: str, requests: Any) -> None:  # type: ignore[override]  # the same
        self.offered |= requests


def group(job: JobRow, answers: dict[bytes, Answered] | None = None) -> tuple[Knows, Reuse]:
    """Rows 0 and 1 are the same request, rows 2 to 4 others."""
    asked = [request(0), request(1), *(request(row, seed=100 + row) for row in (2, 3, 4))]
    store = Knows(answers or {})
    return store, known_answers(store, job, SPEC, [[one] for one in asked])


def test_a_repeat_is_a_copy_of_the_first_and_an_error_is_nobody_s(job: JobRow) -> None:
    store, reuse = group(job)
    store.close()
    assert reuse.repeats == {f"{JOB}/1/0": f"{JOB}/0/0"}
    copy = reuse.with_copies([computed(0)])[-1]
    assert (copy.reused_from, copy.request_id) == (f"{JOB}/0/0", f"{JOB}/1/0")
    assert (copy.origins, copy.verifier_passes) == ((Origin.PLAIN,) * 3, 0)
    wrong = computed(0, finish_reason=FinishReason.ERROR, error="no room", token_ids=())
    copy = reuse.with_copies([wrong])[-1]
    assert (copy.reused_from, copy.error) == (None, "no room")
    assert reuse.with_copies([]) == []


def test_what_had_no_room_to_go_on_and_what_failed_is_not_offered(job: JobRow) -> None:
    store, reuse = group(job)
    done = [
        computed(0),
        computed(2, token_ids=(7, 8), logprobs=(-0.5, -0.5)),  # another worker may have room
        computed(3, finish_reason=FinishReason.ERROR, error="no room"),
        computed(4, finish_reason=FinishReason.STOP, token_ids=(7,)),
    ]
    done = reuse.with_copies(done)
    records = [completion(int(c.request_id.split("/")[1]), reused_from=None) for c in done]
    notes = reuse.notes(done, records)
    assert set(notes.answers) == {"0/0", "4/0"}
    malformed = [replace(r, error="cut" if r.row_index == 4 else None) for r in records]
    offer_answers(store, job, notes, malformed)
    assert set(store.offered.values()) == {(0, 0)}
    store.close()


def test_halves_of_a_group_report_what_the_whole_does(job: JobRow) -> None:
    source = Answered("before", completion(9, cost_usd=0.5, reused_from=None))
    digest = request_digest(job, request(0))
    store, reuse = group(job, {digest: source})
    store.close()
    done = reuse.with_copies(computed(row) for row in (2, 3, 4))
    records = [completion(int(c.request_id.split("/")[1]), reused_from=c.reused_from) for c in done]
    notes = read_results(write_results(records, {}, reuse.notes(done, records))).reuse
    assert notes == reuse.notes(done, records)
    whole = reuse_report(notes, records)
    assert whole == {"reused": 2.0, "reused_tokens": 6.0, "reuse_saved_usd": 1.0}
    halves = [
        reuse_report(notes, [r for r in records if (r.row_index < 1) is low])
        for low in (True, False)
    ]
    assert {name: sum(half.get(name, 0.0) for half in halves) for name in whole} == whole


def test_what_was_measured_counts_once_where_halves_share_the_file() -> None:
    data = write_results([completion(5), completion(3), completion(4)], {"taken": 1.5})
    halves = [read_results(data).measured(rows) for rows in ({3, 4}, {5}, {9})]
    assert halves == [{}, {"taken": 1.5}, {}]
    assert read_results(data).measured({3, 4, 5}) == {"taken": 1.5}
    assert read_results(write_results([completion(1)])).measured({1}) == {}
    assert read_results(write_results([], {"taken": 1.5})).measured({1}) == {}


def test_results_without_copies_are_as_earlier_versions_read_them() -> None:
    copied, other = completion(0), completion(1, reused_from=None)
    for records, has_column in (([other], False), ([copied, other], True)):
        data = write_results([replace(r, receipt=None) for r in records])
        with pa.ipc.open_file(data) as file:
            assert ("reused_from" in file.schema.names) is has_column
        assert [r.reused_from for r in read_results(data).records] == [
            r.reused_from for r in records
        ]
    assert read_results(data).reuse == ReuseNotes()
