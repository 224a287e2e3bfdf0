"""The whole preflight, for commands that do the job here. Needs the engine extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specbatch.pipeline.bootstrap import require_engine_extra
from specbatch.schemas.errors import JobNotFoundError
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked


def check_job(
    settings: Settings,
    spec: JobSpec,
    key: str | None = None,
    is_keys_job: Callable[[str, str], bool] | None = None,
) -> Checked:
    """Raise a `UsageError` naming what is wrong with the models, the input or the output.

    An output that belongs to a job is refused, unless `is_keys_job` says that it is this very
    `key`'s.
    """
    require_engine_extra()
    from specbatch.pipeline.operations import preflight

    def is_mine(job_id: str) -> bool:
        if key is None or is_keys_job is None:
            return False
        try:
            return is_keys_job(job_id, key)
        except JobNotFoundError:
            return False

    memory = settings.ingest_memory_mib << 20
    return preflight.check_job(spec, settings.s3_endpoint_url, is_mine, memory)
