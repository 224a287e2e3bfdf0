"""Whole jobs whose outputs end without the form that they were asked for: what is continued is what
a larger limit would have written at once, what is sampled again is the same every time, and what
stays malformed is where the job wants it. All of it is paid for, and can be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, Done, Night
from end_to_end.test_reuse import is_intact

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.given import Given
from specbatch.pipeline.operations.report import gather
from specbatch.pipeline.operations.tools import make_replays
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.outputs.token_table import token_table
from specbatch.pipeline.policy.costs.balance import job_sheet
from specbatch.pipeline.stages.mending import Mending
from specbatch.schemas.errors import EngineError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import CompletionRecord, JobState, Origin
from specbatch.schemas.seeds import retry_seed
from support.planted import KEY

LETTERS = {"type": "regex", "regex": "[a-z]{30}"}
SHORT: dict[str, Any] = {"ignore_eos": False, "response_format": LETTERS, "max_tokens": 5}
WHOLE = {**SHORT, "max_tokens": 64}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}
CONTINUE = {"malformed": {"max_tokens": 64}}
RETRY = {"malformed": {"retries": 2}}
# Every output without its form has met the stop string.
STOPPED: dict[str, Any] = {
    **WHOLE,
    **SAMPLED,
    "response_format": {"type": "regex", "regex": "[a-z]{6}"},
    "stop": ["e"],
    "top_logprobs": 2,
}


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    night = Night(tmp_path)
    yield night
    night.store.close()


def counts(done: Done) -> dict[str, int]:
    return {
        name.removeprefix("malformed_"): int(value)
        for name, value in done.job.report.items()
        if name.startswith("malformed_")
    }


def seeds_of(done: Done) -> list[int]:
    return [c.seed for c in done.completions]


def check_books(night: Night, done: Done) -> None:
    """Nothing is lost, each row pays for what it had, and what is kept of passes fits together."""
    times, rows = night.store.job_times(done.job.job_id), night.store.row_times(done.job.job_id)
    sheet = job_sheet(times, rows, is_final=True)
    assert sheet.of(TimeKind.LOST).ticks == 0
    assert sheet.total.ticks == sum(c.ticks.total for c in done.completions) > 0
    spent = sum(c.cost_usd for c in done.completions)
    assert night.store.progress(done.job.job_id).cost_usd == pytest.approx(spent)
    token_table(done.completions)  # it refuses what contradicts itself
    for one in done.completions:
        found = one.provenance
        assert one.verifier_passes == len(found.steps) == len(found.pass_ticks)
        assert one.proposed == sum(found.drafted)
        assert {*found.makers} == {*range(len(found.sources))}
        assert one.compute_sec == pytest.approx(one.ticks.total / 1e7)


def in_folder(done: Done) -> Path:
    return Path(done.job.output_uri.removeprefix("file://"))


def published(done: Done) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_output(done.job.output_uri).to_pylist()
    return rows


# --- continue ------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", ["off", 4])
def test_what_is_continued_is_what_more_tokens_would_have_written_at_once(
    night: Night, sampling: dict[str, Any], depth: Any
) -> None:
    with night.worker():
        cut = night.run(sampling=SHORT | sampling, depth=depth, ends=JobState.PARTIAL)
        at_once = night.run(sampling=WHOLE | sampling, depth="off")
        done = night.run(sampling=SHORT | sampling, depth=depth, output=CONTINUE)
    malformed = sum(c.is_malformed for c in cut.completions)
    assert malformed > ROWS / 2
    assert counts(cut) == {}
    assert done.outputs == at_once.outputs
    assert counts(done) == {"continued": malformed, "mended": malformed}
    assert night.store.progress(done.job.job_id).rows_failed == 0
    assert seeds_of(done) == seeds_of(cut)
    check_books(night, done)
    assert is_intact(night, done)
    again = make_replays(night.settings, night.store, done.job).again(0, 0)
    assert again.differing == []


def test_no_draft_reaches_to_the_limit_so_that_passes_can_follow(night: Night) -> None:
    """Passes end where their origins say, whatever was in flight."""
    with night.worker():
        for limit in (4, 6):
            short = {**SHORT, "max_tokens": limit}
            first = night.run(sampling=short, depth=4, ends=JobState.PARTIAL)
            assert all(
                c.origins[-1] != Origin.ACCEPTED for c in first.completions if c.is_malformed
            )
            done = night.run(sampling=short, depth=4, output=CONTINUE)
            check_books(night, done)


def test_what_is_still_cut_keeps_all_that_was_written(night: Night) -> None:
    with night.worker(draft=None):
        at_once = night.run(sampling={**SHORT, "max_tokens": 9}, ends=JobState.PARTIAL)
        done = night.run(
            sampling=SHORT, output={"malformed": {"max_tokens": 9}}, ends=JobState.PARTIAL
        )
    assert done.outputs == at_once.outputs
    assert counts(done)["continued"] >= counts(done).get("mended", 0)
    assert max(len(c.token_ids) for c in done.completions) == 9
    assert is_intact(night, done)


def test_a_stop_string_is_found_across_the_place_where_it_was_cut(night: Night) -> None:
    with night.worker(draft=None):
        texts = [c.text for c in night.run(sampling=WHOLE).completions]
        cut = night.run(sampling=SHORT, ends=JobState.PARTIAL)
        at = [len(c.text) for c in cut.completions]
        stop = texts[0][at[0] - 1 : at[0] + 1]  # begins before the cut, ends behind it
        stops = {"stop": [stop]}
        at_once = night.run(sampling={**WHOLE, **stops}, ends=JobState.PARTIAL)
        done = night.run(sampling={**SHORT, **stops}, output=CONTINUE, ends=JobState.PARTIAL)
    assert done.outputs == at_once.outputs
    assert done.completions[0].finish_reason.value == "stop"
    assert len(done.completions[0].text) < len(texts[0])


def test_each_row_and_sample_by_its_own_limit_and_form(night: Night) -> None:
    """Rows bring their own sampling: a free text, a limit above the job's, and tools."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": "now",
                "parameters": {
                    "type": "object",
                    "properties": {"zone": {"enum": ["utc", "local"]}},
                    "required": ["zone"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    own: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}},
        {"max_tokens": 80},
        {
            "response_format": {"type": "text"},
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        {"n": 3, "temperature": 1.0},
    ]
    rows = [{"id": f"r{i}", "prompt": "One day", "own": json.dumps(o)} for i, o in enumerate(own)]
    path = night.folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    more = {"input": {"uri": str(path), "sampling_column": "own"}}
    with night.worker():
        at_once = night.run(sampling={**SHORT, "max_tokens": 200}, more=more)
        done = night.run(sampling=SHORT, more=more, output={"malformed": {"max_tokens": 200}})
    assert [c.error for c in at_once.completions] == [None] * 6
    assert done.outputs[1:] == at_once.outputs[1:]
    free = done.completions[0]
    assert (len(free.token_ids), free.error) == (5, None), "it has no form, so it is not malformed"
    assert done.completions[2].finish_reason.value == "tool_calls"
    assert is_intact(night, done)


