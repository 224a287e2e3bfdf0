"""`specbatch review`: what waits is listed with its text, and decided once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.conftest import called_in

from specbatch.pipeline.outputs.outputs import read_output
from support.models import TinyPair


@pytest.fixture
def held(cli: Any, job: Any, tmp_path: Path) -> str:
    """A job all of whose rows wait; its id."""
    assert cli
    return hold(tmp_path, job)


@pytest.fixture(scope="module")
def undecided(shared_folder: Path, tiny_pair: TinyPair) -> tuple[Path, str]:
    """Where there is one, and its id, for all tests that decide nothing."""
    models = ("--verifier", tiny_pair.verifier, "--proposer", tiny_pair.draft)
    job = ("--input", "prompts.parquet", "--max-tokens", 6, *models)
    return shared_folder, hold(shared_folder, job)


def hold(folder: Path, job: Iterable[object]) -> str:
    policy = {"use": "patterns", "patterns": {"any": "(?s).*"}, "verdict": "review"}
    spec = folder / "judged.yaml"
    spec.write_text(yaml.safe_dump({"policies": [policy]}))
    made = called_in(folder, "submit-job", spec, *job, "--local", "--json", "--output", "held")
    found: str = made.json["job"]
    return found


def test_what_waits_is_listed_and_decided_once(cli: Any, held: str) -> None:
    listed = [line for line in cli("review", held).out.splitlines() if line.startswith("row ")]
    assert len(listed) == 12
    assert listed[0].endswith("held back for review by policy `patterns` (any)")
    waiting = cli("review", held, "--json")
    texts = [row["text"] for row in map(yaml.safe_load, waiting.out.splitlines())]
    assert all(texts)
    shown = cli("show", held)
    assert "12 completions wait for a review: `specbatch review" in shown.out
    assert not [text for text in texts if text in shown.out]
    assert cli("show", held, "--json").json["in_review"] == [[row, 0] for row in range(12)]

    done = cli("review", held, "--release", "0", "--release", "2/0", "--block", "1", "--local")
    assert done.code == 0, done.err
    rows = read_output("held").to_pylist()
    assert [rows[row]["text"] for row in (0, 2)] == [texts[0], texts[2]]
    assert rows[1]["error"] == "blocked by a reviewer"
    assert len(cli("show", held, "--json").json["in_review"]) == 9

    again = cli("review", held, "--block", "0")
    assert again.code == 2
    assert "row 0, sample 0 of job" in again.err
    assert "was already released: a decision is final" in again.err
    assert cli("review", held, "--block", "all", "--local").code == 0
    assert "nothing waits for a review" in cli("review", held).out
    assert "no completion of job" in cli("review", held, "--release", "all").err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--release", "x"), "write the number of its row, or ROW/SAMPLE"),
        (("--release", "all", "--block", "all"), "both released and blocked"),
        (("--local",), "give --release or --block"),
        (("--release", "99"), "row 99, sample 0 of job"),
        (("--release", "1", "--block", "1/0"), "row 1 is both released and blocked"),
    ],
)
def test_a_wrong_decision_changes_nothing(
    cli: Any,
    undecided: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: str,
) -> None:
    folder, held = undecided
    monkeypatch.chdir(folder)
    refused = cli("review", held, *options)
    assert refused.code == 2
    assert words in refused.err
    assert len(cli("show", held, "--json").json["in_review"]) == 12
