"""`specbatch bench`: a file, a table and a plot; one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.jobs.bench import side_report
from specbatch.jobs.bench.contenders import Completed, Ours

FEW = ["bench", "--engines", "ours", "--new-tokens", "4", "--runs", "1", "--prompt-tokens", "16"]


def without_matplotlib() -> bool:
    return False


def test_it_writes_a_file_and_says_how_to_get_the_plot(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_report, "can_plot", without_matplotlib)
    done = cli(*FEW, "--n", "1,2", "--n", "1", "--acceptance", "0.5", "--acceptance", "1")
    assert done.code == 0, done.err
    found = json.loads((folder / "bench-run" / "bench.json").read_text())
    assert len(found["rows"]) == 2 * (1 + 2 * 4)
    assert "results: bench-run/bench.json" in done.out
    assert "over specbatch's depth off" in done.out
    assert "pip install 'specbatch[bench]'" in done.err
    assert [path.name for path in (folder / "bench-run").iterdir()] == ["bench.json"]


def test_it_draws_the_plot_where_it_can(cli: Any, folder: Path) -> None:
    flags = ["--n", "2", "--acceptance", "none", "--real", "--prompts", "prompts.parquet"]
    done = cli(*FEW, *flags, "--out", "there/it")
    assert done.code == 0, done.err
    assert "plot:    there/it/bench.svg" in done.out
    assert (folder / "there" / "it" / "bench.svg").read_text().rstrip().endswith("</svg>")


def test_an_interrupted_run_keeps_its_rows_and_ends_with_130(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_report, "can_plot", without_matplotlib)
    complete, runs = Ours.complete, iter(range(14))  # of 12 at N = 1

    def interrupted(self: Ours, *arguments: Any, **named: Any) -> Completed:
        if next(runs, None) is None:
            raise KeyboardInterrupt
        return complete(self, *arguments, **named)

    monkeypatch.setattr(Ours, "complete", interrupted)
    done = cli(*FEW, "--n", "1,2", "--acceptance", "1")
    assert done.code == 130
    assert "interrupted: what was measured until then is kept" in done.err
    found = json.loads((folder / "bench-run" / "bench.json").read_text())
    assert found["interrupted"]
    assert {row["n"] for row in found["rows"]} == {1}
    monkeypatch.setattr(Ours, "complete", interrupted)
    again = cli(*FEW, "--n", "1", "--acceptance", "1", "--out", "empty")
    assert again.code == 130
    assert "nothing was measured yet" in again.err
    assert not list((folder / "empty").iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--n", "1,x"], "--n: `x` is not a whole number; give a list such as 1,8,32"),
        (["--n", "0"], "--n takes numbers of prompts of 1 or more"),
        (["--acceptance", "half"], "--acceptance: `half` is not a number"),
        (["--acceptance", "2"], "--acceptance 2 is not a probability"),
        (["--engines", "ours,nothing"], "--engines knows no `nothing`"),
        (["--engines", "llama.cpp,ours"], "SPECBATCH_BENCH_LLAMA_PYTHON"),
        (["--model", "./nowhere"], "does not exist"),
        (["--proposer", "./nowhere"], "--proposer drafts only with --real: add it"),
        (["--real", "--model", "llama-230m"], "name a --proposer, or leave out --real"),
        (["--prompts", "nope.parquet"], "prompts nope.parquet do not exist"),
        (["--prompt-column", "words"], "no column `words`"),
        (["--out", "prompts.parquet"], "--out prompts.parquet cannot be made"),
    ],
)
def test_a_wrong_flag_gets_one_sentence(
    cli: Any, folder: Path, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command restarts its process at a forced level, to hold the other engines to it.
    monkeypatch.delenv("SPECBATCH_NATIVE_ISA", raising=False)
    refused = cli("bench", *flags)
    assert refused.code == 2
    assert words in refused.complaint
    assert not (folder / "bench-run" / "bench.json").exists()