# --- retry ---------------------------------------------------------------------------------------
def test_what_is_sampled_again_is_the_same_every_time_and_replays(night: Night) -> None:
    with night.worker():
        first = night.run(sampling=STOPPED, ends=JobState.PARTIAL)
        done = night.run(sampling=STOPPED, output=RETRY, ends=None)
    with night.worker(draft=None):
        again = night.run(sampling=STOPPED, output=RETRY, depth="off", ends=None)
    assert done.outputs == again.outputs
    assert seeds_of(done) == seeds_of(again)
    assert counts(done) == counts(again)
    mended = 0
    for before, after in zip(first.completions, done.completions, strict=True):
        if not before.is_malformed:
            assert after.token_ids == before.token_ids
            assert after.seed == before.seed
        elif after.is_malformed:  # nothing helped: it is what it was
            assert (after.token_ids, after.seed) == (before.token_ids, before.seed)
            assert after.ticks.overhead > 0
        else:
            mended += 1
            assert after.seed in [retry_seed(before.seed, k) for k in (1, 2)]
            assert "e" not in after.text
    assert mended == counts(done)["mended"] > 0
    assert counts(done)["retried"] == sum(c.is_malformed for c in first.completions)
    assert "continued" not in counts(done)
    assert [row["seed"] for row in published(done)] == seeds_of(done)
    check_books(night, done)
    assert is_intact(night, done)
    shown = page(gather(night.store, night.settings, done.job.job_id, samples=2, made_at=2e9))
    assert "Outputs mended" in shown
    replays = make_replays(night.settings, night.store, done.job)
    for one in done.completions:
        assert replays.again(one.row_index, 0).differing == []


