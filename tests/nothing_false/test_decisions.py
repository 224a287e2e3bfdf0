"""Why drafts are taken or left, as `show` tells it: figures and words agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from support import demo, forks
from support.databases import migrated

WAIT_SEC = 400.0
MOST_JOBS = 3
TOO_LITTLE = re.compile(r"accepted at ([\d.]+) .*too little .*: from ([\d.]+) on they pay")
ENOUGH = re.compile(r"accepted at ([\d.]+) .*enough .*: from ([\d.]+) on they pay")
BETTER = re.compile(r"which would pay alone .*, but ([\w@-]+)'s, accepted at [\d.]+, bring more")


def decisions(folder: Path, name: str) -> list[dict[str, Any]]:
    """Of a job with two proposers, whose drafts are alike in worth."""

    def run(*arguments: object) -> Any:
        words = ["specbatch", *map(str, arguments), "--json"]
        environment = {"SPECBATCH_WORKSPACE": str(folder / "specbatch-data")}
        done = forks.run(*words, environment=environment, cwd=folder, timeout=WAIT_SEC)
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout.strip().splitlines()[-1])

    job = run(
        *("submit-job", "--local", "--name", name, "--input", "prompts.parquet"),
        *("--output", name, "--verifier", demo.VERIFIER, "--proposer", demo.DRAFT),
        *("--sources", "ngram,draft-model", "--max-tokens", 224, "--dtype", "float32"),
    )["job"]
    told: list[dict[str, Any]] = run("show", job)["decisions"]
    return told


def test_a_proposer_that_would_pay_is_not_left_because_its_drafts_are_accepted_too_seldom(
    tmp_path: Path,
) -> None:
    """Where another one is better, that is the reason."""
    migrated(tmp_path / "specbatch-data" / "specbatch.db")
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, 96), tmp_path / "prompts.parquet")
    left: list[dict[str, Any]] = []
    for number in range(MOST_JOBS):
        told = decisions(tmp_path, f"night-{number}")
        left += [one for one in told if one["action"] in ("taken out", "off")]
        for one in told:
            if said := TOO_LITTLE.search(one["reason"]):
                assert float(said[1]) <= float(said[2]), one
            if said := ENOUGH.search(one["reason"]):
                assert float(said[1]) >= float(said[2]), one
            if said := BETTER.search(one["reason"]):
                assert said[1] != one["proposer"], one
        if left:
            return
    raise AssertionError("no job left a proposer out, so nothing was tried")
