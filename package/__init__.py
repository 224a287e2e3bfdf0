"""specbatch from Python: batch generation with speculative decoding that is exact and durable.

    import specbatch

    done = specbatch.run(frame, model="models/verifier", max_tokens=64)  # a frame of the same kind
    job = specbatch.submit("prompts.parquet", model="models/verifier", output="completions")
    job.wait().results()
    specbatch.Client().job("latest").report()

A name is imported when it is first used, so importing the package loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.jobs.api.client import Client
    from specbatch.jobs.api.job import Job
    from specbatch.jobs.api.options import SpecOptions
    from specbatch.jobs.api.report import Report
    from specbatch.jobs.api.run import arun, run
    from specbatch.jobs.api.submit import submit
    from specbatch.jobs.client import Outcome
    from specbatch.schemas.errors import (
        EngineError,
        IdempotencyError,
        InputError,
        JobFailedError,
        JobInterrupted,
        JobNotFoundError,
        MissingExtraError,
        ModelError,
        ObjectError,
        OutputError,
        RowsFailedWarning,
        SpecbatchError,
        SpecError,
        StoreError,
        UsageError,
        WaitTimeoutError,
    )
    from specbatch.schemas.policies import PolicyInput, Verdict

    __version__: str

__all__ = [
    "Client",
    "EngineError",
    "IdempotencyError",
    "InputError",
    "Job",
    "JobFailedError",
    "JobInterrupted",
    "JobNotFoundError",
    "MissingExtraError",
    "ModelError",
    "ObjectError",
    "Outcome",
    "OutputError",
    "PolicyInput",
    "Report",
    "RowsFailedWarning",
    "SpecError",
    "SpecOptions",
    "SpecbatchError",
    "StoreError",
    "UsageError",
    "Verdict",
    "WaitTimeoutError",
    "__version__",
    "arun",
    "run",
    "submit",
]

# The module that has a name; errors have one of their own.
_HOMES = {
    "Client": "jobs.api.client",
    "Job": "jobs.api.job",
    "Outcome": "jobs.client",
    "PolicyInput": "schemas.policies",
    "Report": "jobs.api.report",
    "SpecOptions": "jobs.api.options",
    "Verdict": "schemas.policies",
    "arun": "jobs.api.run",
    "run": "jobs.api.run",
    "submit": "jobs.api.submit",
}
_ERRORS = "schemas.errors"


if not TYPE_CHECKING:  # a type checker would take every name for one that this finds

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'specbatch' has no attribute {name!r}")
        if name == "__version__":
            value = import_module("specbatch.pipeline.observe.units").version_here()
        else:
            value = getattr(import_module(f"specbatch.{_HOMES.get(name, _ERRORS)}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