def test_the_output_of_a_retry_is_that_of_its_seed(night: Night) -> None:
    """So a row can be asked for again with the seed that its output names."""
    with night.worker(draft=None):
        done = night.run(sampling=STOPPED, output=RETRY, ends=None)
        by_prompt = _with_seeds(night, done.completions)
        same = night.run(sampling=STOPPED, more=by_prompt, ends=None)
    assert same.outputs == done.outputs


def _with_seeds(night: Night, completions: list[CompletionRecord]) -> dict[str, Any]:
    prompts = pq.read_table(night.folder / "prompts.parquet")
    seeds = pa.array([c.seed for c in completions], pa.int64())
    path = night.folder / "seeded.parquet"
    pq.write_table(prompts.append_column("own_seed", seeds), path)
    return {"input": {"uri": str(path), "seed_column": "own_seed"}}


def test_greedy_rows_are_not_sampled_again(night: Night) -> None:
    with night.worker(draft=None):
        plain = night.run(sampling=SHORT, ends=JobState.PARTIAL)
        done = night.run(sampling=SHORT, output=RETRY, ends=JobState.PARTIAL)
    assert counts(done) == {}
    passes = [sum(c.verifier_passes for c in one.completions) for one in (plain, done)]
    assert passes[0] == passes[1]
    check_books(night, done)


def test_a_retry_has_the_longer_limit(night: Night) -> None:
    of = {"malformed": {"max_tokens": 64, "retries": 2}}
    short = {**STOPPED, "max_tokens": 2}
    with night.worker():
        at_once = night.run(sampling=STOPPED, output=RETRY, ends=None)
        done = night.run(sampling=short, output=of, ends=None)
    assert done.outputs == at_once.outputs
    assert seeds_of(done) == seeds_of(at_once)
    assert counts(done)["continued"] > 0
    check_books(night, done)
    assert is_intact(night, done)


# --- quarantine ----------------------------------------------------------------------------------
def test_a_malformed_text_lies_beside_the_data_and_not_in_it(night: Night) -> None:
    of = {"malformed": {"then": "quarantine"}}
    with night.worker(draft=None):
        kept = night.run(sampling=STOPPED, ends=JobState.PARTIAL)
        done = night.run(sampling=STOPPED, output=of, ends=JobState.PARTIAL)
    malformed = {c.row_index: c for c in kept.completions if c.is_malformed}
    assert 0 < len(malformed) < ROWS
    rows = published(done)
    assert len(rows) == ROWS, "every input row is in the output"
    for row, before in zip(rows, published(kept), strict=True):
        if row["row_index"] not in malformed:
            same = ("text", "token_ids", "finish_reason", "error", "logprobs")
            assert [row[name] for name in same] == [before[name] for name in same]
            continue
        assert (row["finish_reason"], row["text"], row["token_ids"]) == ("error", None, None)
        assert row["error"] == f"malformed_output: {before['error']}"
        assert row["logprobs"] is None
        assert row["cost_usd"] > 0
    lines = [
        orjson.loads(x)
        for x in (in_folder(done) / "malformed.jsonl").read_bytes().split(b"\n")
        if x
    ]
    assert {line["row_index"]: line["text"] for line in lines} == {
        row: one.text for row, one in malformed.items()
    }
    assert [tuple(line["token_ids"]) for line in lines] == [c.token_ids for c in malformed.values()]
    assert all("response format" in line["reason"] for line in lines)
    assert {line["id"] for line in lines} == {c.row_id for c in malformed.values()}
    manifest = read_manifest(done.job.output_uri)
    assert [(f.name, f.rows) for f in manifest.quarantine] == [("malformed.jsonl", len(malformed))]
    assert read_manifest(kept.job.output_uri).quarantine == ()
    assert b"quarantine" not in (in_folder(kept) / "manifest.json").read_bytes()
    assert counts(done) == {"quarantined": len(malformed)}
    progress = night.store.progress(done.job.job_id)
    assert progress.rows_failed == len(malformed), "a quarantined row has failed"
    assert done.outputs == kept.outputs, "the store has all of it"
    assert is_intact(night, done)


