"""Whole jobs whose requests were answered before: the answers are copied, and only where all that
they depend on is the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, TOKENS, Done, Night

from specbatch.pipeline.operations.tools import make_auditor

REUSE: Mapping[str, Any] = {"reuse_outputs": True, "reuse_check": 0.0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    """A night whose worker does the jobs of many tests, each of another tenant."""
    night = Night(tmp_path_factory.mktemp("shared"))
    with night.worker(draft=None):
        yield night
    night.store.close()


@dataclass(frozen=True)
class Tenant:
    """A tenant of a night, who sees no answers of others."""

    night: Night
    name: str

    def run(self, **options: Any) -> Done:
        return self.night.run(**{"tenant": self.name, **options})

    def write(self, statement: str, **values: Any) -> None:
        """Change completions of this tenant behind the store's back."""
        mine = " AND job_id IN (SELECT job_id FROM jobs WHERE tenant = :tenant)"
        self.night.write(statement + mine, tenant=self.name, **values)


_numbers = count()


@pytest.fixture
def tenant(shared: Night) -> Tenant:
    return Tenant(shared, f"tenant-{next(_numbers)}")


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


def test_another_seed_prompt_or_sampling_is_computed(tenant: Tenant, tmp_path: Path) -> None:
    first = tenant.run(sampling=SAMPLED, more=REUSE)
    others: list[dict[str, Any]] = [
        *({"seed": 6}, {"temperature": 0.9}, {"top_k": 5}, {"max_tokens": TOKENS - 1})
    ]
    rows = pq.read_table(tenant.night.folder / "prompts.parquet").to_pylist()
    for row, other in zip_longest(rows, others, fillvalue={}):
        row["own"] = json.dumps(other)
    rows[len(others)]["prompt"] += "!"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    own = {"uri": str(tmp_path / "own.parquet"), "sampling_column": "own"}
    done = tenant.run(sampling=SAMPLED, more={**REUSE, "input": own})
    changed = range(len(others) + 1)
    assert [row for row, name in enumerate(copies_in(done)) if name is None] == [*changed]
    assert first.outputs[len(changed) :] == done.outputs[len(changed) :]


def test_a_greedy_answer_does_not_depend_on_the_seed(tenant: Tenant) -> None:
    first = tenant.run(sampling={"seed": 1}, more=REUSE)
    again = tenant.run(sampling={"seed": 2, "n": 2}, more=REUSE)
    assert len(copies_in(again)) == 2 * ROWS
    assert None not in copies_in(again)
    assert again.outputs[::2] == first.outputs


def test_a_copy_of_a_copy_names_the_one_that_was_computed(tenant: Tenant) -> None:
    first, second, third = (tenant.run(more=REUSE) for _ in range(3))
    assert copies_in(third) == copies_in(second)
    assert str(copies_in(third)[0]).startswith(first.job.job_id)


def test_what_is_purged_and_what_is_another_tenant_s_is_not_copied(tenant: Tenant) -> None:
    first = tenant.run(more=REUSE)
    assert copies_in(tenant.run(tenant="another", more=REUSE)) == [None] * ROWS
    list(tenant.night.store.purge(first.job.job_id, "asked for"))
    assert copies_in(tenant.run(more=REUSE)) == [None] * ROWS
    kept = {row["tenant"] for row in tenant.night.table("reusable_outputs")}
    assert {"another", tenant.name} <= kept


def test_a_share_is_computed_again_and_a_wrong_answer_is_noticed(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    check = {"reuse_outputs": True, "reuse_check": 1.0}
    first = tenant.run(more=check)
    again = tenant.run(more=check)
    assert copies_in(again) == [None] * ROWS
    assert again.job.report["reuse_checked"] == ROWS
    assert "reuse_differing" not in again.job.report
    _exchange(tenant, again)
    with caplog.at_level(logging.ERROR):
        third = tenant.run(more=check)
    assert third.job.report["reuse_differing"] == 2
    assert third.outputs == first.outputs, "what is computed again is what counts"
    assert f"is not what {again.job.job_id}/2/0 says" in caplog.text


def _exchange(tenant: Tenant, done: Done) -> None:
    """The answers of rows 2 and 3 of a job, which has taken the first one's place."""
    tenant.night.write(
        "UPDATE reusable_outputs SET row_index = 5 - row_index"
        " WHERE job_id = :job AND row_index IN (2, 3)",
        job=done.job.job_id,
    )


def test_a_completion_that_was_changed_is_not_copied(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    first = tenant.run(more=REUSE)
    logprobs = list(first.completions[2].logprobs)
    logprobs[7] -= 1e-6
    tenant.write(
        "UPDATE completions SET logprobs = :values WHERE row_index = 2", values=str(logprobs)
    )
    again = tenant.run(more=REUSE)
    assert [row for row, name in enumerate(copies_in(again)) if name is None] == [2]
    assert f"row 2 of job {first.job.job_id} was changed after it was recorded" in caplog.text


def test_a_completion_that_cannot_be_read_stops_no_job(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [completion.text for completion in tenant.run(more=REUSE).completions]
    tenant.write("UPDATE completions SET token_ids = 'spoilt' WHERE row_index = 2")
    again = tenant.run(more=REUSE)
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
    tenant: Tenant, form: dict[str, Any]
) -> None:
    asked = {**SAMPLED, "ignore_eos": False, "max_tokens": 64, **form}
    first, again = (tenant.run(sampling=asked, more=REUSE) for _ in range(2))
    expected = tenant.run(sampling=asked)
    assert None not in copies_in(again)
    assert first.outputs == again.outputs == expected.outputs
    reason = "tool_calls" if "tools" in form else "stop"
    assert {c.finish_reason.value for c in again.completions} == {reason}


def test_the_same_request_twice_in_a_group_is_computed_once(tenant: Tenant, tmp_path: Path) -> None:
    prompts = pq.read_table(tenant.night.folder / "prompts.parquet")
    twice = pa.concat_tables([prompts, prompts])
    ids = pa.array([f"row-{i}" for i in range(2 * ROWS)])
    place = twice.column_names.index("id")
    pq.write_table(twice.set_column(place, "id", ids), tmp_path / "twice.parquet")
    prompts_of = {"input": {"uri": str(tmp_path / "twice.parquet")}}
    done = tenant.run(more={**REUSE, **prompts_of})
    expected = tenant.run(more=prompts_of)
    job_id = done.job.job_id
    assert copies_in(done) == [None] * ROWS + [f"{job_id}/{row}/0" for row in range(ROWS)]
    assert done.outputs == expected.outputs
    assert done.job.report["reused"] == ROWS
    spent = sum(c.cost_usd for c in done.completions)
    assert done.job.report["reuse_saved_usd"] == pytest.approx(spent, rel=1e-12)
    assert is_intact(tenant.night, done)


def test_a_row_may_have_known_samples_and_others(tenant: Tenant) -> None:
    tenant.run(sampling={"n": 2, **SAMPLED}, more=REUSE)
    done = tenant.run(sampling={"n": 3, **SAMPLED}, more=REUSE)
    expected = tenant.run(sampling={"n": 3, **SAMPLED})
    assert [name is None for name in copies_in(done)] == [False, False, True] * ROWS
    assert done.outputs == expected.outputs
