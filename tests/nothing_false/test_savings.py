"""What commands say was saved: nothing where nothing was drafted, and everywhere the same."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from support import demo, forks
from support.databases import migrated

ROWS = 48
WAIT_SEC = 300.0
AMOUNT = re.compile(r"(saved|lost) against depth 0: \$")

Command = Callable[..., str]


def commands_in(folder: Path) -> Command:
    """`command("show", job)` runs `specbatch show JOB` to its end, and returns what it printed."""
    data = folder / "specbatch-data"
    migrated(data / "specbatch.db")
    table = pq.read_table(demo.PROMPTS)
    pq.write_table(table.slice(0, ROWS), folder / "prompts.parquet")
    environment = {"SPECBATCH_WORKSPACE": str(data), "COLUMNS": "200"}

    def run(*arguments: object) -> str:
        words = ["specbatch", *map(str, arguments)]
        done = forks.run(*words, environment=environment, cwd=folder, timeout=WAIT_SEC)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@dataclass(frozen=True)
class Undrafted:
    """A job that has a proposer and drafts nothing."""

    folder: Path
    command: Command
    job: str


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> Undrafted:
    folder = tmp_path_factory.mktemp("undrafted")
    command = commands_in(folder)
    job = submit(command, "out", "--proposer", demo.DRAFT, "--depth", "off")
    return Undrafted(folder, command, job)


def json_of(said: str) -> Any:
    return orjson.loads(said.strip().splitlines()[-1])


def submit(command: Command, output: str, *more: object) -> str:
    """A job on the demo's pair, to its end; its id."""
    job = [
        *("submit-job", "--local", "--json", "--input", "prompts.parquet", "--output", output),
        *("--verifier", demo.VERIFIER, "--max-tokens", 96, "--dtype", "float32"),
    ]
    return str(json_of(command(*job, *more))["job"])


def report(command: Command, folder: Path, job: str) -> str:
    """The text of a job's report."""
    command("report", job, "--output", folder / "report.html")
    html = (folder / "report.html").read_text()
    html = re.sub(r"<(style|script).*?</\1>", " ", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_a_job_that_drafted_nothing_is_nowhere_said_to_save_or_lose(undrafted: Undrafted) -> None:
    command, job = undrafted.command, undrafted.job
    for said in (command("show", job), command("cost", job), command("cost")):
        assert not AMOUNT.search(said), said
        assert "saved against depth 0: nothing was drafted" in said
    assert re.search(r"speed-up over depth 0\W+nothing was drafted", command("show", job))
    lines = (
        json_of(command("show", job, "--json")),
        json_of(command("cost", job, "--json"))["figures"],
        *json_of(command("cost", "--by", "job", "--json"))["lines"],
    )
    for line in lines:
        assert line["drafted"] is False
        names = ("saved_usd", "saved_low_usd", "saved_high_usd", "speedup")
        assert [line[name] for name in names] == [None] * 4
    text = report(command, undrafted.folder, job)
    assert "Nothing was drafted, so there is nothing that speculation saved or lost." in text
    assert "aved against depth 0" not in text
    assert "ost against depth 0" not in text


def test_each_completion_of_such_a_job_cost_what_it_would_have(undrafted: Undrafted) -> None:
    """A slow step is one of depth 0 too: it must not be charged against a quicker one."""
    with sqlite3.connect(undrafted.folder / "specbatch-data" / "specbatch.db") as database:
        rows = database.execute(
            "SELECT decode_sec, baseline_sec FROM completions WHERE job_id = ?", (undrafted.job,)
        ).fetchall()
    assert len(rows) == ROWS
    assert sum(taken for taken, _ in rows) > 0
    for taken, baseline in rows:
        assert baseline == pytest.approx(taken)


def test_what_a_job_saved_is_the_same_wherever_it_is_told(tmp_path: Path) -> None:
    """Drafts that the machine is sure to verify: a few sequences, and a draft model beside them."""
    command = commands_in(tmp_path)
    more = ("--proposer", demo.DRAFT, "--n", 2, "--temperature", 0.8, "--sources", "draft-model")
    jobs = [submit(command, f"out-{i}", *more, "--seed", i) for i in range(2)]
    told = [json_of(command("show", job, "--json")) for job in jobs]
    for job, one in zip(jobs, told, strict=True):
        assert one["drafted"] is (one["acceptance_rate"] is not None)
        of_cost = json_of(command("cost", job, "--json"))["figures"]
        for name in ("saved_usd", "saved_low_usd", "saved_high_usd", "speedup", "drafted"):
            assert of_cost[name] == pytest.approx(one[name])
        if one["saved_low_usd"] is not None:
            assert one["saved_low_usd"] <= one["saved_usd"] <= one["saved_high_usd"]
            assert (one["speedup"] > 1.0) == (one["saved_usd"] > 0)
        text, shown = report(command, tmp_path, job), command("show", job)
        if one["saved_usd"] is None:
            assert not AMOUNT.search(shown)
        else:
            assert f"({one['speedup']:.2f}×)" in shown
            assert f"{one['speedup']:.2f}×" in text
    sure = [one for one in told if one["saved_usd"] is not None]
    both = json_of(command("cost", "--json"))["figures"]
    if sure:
        assert both["saved_usd"] == pytest.approx(sum(one["saved_usd"] for one in sure))
