"""A candidate drafts for groups that chance draws, is judged by them, and outputs stay the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import write

from specbatch.jobs.cli.connect import load_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.stages.draft_models import Done, Trial
from specbatch.schemas.rollouts import Observed, Outcome, Rollout
from support.models import TinyPair, tiny_llama

pytestmark = pytest.mark.pipeline  # runs models

ROWS = 64


@pytest.fixture
def store(cli: Any, folder: Path) -> Iterator[Store]:
    """Of the test's folder, with prompts of one group each."""
    assert cli("settings").code == 0
    write(folder / "rows.parquet", [f"def f{i}(x, y={i}):" for i in range(ROWS)])
    with closing(make_store(load_settings())) as store:
        yield store


@pytest.fixture
def priced_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group costs its verifier's passes: what the clock says differs from run to run."""
    measured = Trial.seen

    def seen(self: Trial, done: Iterable[Done]) -> Observed | None:
        done = list(done)
        found = measured(self, done)
        passes = sum(record.verifier_passes for record, _ in done)
        return None if found is None else replace(found, cost=float(passes))

    monkeypatch.setattr(Trial, "seen", seen)


def submit(
    cli: Any, store: Store, pair: TinyPair, name: str, rows: str = "rows.parquet", group: int = 1
) -> dict[int, tuple[int, ...]]:
    done = cli(
        *("submit-job", "--local", "--input", rows, "--output", name, "--json"),
        *("--verifier", pair.verifier, "--proposer", pair.draft, "--max-tokens", 12),
        *("--dtype", "float32", "--sources", "draft-model", "--depth", 3, "--group-size", group),
    )
    assert done.code == 0, done.err
    job = done.json["job"]
    return {one.row_index: one.token_ids for one in store.completions(job)}


def roll_out(cli: Any, store: Store, present: Path, candidate: Path) -> Rollout:
    for files in (present, candidate):
        assert cli("models", "add", "docs", files).code == 0
    assert cli("models", "promote", "docs:1", "--reason", "the first").code == 0
    begun = cli("rollout", "start", "docs:2", "--steps", "50,100", "--reason", "a trial")
    assert begun.code == 0, begun.err
    return store.rollouts()[0]


@pytest.mark.usefixtures("priced_by_passes")
def test_useless_drafts_of_a_candidate_end_its_rollout(
    cli: Any, store: Store, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    before = submit(cli, store, tiny_pair, "before", group=ROWS)
    useless = tiny_llama(tmp_path / "useless", vocab_size=300, seed=99)
    begun = roll_out(cli, store, tiny_pair.verifier, useless)
    pair = TinyPair(tiny_pair.verifier, tiny_pair.verifier)
    assert submit(cli, store, pair, "meanwhile") == before
    (ended,) = store.rollouts(history=True)
    assert (ended.number, ended.outcome) == (begun.number, Outcome.WORSE)
    groups = store.rollout_groups(begun.number)
    assert {seen.is_candidate for seen in groups} == {True, False}
    assert len(groups) < ROWS
    assert "docs:1" in cli("models", "list").out


@pytest.mark.usefixtures("priced_by_passes")
def test_a_better_candidate_is_promoted_before_the_next_job(
    cli: Any, store: Store, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    useless = tiny_llama(tmp_path / "useless", vocab_size=300, seed=99)
    begun = roll_out(cli, store, useless, tiny_pair.verifier)
    pair = TinyPair(tiny_pair.verifier, useless)
    first = submit(cli, store, pair, "first")
    (decided,) = store.rollouts()
    assert (decided.outcome, decided.share) == (Outcome.BETTER, 1.0)
    assert submit(cli, store, pair, "second", group=ROWS) == first
    assert store.rollouts() == []
    present = store.deployments()[0]
    assert present.fingerprint == begun.fingerprint
    assert present.reason.startswith("rollout 1: better")


def test_a_ratio_test_is_drafted_for_by_its_own_model_alone(
    cli: Any, store: Store, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    useless = tiny_llama(tmp_path / "useless", vocab_size=300, seed=99)
    roll_out(cli, store, tiny_pair.verifier, useless)
    ratio = ("--verification", "rejection", "--temperature", 1)
    done = cli(
        *("submit-job", "--local", "--input", "prompts.parquet", "--output", "ratio", "--json"),
        *("--verifier", tiny_pair.verifier, "--proposer", tiny_pair.verifier, "--max-tokens", 8),
        *("--dtype", "float32", "--sources", "draft-model", "--depth", 3, *ratio),
    )
    assert done.code == 0, done.err
    asked = {c.fingerprint for c in store.acceptance("default", "job") if c.tested}
    (present,) = store.deployments()
    assert asked == {present.fingerprint}
    assert store.rollout_groups(store.rollouts()[0].number) == []


def test_a_candidate_that_is_not_there_stops_no_job(
    cli: Any, store: Store, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    gone = tiny_llama(tmp_path / "gone", vocab_size=300, seed=99)
    roll_out(cli, store, tiny_pair.verifier, gone)
    gone.rename(tmp_path / "elsewhere")
    pair = TinyPair(tiny_pair.verifier, tiny_pair.verifier)
    assert len(submit(cli, store, pair, "alone", "prompts.parquet")) == 12
    (rollout,) = store.rollouts()
    assert store.rollout_groups(rollout.number) == []


@pytest.mark.parametrize("kind", ["other vocabulary", "same folder name"])
def test_a_candidate_that_cannot_stand_beside_the_model_stops_no_job(
    cli: Any, store: Store, tmp_path: Path, tiny_pair: TinyPair, kind: str
) -> None:
    if kind == "other vocabulary":
        candidate = tiny_llama(tmp_path / "other", vocab_size=320, seed=99)
    else:
        candidate = tiny_llama(tmp_path / tiny_pair.verifier.name, vocab_size=300, seed=99)
    roll_out(cli, store, tiny_pair.verifier, candidate)
    pair = TinyPair(tiny_pair.verifier, tiny_pair.verifier)
    assert len(submit(cli, store, pair, "alone", "prompts.parquet")) == 12
