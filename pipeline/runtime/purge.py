"""Purges jobs: deletes their texts by their tenants' retention, by age, or one job by name.

A job's output belongs to its submitter and stays, unless its deletion is asked for too. Imports no
pyarrow: it deletes files and reads none.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import orjson

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.contract import MOST_JOBS, Store
from specbatch.pipeline.observe.tracing.job_logs import logs_of, workspace_of
from specbatch.pipeline.outputs.names import (
    LISTED,
    MANIFEST,
    STAGING,
    begin_with,
    is_within,
    is_written,
    owner_of,
)
from specbatch.pipeline.storage.history_files import delete_histories
from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects, join, tidy
from specbatch.pipeline.storage.workspace import delete_own, is_frame_file
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Due:
    """A job to purge, and why."""

    job: JobRow
    why: str


@dataclass(frozen=True, slots=True)
class Purger:
    """Finds the jobs that are due and purges them. `retention_days`: of tenants."""

    store: Store
    objects: Objects
    retention_days: Mapping[str, float]
    workspace: str = ""  # of the workers here: they log there, wherever a job's own files are

    @classmethod
    def of_settings(cls, settings: Settings, store: Store) -> Purger:
        """Needs no key: it reads nothing."""
        objects = Objects.of_settings(settings, ASKED_RETRY_SEC)
        return cls(store, objects, settings.retention_days, settings.workspace)

    def due(
        self,
        tenant: str | None = None,
        older_than_sec: float | None = None,
        page: int = MOST_JOBS,
    ) -> Iterator[Due]:
        """Ended jobs that are due, the oldest first, of all tenants or of one.

        Without an age the tenants' retention counts; raises `UsageError` if none is set. The store
        is asked for `page` jobs at a time.
        """
        if older_than_sec is not None:
            why = f"older than {older_than_sec / DAY_SEC:g} days"
            return (Due(job, why) for job in self._ended(older_than_sec, page, tenant))
        days = {t: d for t, d in self.retention_days.items() if tenant in (None, t)}
        if not days:
            raise UsageError(
                "nothing says how long texts are kept"
                + (f" of tenant {tenant!r}" if tenant else "")
                + ": set SPECBATCH_RETENTION_DAYS, or give --older-than or --job"
            )
        found = [self._kept_over(name, limit, page) for name, limit in days.items()]
        return heapq.merge(*found, key=lambda one: (one.job.finished_at or 0.0, one.job.job_id))

    def asked_for(self, job_id: str) -> Due:
        """One job, whatever its age. Raises `JobNotFoundError`, and `UsageError` for a job that has
        not ended."""
        job = self.store.get_job(job_id)
        rules.check_purge(job)
        return Due(job, "asked for")

    def _kept_over(self, tenant: str, days: float, page: int) -> Iterator[Due]:
        for job in self._ended(days * DAY_SEC, page, tenant):
            yield Due(job, f"kept {days:g} days, which is the tenant's retention")

    def left_behind(
        self,
        page: int = MOST_JOBS,
        failed: Callable[[JobRow, ObjectError], None] | None = None,
    ) -> list[JobRow]:
        """Private jobs whose files are still there, because their worker died before it deleted
        them. The store is asked for `page` jobs at a time.

        If a job's files cannot be listed, `failed` is called and the search continues; without it
        that raises `ObjectError`.
        """
        left = []
        # They stay unpurged, so a page may be full of jobs that are in order.
        for job in self._ended(0.0, page, private_only=True):
            try:
                if is_over(self.store, job) and self.objects.list(job.workspace_uri):
                    left.append(job)
            except ObjectError as error:
                if failed is None:
                    raise
                failed(job, error)
        return left

    def _ended(
        self, age_sec: float, page: int, tenant: str | None = None, private_only: bool = False
    ) -> Iterator[JobRow]:
        """All jobs that ended at least so long ago."""
        last: JobRow | None = None
        while found := self.store.ended_jobs(age_sec, tenant, page, private_only, last):
            yield from found
            last = found[-1]

    def clear(self, job: JobRow) -> int:
        """Delete the job's files; returns how many."""
        return delete_own(self.objects, job)

    def purge(self, due: Due, with_output: bool = False) -> Iterator[int]:
        """Purge the job; yields how many rows are done so far.

        First the job is marked, so that it cannot be retried; then its files go, then its rows. If
        files cannot be deleted, the rows are emptied all the same. The job stays due until
        `finish`, so an interrupted purge is done again.

        Raises `UsageError` for a job that has not ended, and at the end `ObjectError` for files
        that are still there.
        """
        rows = self.store.purge(due.job.job_id, due.why, unfinished=True)
        marked = next(rows, None)
        if with_output:  # logged first: an audit that misses the output finds the reason
            said = {"rows": [], "why": due.why, "output": True}
            self.store.note_action(due.job.job_id, EntryKind.PURGED, said)
        problem = self._delete_files(due.job, with_output)
        if marked is not None:
            yield marked
        yield from rows
        if problem is not None:
            raise problem

    def finish(self, due: Due) -> None:
        """Nothing of the job is left, here or in other jobs' histories: it is no longer due."""
        for _ in self.store.purge(due.job.job_id, due.why):
            pass

    def forget_past(
        self,
        tenant: str,
        besides: Collection[str],
        failed: Callable[[JobRow, ObjectError], None],
    ) -> bool:
        """Delete the histories of the tenant's jobs `besides` the purged ones, whose outputs they
        hold. Running jobs do without. Returns whether all are gone; `failed` is called for each
        job where that fails.

        Call it after `purge`, because marked jobs get into no new history, and before `finish`.
        """
        is_gone = True
        for job in self._others(tenant):
            if job.job_id not in besides:
                try:
                    delete_histories(self.objects, job)
                except ObjectError as error:
                    failed(job, error)
                    is_gone = False
        return is_gone

    def _others(self, tenant: str) -> Iterator[JobRow]:
        """Live jobs first: a job that ends meanwhile is then found among the ended ones too."""
        for state in JobState:
            if not state.is_final:
                for job in self.store.list_jobs(sys.maxsize, state):
                    if job.tenant == tenant:
                        yield job
        yield from self._ended(0.0, MOST_JOBS, tenant)

    def _delete_files(self, job: JobRow, with_output: bool) -> ObjectError | None:
        """Delete what can be deleted; returns the first error of what cannot."""
        problem = None
        deleting: list[Callable[[JobRow], object]] = [
            *(self.clear, self._delete_logs, self._delete_frame)
        ]
        if with_output:
            deleting.append(self._delete_output)
        elif job.state is JobState.FAILED:  # no publication has deleted it
            deleting.append(self._delete_staged)
        for delete in deleting:
            try:
                delete(job)
            except ObjectError as error:
                problem = problem or error
        return problem

    def _delete_logs(self, job: JobRow) -> None:
        """Delete what workers logged about the job."""
        for workspace in {self.workspace, workspace_of(job.workspace_uri)}:
            folder = logs_of(workspace, job.job_id) if workspace else None
            if folder is not None:
                for file in self.objects.list(str(folder)):
                    self.objects.delete(file.uri)
                with suppress(OSError):  # a folder that is missing, or has a new file
                    folder.rmdir()

    def _delete_frame(self, job: JobRow) -> None:
        """Delete the input if it was made of a frame: then it is in the workspace, and no user's.
        Each job has one of its own."""
        uri = str((job.spec.get("input") or {}).get("uri") or "")
        for workspace in {self.workspace, workspace_of(job.workspace_uri)}:
            if workspace and uri and is_frame_file(workspace, uri):
                self.objects.delete(uri)

    def _delete_output(self, job: JobRow) -> None:
        """Delete what the job's manifest lists, then the manifest, then what an unfinished
        publication left. Another job's output is left alone."""
        folder = tidy(job.output_uri)
        if self._delete_listed(job, folder) and owner_of(self.objects, folder) == job.job_id:
            for begin in begin_with(job.job_id):
                self.objects.abort_uploads(join(folder, begin))
            self.objects.clear(join(folder, STAGING))
            root = f"{folder.rstrip('/')}/"
            for file in self.objects.list(root):
                if is_written(file.uri.removeprefix(root), job.job_id):
                    self.objects.delete(file.uri)

    def _delete_staged(self, job: JobRow) -> None:
        """Delete parts that were never published: they are no output."""
        folder = tidy(job.output_uri)
        try:
            if job.privacy.is_full and owner_of(self.objects, folder) == job.job_id:
                self.objects.clear(join(folder, STAGING))
        except ObjectError as error:  # perhaps why the job failed: the purge must not fail, too
            log.warning("the output of job %s was not looked at: %s", job.job_id, error)

    def _delete_listed(self, job: JobRow, folder: str) -> bool:
        """Whether no other job's manifest is there."""
        uri = join(folder, MANIFEST)
        if self.objects.head(uri) is None:
            return True
        try:
            manifest = orjson.loads(self.objects.get_bytes(uri))
            names = [str(file["name"]) for listed in LISTED for file in manifest.get(listed, ())]
            owner = manifest["job_id"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ObjectError(f"{uri} is not a manifest; nothing was deleted there") from error
        if owner != job.job_id:
            return False
        for name in names:
            if not is_within(name):
                raise ObjectError(f"{uri} lists {name}, which is not in the output")
            self.objects.delete(join(folder, name))
        self.objects.delete(uri)
        return True


def clear(store: Store, objects: Objects, job_id: str) -> int:
    """Delete the files of an ended job unless part of it can be retried; returns how many."""
    job = store.get_job(job_id)
    return delete_own(objects, job) if is_over(store, job) else 0


def is_over(store: Store, job: JobRow) -> bool:
    """Whether nothing of the job can be retried, so that its files are not needed any more."""
    done = job.state in (JobState.DONE, JobState.PARTIAL)
    return done and not store.failed_groups(job.job_id)
