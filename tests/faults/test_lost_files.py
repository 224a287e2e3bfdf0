"""Drafts that are lost or damaged between two stages cost what they held, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults.in_process import PLAIN, shop

from specbatch.pipeline.ingest.objects import local_path
from specbatch.schemas.records import Stage


def lose(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("harm", [lose, cut_short])
def test_without_its_drafts_a_group_goes_on(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    with shop(tmp_path) as here:
        job_id = here.submit(PLAIN)
        folder = local_path(here.store.get_job(job_id).workspace_uri)
        while not (drafts := sorted(folder.glob("drafts-*.arrow"))):
            here.do_next(job_id)
        assert any(bell.stage is Stage.VERIFY for bell in here.store.due(job_id=job_id))
        harm(drafts[0])
        here.drain(job_id)
        # The same rows with the same outputs; what the drafts cost was lost with them.
        (cost,) = here.report(job_id).violations
        assert cost.startswith("of drafts time, attempts had")
