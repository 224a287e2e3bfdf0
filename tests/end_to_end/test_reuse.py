"""Whole jobs whose requests were answered before: the answers are copied, and only where all that
they depend on is the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, TOKENS, Done, Night

from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.pipeline.operations.tools import make_auditor
from specbatch.schemas.records import Origin
from support.models import tiny_llama

REUSE: Mapping[str, Any] = {"reuse_outputs": True, "reuse_check": 0.0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    night = Night(tmp_path)
    yield night
    night.store.close()


def copies_in(done: Done) -> list[str | None]:
    return [c.reused_from for c in done.completions]


def is_intact(night: Night, done: Done) -> bool:
    """By an audit that computes everything again."""
    auditor = make_auditor(night.settings, night.store)
    chain = auditor.chain(done.job.job_id)
    replayed = auditor.replay(chain, 1.0, 0)
    assert replayed.problem is None
    assert replayed.sampled == len(done.completions)
    return not chain.findings and not replayed.findings


def test_the_same_requests_are_copied_by_another_worker_and_cost_nothing(night: Night) -> None:
    with night.worker(draft=None):
        first = night.run(sampling=SAMPLED, more=REUSE)
    with night.worker(draft=None):
        again = night.run(name="another name", sampling=SAMPLED, more=REUSE)
        third = night.run(sampling=SAMPLED)
    assert copies_in(first) == [None] * ROWS
    assert copies_in(again) == [f"{first.job.job_id}/{row}/0" for row in range(ROWS)]
    assert copies_in(third) == [None] * ROWS, "it did not ask for copies"
    assert first.outputs == again.outputs == third.outputs
    for copy in again.completions:
        assert copy.origins == (Origin.PLAIN,) * TOKENS
        assert (copy.verifier_passes, copy.ticks.total, copy.cost_usd) == (0, 0, 0.0)
    spent = sum(c.cost_usd for c in first.completions)
    assert again.job.report["reuse_saved_usd"] == pytest.approx(spent, rel=1e-12)
    assert again.job.report["reused"] == ROWS
    assert again.job.report["reused_tokens"] == ROWS * TOKENS
    assert "reused" not in first.job.report
    assert is_intact(night, again)
    shown = page(gather(night.store, night.settings, again.job.job_id, samples=2, made_at=2e9))
    assert "Outputs reused" in shown
    view = {r["origin"] for r in night.table("token_record") if r["job_id"] == again.job.job_id}
    assert view == {"reused"}


def test_another_seed_prompt_or_sampling_is_computed(night: Night) -> None:
    with night.worker(draft=None):
        first = night.run(sampling=SAMPLED, more=REUSE)
        for other in ({"seed": 6}, {"temperature": 0.9}, {"top_k": 5}, {"max_tokens": 47}):
            done = night.run(sampling={**SAMPLED, **other}, more=REUSE)
            assert copies_in(done) == [None] * ROWS, other
        prompts = pq.read_table(night.folder / "prompts.parquet")
        texts = [
            f"{prompt}!" if i == 3 else prompt
            for i, prompt in enumerate(prompts["prompt"].to_pylist())
        ]
        place = prompts.column_names.index("prompt")
        changed = prompts.set_column(place, "prompt", pa.array(texts))
        pq.write_table(changed, night.folder / "prompts.parquet")
        done = night.run(sampling=SAMPLED, more=REUSE)
    assert [row for row, name in enumerate(copies_in(done)) if name is None] == [3]
    assert first.outputs[4:] == done.outputs[4:]


def test_a_greedy_answer_does_not_depend_on_the_seed(night: Night) -> None:
    with night.worker(draft=None):
        first = night.run(sampling={"seed": 1}, more=REUSE)
        again = night.run(sampling={"seed": 2, "n": 2}, more=REUSE)
    assert len(copies_in(again)) == 2 * ROWS
    assert None not in copies_in(again)
    assert again.outputs[::2] == first.outputs


def test_other_weights_under_the_same_name_are_computed(night: Night, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", vocab_size=300, seed=0)
    with night.worker(draft=None, verifier=model):
        night.run(more=REUSE)
        assert None not in copies_in(night.run(more=REUSE))
    tiny_llama(model, vocab_size=300, seed=1)
    with night.worker(draft=None, verifier=model):
        assert copies_in(night.run(more=REUSE)) == [None] * ROWS


def test_a_copy_of_a_copy_names_the_one_that_was_computed(night: Night) -> None:
    with night.worker(draft=None):
        first, second, third = (night.run(more=REUSE) for _ in range(3))
    assert copies_in(third) == copies_in(second)
    assert str(copies_in(third)[0]).startswith(first.job.job_id)


def test_what_is_purged_and_what_is_another_tenant_s_is_not_copied(night: Night) -> None:
    with night.worker(draft=None):
        first = night.run(more=REUSE)
        assert copies_in(night.run(tenant="another", more=REUSE)) == [None] * ROWS
        list(night.store.purge(first.job.job_id, "asked for"))
        assert copies_in(night.run(more=REUSE)) == [None] * ROWS
    assert {row["tenant"] for row in night.table("reusable_outputs")} == {"another", "default"}


def test_copies_and_drafts_go_together(night: Night) -> None:
    """Half of the rows are known; the others are drafted for."""
    whole = pq.read_table(night.folder / "prompts.parquet")
    pq.write_table(whole.slice(0, ROWS // 2), night.folder / "prompts.parquet")
    with night.worker():
        night.run(more=REUSE)
        pq.write_table(whole, night.folder / "prompts.parquet")
        done = night.run(more=REUSE, depth=4)
        expected = night.run(depth=0)
    assert [name is None for name in copies_in(done)] == [False] * 4 + [True] * 4
    assert done.outputs == expected.outputs
    assert done.drafted > 0
    assert all(c.proposed == 0 for c in done.completions[:4])
    assert is_intact(night, done)


def test_a_share_is_computed_again_and_a_wrong_answer_is_noticed(
    night: Night, caplog: pytest.LogCaptureFixture
) -> None:
    check = {"reuse_outputs": True, "reuse_check": 1.0}
    with night.worker(draft=None):
        first = night.run(more=check)
        again = night.run(more=check)
        assert copies_in(again) == [None] * ROWS
        assert again.job.report["reuse_checked"] == ROWS
        assert "reuse_differing" not in again.job.report
        _exchange(night, again)
        with caplog.at_level(logging.ERROR):
            third = night.run(more=check)
    assert third.job.report["reuse_differing"] == 2
    assert third.outputs == first.outputs, "what is computed again is what counts"
    assert f"is not what {again.job.job_id}/2/0 says" in caplog.text


def _exchange(night: Night, done: Done) -> None:
    """The answers of rows 2 and 3 of a job, which has taken the first one's place."""
    night.write(
        "UPDATE reusable_outputs SET row_index = 5 - row_index"
        " WHERE job_id = :job AND row_index IN (2, 3)",
        job=done.job.job_id,
    )


