"""`specbatch learn`: a night's training, its trial and its rollout, in one command."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import write

from specbatch.jobs.cli.connect import load_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.rollouts import Observed
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # trains and runs models

ROWS = 60


@pytest.fixture
def learning(
    cli: Any, folder: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """A job of the tiny pair has ended, and its draft model is deployed; the command."""
    monkeypatch.setenv("SPECBATCH_MAX_CONCURRENT_SEQUENCES", "4")
    write(folder / "many.parquet", [f"def f{i}(x, y={i}):" for i in range(ROWS)])
    done = cli(
        *("submit-job", "--local", "--input", "many.parquet", "--output", "out", "--name", "docs"),
        *("--verifier", tiny_pair.verifier, "--proposer", tiny_pair.draft, "--max-tokens", 24),
        *("--top-logprobs", 4, "--dtype", "float32", "--temperature", 0),
    )
    assert done.code == 0, done.err
    cli("models", "add", "small", tiny_pair.draft)
    cli("models", "promote", "small", "--reason", "the first one")
    return [
        *("learn", "small", "--verifier", tiny_pair.verifier, "--job", "docs", "--steps", "50,100"),
        *("--held-out", 0.4, "--epochs", 30),
    ]


def test_a_night_trains_tries_and_rolls_out_and_the_next_one_promotes(
    cli: Any, folder: Path, tiny_pair: TinyPair, learning: list[object]
) -> None:
    first = cli(*learning, "--night", "1", "--json")
    assert first.code == 0, first.err
    learned = first.json
    assert learned["record"]["better"]
    assert learned["trial"]["proposer"] == learned["candidate"]["fingerprint"]
    if not learned["trial"]["pays"]:  # so small a pair hardly does
        assert learned["rollout"] is None
        assert "but drafts do not pay" in learned["said"]
        assert cli("rollout", "list").out.startswith("no rollouts")
        assert cli("models", "promote", "small:2", "--reason", "x").code == 2, "it is retired"
        cli("models", "add", "small", tiny_pair.verifier)
        begun = cli(
            *("rollout", "start", "small:3", "--tenant", "default", "--job", "docs"),
            *("--steps", "50,100", "--reason", "by hand"),
        )
        assert begun.code == 0, begun.err
    assert (folder / "models" / "small-docs-1" / "training.json").is_file()
    (tried,) = cli("rollout", "list", "--json").json
    second = cli(*learning, "--night", "2", "--json").json
    parent = second["record"]["parent"]["digest"]
    assert parent == tried["fingerprint"], "the candidate is trained further"
    (goes_on,) = cli("rollout", "list", "--json").json
    candidate = goes_on["fingerprint"]
    with closing(make_store(load_settings())) as store:
        for i in range(60):
            seen = Observed(0.5, i % 2 == 0, 1000 if i % 2 == 0 else 10, 1.0)
            store.observe_rollout(goes_on["number"], "job", i, seen)
    third = cli(*learning, "--night", "3", "--json")
    assert third.code == 0, third.err
    assert third.json["record"]["parent"]["digest"] == candidate
    found = {one["fingerprint"]: one["deployments"] for one in cli("models", "list", "--json").json}
    (deployment,) = found[candidate]
    assert deployment["reason"].startswith(f"rollout {goes_on['number']}: better")


def test_without_a_model_to_begin_with_nothing_is_learned(cli: Any, learning: list[object]) -> None:
    unknown = [word if word != "small" else "other" for word in learning]
    done = cli(*unknown)
    assert done.code == 2
    assert "no version of other is deployed for tenant default, job docs: begin with" in done.err