def test_only_what_would_be_published_is_quarantined(night: Night) -> None:
    of = {"malformed": {"then": "quarantine"}}
    with night.worker(draft=None):
        done = night.run(sampling={**STOPPED, "n": 8}, keep_best=1, output=of)
    assert any(c.is_malformed for c in done.completions)
    assert counts(done) == {}
    assert not (in_folder(done) / "malformed.jsonl").exists()


# --- beside other features -----------------------------------------------------------------------
def test_a_mended_answer_is_offered_for_what_it_answers_alone(night: Night) -> None:
    reuse = {"reuse_outputs": True, "reuse_check": 0.0}
    with night.worker(draft=None):
        first = night.run(sampling=SHORT, output=CONTINUE, more=reuse)
        short = night.run(sampling=SHORT, more=reuse, ends=JobState.PARTIAL)
        long = night.run(sampling=WHOLE, more=reuse)
        again = night.run(sampling=SHORT, output=CONTINUE, more=reuse)
        expected = night.run(sampling=SHORT, ends=JobState.PARTIAL)
    assert short.outputs == expected.outputs
    assert [c.reused_from is None for c in short.completions] == [
        c.is_malformed for c in short.completions
    ]
    mended = [len(c.token_ids) > SHORT["max_tokens"] for c in first.completions]
    assert any(mended)
    assert [c.reused_from is not None for c in long.completions] == mended
    assert long.outputs == first.outputs == again.outputs
    assert is_intact(night, long)
    assert is_intact(night, again)


def test_a_retry_is_copied_to_the_same_request_of_its_group(night: Night) -> None:
    prompts = pq.read_table(night.folder / "prompts.parquet")
    twice = pa.concat_tables([prompts, prompts])
    seeds = pa.array([i % ROWS for i in range(2 * ROWS)], pa.int64())
    ids = pa.array([f"row-{i}" for i in range(2 * ROWS)])
    place = twice.column_names.index("id")
    path = night.folder / "twice.parquet"
    pq.write_table(twice.set_column(place, "id", ids).append_column("own_seed", seeds), path)
    more = {
        "input": {"uri": str(path), "seed_column": "own_seed"},
        "reuse_outputs": True,
        "reuse_check": 0.0,
    }
    with night.worker(draft=None):
        done = night.run(sampling=STOPPED, output=RETRY, more=more, ends=None)
    one, other = done.completions[:ROWS], done.completions[ROWS:]
    assert [c.token_ids for c in one] == [c.token_ids for c in other]
    assert [c.seed for c in one] == [c.seed for c in other] != list(range(ROWS))
    assert all(c.reused_from for c in other if not c.is_malformed)
    assert is_intact(night, done)


def test_policies_judge_what_was_mended(night: Night) -> None:
    long = {"use": "patterns", "patterns": {"long": "^[a-z]{30}$"}}
    with night.worker(draft=None):
        done = night.run(sampling=SHORT, output=CONTINUE, more={"policies": [long]})
    assert {row["finish_reason"] for row in published(done)} == {"blocked"}


