"""`specbatch.submit`: a job for workers elsewhere, by the settings of the environment."""

from __future__ import annotations

from typing import Unpack

from specbatch.jobs.api.client import Client
from specbatch.jobs.api.frames import FrameLike
from specbatch.jobs.api.job import Job
from specbatch.jobs.api.options import Place, SubmitOptions


def submit(
    data: FrameLike | Place | None = None,
    *,
    model: Place | None = None,
    draft_model: Place | None = None,
    output: Place | None = None,
    **options: Unpack[SubmitOptions],
) -> Job:
    """Put a job on the broker and into the store that the `SPECBATCH_` settings name.

    As `Client().submit`, which says more.
    """
    return Client().submit(data, model=model, draft_model=draft_model, output=output, **options)
