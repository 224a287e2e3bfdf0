"""What the stages need of a process's engines: hosts, services and tickets, and no torch.

`EngineHost` is such a host. So is `jobs/chaos/stand_in.py`'s, which has no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specbatch.pipeline.engines.exact.model.model_folder import ModelFolder
from specbatch.pipeline.engines.exact.state.sequence import Completion, Request
from specbatch.pipeline.engines.exact.state.stats import EngineStats
from specbatch.pipeline.engines.exact.ticket import Units
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation import AcceptanceCount
from specbatch.schemas.speculation_spec import SpeculationSpec


class Submitted(Protocol):
    """Requests on their way."""

    @property
    def lessons(self) -> Lessons:
        """What their job taught, once all are done."""
        ...

    @property
    def begun_ns(self) -> int:
        """When they were handed over, in nanoseconds since the epoch."""
        ...

    @property
    def ended_ns(self) -> Mapping[str, int]:
        """When requests have ended so far, by their ids."""
        ...

    def finished(self) -> Sequence[Completion]:
        """Those that have ended of themselves so far."""
        ...

    @property
    def ticks(self) -> Ticks:
        """The requests' share of the engine's time so far, whatever came of it."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no more time will be spent on it."""
        ...

    def ask_back(self, units: Units) -> None:
        """Have half of what the engine has not started given back, from the end of `units`.

        Those are ids of the requests in order; what is one unit stays together.
        """
        ...

    def next_given_back(self) -> Sequence[Request]:
        """Waits until requests are given back, and returns them; none once all else is done."""
        ...

    def wait(self, timeout_sec: float | None = None) -> list[Completion]:
        """Completions in the order of the requests.

        Raises `RequestCancelledError`, or `EngineError` when the engine failed or the time is over.
        """
        ...


class Service(Protocol):
    """One engine for many callers."""

    def submit(
        self, job_id: str, requests: Sequence[Request], priors: Sequence[AcceptanceCount] = ()
    ) -> Submitted:
        """Have requests join the running batch. Raises `RequestCancelledError` once it is closed,
        and `DeviceLostError`."""
        ...


class Engines(Protocol):
    """The engines of one worker process with one verifier (or one proposer). Thread-safe."""

    @property
    def verifier(self) -> ModelFolder:
        """The model whose word counts; of a propose worker, its draft model."""
        ...

    @property
    def proposer(self) -> ModelFolder | None:
        """The draft model beside it."""
        ...

    @property
    def stats(self) -> Sequence[EngineStats]:
        """Of all engines there are."""
        ...

    @property
    def stepping_since(self) -> int | None:
        """When the earliest step that runs now began, by `time_book.now`; None: none does."""
        ...

    def serves(self) -> Serves:
        """The numeric classes in which its verifier can run here; it is not loaded for that."""
        ...

    def service(self, spec: EngineSpec) -> Service:
        """The engine for a job's dtype, exactness and weights. Raises `MissingExtraError`, and
        `RequestCancelledError` once it is stopped."""
        ...

    def pins(self, wanted: SpeculationSpec) -> Mapping[str, str]:
        """Names of draft models by tag. Raises `UsageError` for what is not registered here."""
        ...

    def check(self) -> None:
        """Raises `DeviceLostError` once an engine here has lost its device."""
        ...

    def cancel(self, job_id: str) -> None:
        """Drop all requests of a job before the next step; their tickets raise."""
        ...

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """What may follow the first `position` output tokens of a request."""
        ...

    def give_up(self, error: DeviceLostError) -> None:
        """A step here will not end: tickets fail with the error, and `close` waits for nothing."""
        ...

    def stop(self) -> None:
        """Begin to close, and wait for nothing: tickets fail at once where no step runs."""
        ...

    def close(self) -> None:
        """Stop after the current step; open tickets fail with `RequestCancelledError`."""
        ...
