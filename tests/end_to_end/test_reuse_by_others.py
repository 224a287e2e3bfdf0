"""Copies between jobs of several workers: what another one has answered, with which weights, and
beside drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, TOKENS, Night
from end_to_end.test_reuse import REUSE, SAMPLED, copies_in, is_intact

from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.schemas.records import Origin
from support.models import tiny_llama


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    night = Night(tmp_path)
    yield night
    night.store.close()


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


def test_other_weights_under_the_same_name_are_computed(night: Night, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", vocab_size=300, seed=0)
    with night.worker(draft=None, verifier=model):
        night.run(more=REUSE)
        assert None not in copies_in(night.run(more=REUSE))
    tiny_llama(model, vocab_size=300, seed=1)
    with night.worker(draft=None, verifier=model):
        assert copies_in(night.run(more=REUSE)) == [None] * ROWS


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