def test_a_completion_that_was_changed_is_not_copied(
    night: Night, caplog: pytest.LogCaptureFixture
) -> None:
    with night.worker(draft=None):
        first = night.run(more=REUSE)
        logprobs = list(first.completions[2].logprobs)
        logprobs[7] -= 1e-6
        night.write(
            "UPDATE completions SET logprobs = :values WHERE row_index = 2", values=str(logprobs)
        )
        again = night.run(more=REUSE)
    assert [row for row, name in enumerate(copies_in(again)) if name is None] == [2]
    assert f"row 2 of job {first.job.job_id} was changed after it was recorded" in caplog.text


def test_a_completion_that_cannot_be_read_stops_no_job(
    night: Night, caplog: pytest.LogCaptureFixture
) -> None:
    with night.worker(draft=None):
        texts = [completion.text for completion in night.run(more=REUSE).completions]
        night.write("UPDATE completions SET token_ids = 'spoilt' WHERE row_index = 2")
        again = night.run(more=REUSE)
    assert copies_in(again) == [None] * ROWS
    assert [completion.text for completion in again.completions] == texts
    assert "computed again" in caplog.text


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}},
        },
    }
]
YES_OR_NO = {"type": "choice", "choice": ["yes", "no", "perhaps"]}


@pytest.mark.parametrize(
    "form",
    [
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": YES_OR_NO},
    ],
    ids=["tools", "choice"],
)
def test_what_has_a_form_is_copied_with_its_finish_reason(
    night: Night, form: dict[str, Any]
) -> None:
    asked = {**SAMPLED, "ignore_eos": False, "max_tokens": 64, **form}
    with night.worker(draft=None):
        first, again = (night.run(sampling=asked, more=REUSE) for _ in range(2))
        expected = night.run(sampling=asked)
    assert None not in copies_in(again)
    assert first.outputs == again.outputs == expected.outputs
    reason = "tool_calls" if "tools" in form else "stop"
    assert {c.finish_reason.value for c in again.completions} == {reason}


def test_the_same_request_twice_in_a_group_is_computed_once(night: Night) -> None:
    prompts = pq.read_table(night.folder / "prompts.parquet")
    twice = pa.concat_tables([prompts, prompts])
    ids = pa.array([f"row-{i}" for i in range(2 * ROWS)])
    place = twice.column_names.index("id")
    pq.write_table(twice.set_column(place, "id", ids), night.folder / "prompts.parquet")
    with night.worker(draft=None):
        done = night.run(more=REUSE)
        expected = night.run()
    job_id = done.job.job_id
    assert copies_in(done) == [None] * ROWS + [f"{job_id}/{row}/0" for row in range(ROWS)]
    assert done.outputs == expected.outputs
    assert done.job.report["reused"] == ROWS
    spent = sum(c.cost_usd for c in done.completions)
    assert done.job.report["reuse_saved_usd"] == pytest.approx(spent, rel=1e-12)
    assert is_intact(night, done)


def test_a_row_may_have_known_samples_and_others(night: Night) -> None:
    with night.worker(draft=None):
        night.run(sampling={"n": 2, **SAMPLED}, more=REUSE)
        done = night.run(sampling={"n": 3, **SAMPLED}, more=REUSE)
        expected = night.run(sampling={"n": 3, **SAMPLED})
    assert [name is None for name in copies_in(done)] == [False, False, True] * ROWS
    assert done.outputs == expected.outputs
