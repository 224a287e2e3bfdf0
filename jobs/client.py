"""Submit a job, ask after it, have its figures, stop it: for programs that bring a scheduler.

    with open_client() as client:
        job = client.submit("nightly.yaml", key="nightly/2026-11-22")
        while not client.poll(job.job_id).is_final: ...
        print(client.outcome(job.job_id).as_json())

The light install does: neither torch nor pyarrow is imported. Where the store and the broker are
is said by the settings, as for the commands. Thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specbatch.jobs.cli.connect import check_broker_url, load_settings
from specbatch.pipeline.bootstrap import make_client, make_store, patient
from specbatch.pipeline.inputs.contract import INPUT_FILES, files_digest
from specbatch.pipeline.inputs.sources import list_files
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.spec_input import build_spec, parse_spec, resolved_spec
from specbatch.pipeline.outputs.names import owner_of
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.storage.objects import Objects, tidy
from specbatch.schemas.audit import MANIFEST_NAME, data_uri
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

FAILED_ALONE = "failed"  # the word for a row that failed by itself, beside the quarantine codes

Spec = JobSpec | Mapping[str, Any] | str | Path


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job that was asked for. Not `created`: this key had made it before."""

    job_id: str
    state: JobState
    created: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands right now."""

    job_id: str
    state: JobState
    stop_reason: str | None = None  # why it is being stopped, or was, in words

    @property
    def is_final(self) -> bool:
        return self.state.is_final


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job; before its end, the result so far."""

    job_id: str
    name: str
    state: JobState
    rows: int  # of the input
    rows_done: int  # finished or refused
    rows_failed: int  # refused, or failed
    completions: int
    prompt_tokens: int
    completion_tokens: int
    proposed: int  # draft tokens that the verifier checked
    accepted: int
    acceptance_rate: float | None  # None: nothing was drafted
    cost_usd: float
    queue_sec: float  # of all groups
    compute_sec: float
    wall_sec: float | None
    output_uri: str
    data_uri: str | None  # completions and nothing else; None: none were published, or not yet
    manifest_uri: str | None  # the same
    quarantined: Mapping[str, int] = field(default_factory=dict)  # rows by the reason's code
    failed_groups: int = 0  # units that a retry would do again
    error: str | None = None
    stop_reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a scheduler to keep: no text of any row is in them."""
        return asdict(self) | {"state": str(self.state), "quarantined": dict(self.quarantined)}

    @property
    def in_words(self) -> str:
        """One line for a log."""
        rate = self.acceptance_rate
        parts = [
            f"job {self.job_id} is {self.state}",
            f"{self.rows_done - self.rows_failed:,} of {self.rows:,} rows finished",
            f"{self.completion_tokens:,} tokens",
            "nothing drafted" if rate is None else f"{rate:.1%} of drafts accepted",
            f"${self.cost_usd:.6f}",
        ]
        if self.rows_failed:
            codes = ", ".join(f"{code} {count:,}" for code, count in self.quarantined.items())
            parts.append(f"{self.rows_failed:,} rows failed" + (f" ({codes})" if codes else ""))
        reason = self.error or self.stop_reason
        return ", ".join(parts) + (f": {reason}" if reason else "")


class JobClient:
    """The jobs of one store. Close it, or use it in a `with`."""

    def __init__(
        self, store: Store, client: Client, objects: Callable[[], Objects] = Objects
    ) -> None:
        """`objects` opens what holds the inputs, when it is first needed."""
        self._store = store
        self._client = client
        self._objects = cache(objects)

    def submit(self, spec: Spec, key: str | None = None, base: Path | None = None) -> Ticket:
        """Submit a job, or find the one that this key made before: it is never done twice.

        `spec` is a mapping or a spec file's path. Relative paths in a mapping are resolved against
        `base` (the working folder), those in a file against its folder. Raises `SpecError`, and
        `IdempotencyError` where the key made a job of another spec.
        """
        job, created = self._client.submit(as_spec(spec, base), key)
        return Ticket(job.job_id, job.state, created)

    def find(self, tenant: str, key: str) -> str | None:
        """The id of the tenant's job that was submitted with this key; None: there is none."""
        job = self._client.find(tenant, key)
        return None if job is None else job.job_id

    def input_version(self, spec: JobSpec) -> str | None:
        """A digest of the names and versions (ETags, or sizes and times) of the input's files.

        None where they are not there, or this process may not or cannot list them, and for a
        table: its job has pinned a snapshot, and reads no other. Raises `ObjectError` for a store
        of objects that may answer later.
        """
        if spec.input.table is not None:
            return None
        try:
            return files_digest(list_files(spec.input, self._objects()))
        except UsageError:
            return None

    def version_read(self, job_id: str) -> str | None:
        """The same of the files that a job has read; None before it has opened them."""
        version = self._client.job(job_id).report.get(INPUT_FILES)
        return None if version is None else str(version)

    def output_holder(self, spec: JobSpec) -> str | None:
        """The id of the job whose output lies, or is being written, where the spec's would.

        None where nothing lies there, and where this process may not or cannot look.
        """
        try:
            return owner_of(self._objects(), tidy(spec.output.uri))
        except (UsageError, ObjectError):
            return None

    def writes_to(self, job_id: str, spec: JobSpec) -> bool:
        """Whether the job has the output that the spec names."""
        return tidy(self._client.job(job_id).output_uri) == tidy(spec.output.uri)

    def poll(self, job_id: str) -> Standing:
        """How the job stands: one look at one row. Raises `JobNotFoundError`, `StoreError`."""
        job = self._client.job(job_id)
        reason = job.stop_reason if job.cancel_requested else None
        return Standing(job.job_id, job.state, reason)

    def outcome(self, job_id: str) -> Outcome:
        """State, counts, cost, acceptance, and where the output is."""
        job, progress = self._client.job(job_id), self._client.progress(job_id)
        quarantined = Counter(row.code for row in self._store.rejected(job.job_id))
        failed = [p.rows for _, word, p, _ in self._store.failed_groups(job_id) if word == "failed"]
        if alone := failed.count(1):
            quarantined[FAILED_ALONE] += alone
        wall_sec = None
        if job.started_at is not None and job.finished_at is not None:
            wall_sec = max(0.0, job.finished_at - job.started_at)
        output = job.output_uri.rstrip("/")
        return Outcome(
            job_id=job.job_id,
            name=job.name,
            state=progress.state,
            rows=progress.rows_total,
            rows_done=progress.rows_done,
            rows_failed=progress.rows_failed,
            completions=progress.completions,
            prompt_tokens=progress.prompt_tokens,
            completion_tokens=progress.completion_tokens,
            proposed=progress.proposed,
            accepted=progress.accepted,
            acceptance_rate=progress.acceptance_rate,
            cost_usd=progress.cost_usd,
            queue_sec=progress.queue_sec,
            compute_sec=progress.compute_sec,
            wall_sec=wall_sec,
            output_uri=job.output_uri,
            data_uri=data_uri(job.output_uri, progress.state),
            manifest_uri=f"{output}/{MANIFEST_NAME}" if progress.state.has_output else None,
            quarantined=dict(quarantined.most_common()),
            failed_groups=len(failed),
            error=job.error,
            stop_reason=job.stop_reason if job.cancel_requested else None,
        )

    def cancel(self, job_id: str, reason: str = "cancelled on request") -> Standing:
        """Ask a job to stop; finished rows are kept and published. `reason` says by whom."""
        self._client.cancel(job_id, reason)
        return self.poll(job_id)

    def retry(self, job_id: str) -> int:
        """Have what failed or was cancelled of an ended job done; how many units that is.

        Nothing that is finished is done, or paid for, again. Raises `UsageError` for a job that
        has not ended.
        """
        return self._client.retry(job_id)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()


def open_client(settings: Settings | None = None, **values: Any) -> JobClient:
    """A client by the environment's settings; `values` win over these.

    While the broker is away a job is stored all the same: workers find it there. Raises
    `UsageError` for settings that cannot be, and for a broker that reaches no other process.
    """
    settings = settings or load_settings(**values)
    app = check_broker_url(settings)
    from specbatch.workers.app import make_enqueue

    store = make_store(settings)
    client = make_client(settings, patient(make_enqueue(app)), store)
    return JobClient(store, client, lambda: Objects.of_settings(settings))


def as_spec(spec: Spec, base: Path | None = None) -> JobSpec:
    """A checked spec with its paths resolved. Raises `SpecError`."""
    if isinstance(spec, JobSpec):
        return spec.resolved(base or Path.cwd())
    if isinstance(spec, Mapping):
        return resolved_spec(spec, base)
    return build_spec((base or Path.cwd()) / spec, {})


def spec_from_text(text: str, name: str, base: Path) -> JobSpec:
    """The same of the text of a spec file called `name`, whose folder is `base`."""
    return resolved_spec(parse_spec(text, f"spec file {name}"), base)
