"""Purges jobs one after the other: those whose files cannot be reached do not keep the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.purge import Due, Purger
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.records import JobRow
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

Bar = Callable[[Due], AbstractContextManager[Callable[..., None]]]


class Purged(NamedTuple):
    jobs: int
    rows: int

    @property
    def sentence(self) -> str:
        return f"{self.jobs:,} job{'s' if self.jobs != 1 else ''} purged, {self.rows:,} rows"


class Failures:
    """Jobs whose files cannot be reached, each reported once: the others need not wait for them."""

    def __init__(self, again: str, complain: Callable[[str], None]) -> None:
        self.job_ids: set[str] = set()
        self._again = again  # who tries again
        self._complain = complain

    def note(self, job: JobRow, error: ObjectError) -> None:
        if job.job_id not in self.job_ids:
            self._complain(
                f"could not delete files of job {job.job_id}; {self._again} retries: {error}"
            )
            self.job_ids.add(job.job_id)

    def note_past(self, job: JobRow, error: ObjectError) -> None:
        self._complain(
            f"could not delete the history file of job {job.job_id}, which has purged outputs; "
            f"{self._again} retries: {error}"
        )
        self.job_ids.add(job.job_id)


@dataclass(frozen=True, slots=True)
class Purging:
    """Purges what is due; `remark` hears of jobs that are left out, `bar` shows rows."""

    purger: Purger
    failures: Failures
    output: bool  # the files of outputs as well
    remark: Callable[[str], None]
    bar: Bar = lambda _due: nullcontext(_unseen)

    def all_of(self, due: Iterable[Due], is_listed: bool) -> Purged:
        """All jobs, then what their tenants' others have of them; only then they are due no more.

        A job of a list may have been sent back to work since.
        """
        jobs = rows = 0
        seen: set[str] = set()
        to_finish: dict[str, list[Due]] = {}  # by tenant
        for one in due:
            try:
                done, error = self._purge(one)
            except UsageError as refused:
                if not is_listed:
                    raise
                self.remark(f"job {one.job.job_id} is left as it is: {refused}")
                continue
            rows += done
            seen.add(one.job.job_id)
            of_tenant = to_finish.setdefault(one.job.tenant, [])
            if error is None:
                of_tenant.append(one)
            else:
                self.failures.note(one.job, error)
        for tenant, of_tenant in to_finish.items():
            if self.purger.forget_past(tenant, seen, self.failures.note_past):
                for one in of_tenant:
                    self.purger.finish(one)
                jobs += len(of_tenant)
        return Purged(jobs, rows)

    def clear_all(self) -> int:
        """Of how many jobs files that should have been gone are deleted."""
        cleared = 0
        for row in self.purger.left_behind(failed=self.failures.note):
            try:
                cleared += bool(self.purger.clear(row))
            except ObjectError as error:
                self.failures.note(row, error)
        return cleared

    def _purge(self, due: Due) -> tuple[int, ObjectError | None]:
        """Rows that were still to do, and what files could not go for; a bar on a terminal."""
        begun, done = None, 0
        with self.bar(due) as update:
            try:
                for done in self.purger.purge(due, self.output):
                    begun = done if begun is None else begun
                    update(completed=done)
            except ObjectError as error:
                return done - (begun or 0), error
        return done - (begun or 0), None


def _unseen(**_: int) -> None:
    """Nobody watches."""


def purge_due(
    settings: Settings, store: Store, tenant: str | None, output: bool
) -> tuple[str, bool]:
    """What tenants' retention says is due. Returns a sentence, and whether all files are gone.

    Raises `UsageError` when no tenant has a retention.
    """
    purger = Purger.of_settings(settings, store)
    failures = Failures("the next purge", log.warning)
    purging = Purging(purger, failures, output, log.info)
    purged = purging.all_of(purger.due(tenant), is_listed=True)
    purging.clear_all()
    count = len(failures.job_ids)
    left = f"; files of {count:,} jobs are left, and the next purge retries" if count else ""
    return purged.sentence + left, not count
