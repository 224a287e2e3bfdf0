"""Completions that a ratio test decided are replayed with their draft model, draft by draft."""

from __future__ import annotations

from contextlib import closing

import pytest
from cli.conftest import Cli

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_replays
from specbatch.schemas.records import Origin
from specbatch.schemas.settings import Settings
from support.models import TinyPair

ROWS = 12
REPLAYED = range(0, ROWS, 2)


def submitted(cli: Cli, job: list[object], *more: object) -> str:
    flags = ("--temperature", 0.9, "--max-tokens", 16, "--depth", 3, "--local", "--json")
    return str(cli("submit-job", *job, *flags, *more).json["job"])


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_completions_of_a_ratio_test_come_out_the_same(
    cli: Cli, job: list[object], verification: str
) -> None:
    job_id = submitted(cli, job, "--verification", verification)
    settings = Settings()
    with closing(make_store(settings)) as store:
        replays = make_replays(settings, store, store.get_job(job_id), tests_again=True)
        found = [replays.again(row, 0) for row in REPLAYED]
    assert [twice.differing for twice in found] == [[]] * len(REPLAYED)
    origins = {origin for twice in found for origin in twice.kept.origins}
    assert {Origin.ACCEPTED, Origin.CORRECTED} <= {Origin(origin) for origin in origins}
    done = cli("replay", f"{job_id}/3")
    assert (done.code, "come out the same, bit for bit" in done.out) == (0, True)


def test_another_draft_model_is_refused(cli: Cli, job: list[object], tiny_pair: TinyPair) -> None:
    job_id = submitted(cli, job, "--verification", "rejection", "--max-tokens", 4)
    refused = cli("replay", f"{job_id}/3", "--proposer", tiny_pair.verifier)
    assert refused.code != 0
    assert "is not the one that the tokens of job" in refused.complaint
