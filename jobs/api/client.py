"""`specbatch.Client`: the jobs of a store."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import Any, Self, Unpack

from specbatch.jobs.api.frames import FrameLike
from specbatch.jobs.api.job import Job
from specbatch.jobs.api.options import Place, SubmitOptions, asked
from specbatch.jobs.api.orders import Request
from specbatch.jobs.api.places import settings_of
from specbatch.jobs.cli.checks import check_input_here, tell_beyond_context
from specbatch.jobs.cli.connect import check_broker, forgiving_enqueue
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.engines.models.model_folder import known_context
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client as Jobs
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import JobState


class Client:
    """The jobs of a store. Close it, or use it in a `with`.

    `store_url` and `broker_url` are `SPECBATCH_DATABASE_URL` and `SPECBATCH_BROKER_URL`, which
    count where they are not given; `settings` are further ones, by their names in lower case. To
    look at jobs no broker is needed. Raises `UsageError` and `StoreError`.
    """

    def __init__(
        self, store_url: str | None = None, broker_url: str | None = None, **settings: Any
    ) -> None:
        if "database_url" in settings:
            raise UsageError("the store's URL is called store_url here, not database_url")
        named = {"database_url": store_url, "broker_url": broker_url}
        self._settings = settings_of({**settings, **named})

    @cached_property
    def _store(self) -> Store:
        """Opened on first use: what is wrong with a request is said without it."""
        return make_store(self._settings)

    @cached_property
    def _jobs(self) -> Jobs:
        return make_client(self._settings, forgiving_enqueue(self._settings), self._store)

    def submit(
        self,
        data: FrameLike | Place | None = None,
        *,
        model: Place | None = None,
        draft_model: Place | None = None,
        output: Place | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Job:
        """Put a job on the broker, for workers elsewhere, and return without waiting.

        Arguments are those of `run`. A frame is written into the workspace, which workers must
        reach, and its columns come back in the results (`keep_columns` is `all`, unless it is
        given). Without `output` a frame's completions are in the workspace too. While a job of
        the same call has not ended, that one is returned.

        Raises `UsageError` for a request that is wrong, `SpecbatchError` where the broker is out
        of reach, and `StoreError`.
        """
        made = asked(model, draft_model, options, SubmitOptions)
        request = Request(data, output, made, whole=True)
        if request.library is None:
            check_input_here(request.spec.input)
        tell_beyond_context(request.spec, known_context(request.spec.verifier))
        check_broker(self._settings)
        objects = Objects.of_settings(self._settings)
        order = request.order(self._jobs, self._settings, objects, made.idempotency_key)
        row, _ = self._jobs.submit(order.spec, order.key)
        return self._job(row.job_id)

    def jobs(self, limit: int = 50, *, state: str | None = None) -> list[Job]:
        """The newest jobs, newest first. `state`: only those that are queued, running, done,
        partial, failed or cancelled."""
        if state is not None and state not in list(JobState):
            raise UsageError(f"no job is {state!r}: name one of {', '.join(JobState)}")
        found = self._jobs.jobs(limit, None if state is None else JobState(state))
        return [self._job(row.job_id) for row in found]

    def job(self, which: str) -> Job:
        """A job by its id, 6 or more first characters of it, its name, or `latest`.

        Raises `JobNotFoundError`.
        """
        return self._job(self._jobs.job(which).job_id)

    def _job(self, job_id: str) -> Job:
        return Job(self._settings, self._store, self._jobs, job_id)

    def close(self) -> None:
        """Leave the store; the client's jobs can be asked nothing more."""
        if "_store" in self.__dict__:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._settings.masked['database_url'] or 'the workspace'}>"
