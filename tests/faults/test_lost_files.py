"""Drafts that are lost or damaged between two stages cost what they held, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.in_process import PLAIN, shop
from ledger.builders import JOB, new_group, new_job

from specbatch.pipeline.stages.verify import blocks_ahead
from specbatch.pipeline.storage.objects import Objects, local_path
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import Artefact, GroupWork, Lease, Stage
from support.databases import sqlite_store


def lose(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def test_without_its_drafts_a_group_goes_on(tmp_path: Path) -> None:
    with shop(tmp_path) as here:
        for harm in (lose, cut_short):
            job_id = here.submit(PLAIN)
            folder = local_path(here.store.get_job(job_id).workspace_uri)
            while not (drafts := sorted(folder.glob("drafts-*.arrow"))):
                here.do_next(job_id)
            assert any(message.stage is Stage.VERIFY for message in here.store.due(job_id=job_id))
            harm(drafts[0])
            here.drain(job_id)
            # The same rows with the same outputs; what the drafts cost was lost with them.
            (cost,) = here.report(job_id).violations
            assert cost.startswith("of drafts time, attempts had")


@pytest.mark.parametrize(("max_attempts", "failing"), [(1, 0), (2, 1), (3, 2), (9, 2)])
def test_the_last_attempt_or_the_third_goes_without(
    tmp_path: Path, max_attempts: int, failing: int
) -> None:
    lost = Artefact(f"file://{tmp_path}/jobs/{JOB}/drafts.arrow", "d" * 64, 10)
    store = sqlite_store()
    store.create_job(new_job(workspace_uri=f"file://{tmp_path}/jobs/{JOB}"))
    job, group = store.get_job(JOB), new_group(0)
    for attempt in range(1, max_attempts + 1):
        lease = Lease(JOB, 0, Stage.VERIFY, attempt, "w", attempt)
        work = GroupWork(lease, group.rows, group.prompts, lost, None)
        if attempt <= failing:
            with pytest.raises(ObjectError, match="no such file"):
                blocks_ahead(Objects(), job, work, max_attempts)
        else:
            assert blocks_ahead(Objects(), job, work, max_attempts) == {}