def test_a_cancel_while_outputs_are_mended_keeps_those_that_are_finished(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    course, cancelled = Mending.course, []
    with night.worker(draft=None) as worker:
        plain = night.run(sampling=STOPPED, ends=JobState.PARTIAL)

        def cancelling(self: Mending, *args: Any) -> Any:
            if not cancelled:
                cancelled.append(self.job.job_id)
                assert night._client is not None
                night._client.cancel(self.job.job_id, "cancelled by a test")
                worker.lease_keeper.check_cancelled()
            return course(self, *args)

        monkeypatch.setattr(Mending, "course", cancelling)
        of = {"malformed": {"retries": 3}}
        done = night.run(sampling=STOPPED, output=of, ends=JobState.CANCELLED)
    rows = published(done)
    assert [row["finish_reason"] == "cancelled" for row in rows] == [
        c.is_malformed for c in plain.completions
    ]
    assert [r["text"] for r in rows if r["finish_reason"] != "cancelled"] == [
        c.text for c in plain.completions if not c.is_malformed
    ]
    assert read_manifest(done.job.output_uri).remainder[0].rows == sum(
        c.is_malformed for c in plain.completions
    )
    assert counts(done) == {}


def test_an_attempt_that_fails_while_outputs_are_mended_is_repeated_with_the_same_bits(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    course, failed = Mending.course, []
    of = {"malformed": {"max_tokens": 64, "retries": 2}}
    short = {**STOPPED, "max_tokens": 2}
    with night.worker(draft=None):
        plain = night.run(sampling=short, output=of, ends=None)

        def failing(self: Mending, request: Request, first: Completion) -> Any:
            found = course(self, request, first)
            answer = yield next(found)
            if len(failed) < 2:  # what was asked for has been computed
                failed.append(answer.request_id)
                raise EngineError("the engine failed, by a test")
            while True:
                try:
                    answer = yield found.send(answer)
                except StopIteration as end:
                    return end.value

        monkeypatch.setattr(Mending, "course", failing)
        done = night.run(sampling=short, output=of, ends=None)
    assert len(failed) == 2
    assert done.outputs == plain.outputs
    assert seeds_of(done) == seeds_of(plain)
    assert counts(done) == counts(plain)
    times, rows = night.store.job_times(done.job.job_id), night.store.row_times(done.job.job_id)
    sheet = job_sheet(times, rows, is_final=True)
    assert sheet.of(TimeKind.LOST).ticks > 0, "what the failed attempts had"
    assert is_intact(night, done)


def test_texts_that_are_kept_nowhere_are_whole_in_the_quarantine_of_the_output(
    tmp_path: Path,
) -> None:
    modes = {"clinic": PrivacyMode.HASH_ONLY}
    night = Night(tmp_path / "private", tenant_privacy=modes, encryption_key=KEY)
    of = {"malformed": {"max_tokens": 64, "retries": 1, "then": "quarantine"}}
    short = {**STOPPED, "max_tokens": 2}
    with night.worker(draft=None):
        plain = night.run(sampling=short, output=of, ends=None)
        done = night.run(sampling=short, output=of, ends=None, tenant="clinic")
    files = [(in_folder(one) / "malformed.jsonl").read_bytes() for one in (plain, done)]
    same = [[{**orjson.loads(x), "cost_usd": 0} for x in file.splitlines()] for file in files]
    assert same[0] == same[1] != []
    names = ("text", "token_ids", "finish_reason", "seed")
    assert [[row[n] for n in names] for row in published(plain)] == [
        [row[n] for n in names] for row in published(done)
    ]
    assert all(c.text == "" for c in done.completions)
    assert counts(done) == counts(plain)
    replays = make_replays(night.settings, night.store, done.job)
    prompts = pq.read_table(night.folder / "prompts.parquet")["prompt"].to_pylist()
    for one in done.completions:
        assert replays.again(one.row_index, 0, Given(text=prompts[one.row_index])).differing == []
    night.store.close()
