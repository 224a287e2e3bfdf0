"""A job's model is being replaced: half a file lies in its place for a while, and costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.in_process import LEASE_SEC, PLAIN, shop

from specbatch.schemas.records import JobState, Stage

HALF = ("tokenizer.json", "config.json")


@pytest.mark.parametrize("file", HALF)
def test_a_worker_that_finds_half_a_file_leaves_the_group_to_whoever_has_the_model(
    tmp_path: Path, file: str
) -> None:
    """It has just come, so it has no tokenizer yet."""
    with shop(tmp_path) as here:
        job_id = here.submit(PLAIN)
        while here.store.due(job_id=job_id)[0].stage is not Stage.RECORD:
            here.do_next(job_id)
        path = Path(here.verifier) / file
        whole = path.read_bytes()
        later = here.hire()
        path.write_bytes(whole[: len(whole) // 2])
        for _ in range(3 * here.settings.max_attempts):
            if not here.store.due(job_id=job_id):
                here.clock.advance(LEASE_SEC + 1)
            else:
                here.do_next(job_id, later)
        assert here.store.failed_groups(job_id) == []
        assert here.store.get_job(job_id).state is JobState.RUNNING
        path.write_bytes(whole)
        here.drain(job_id, later)
        assert here.report(job_id).violations == ()
