"""What becomes of a unit of work, whatever its worker meets: kept alive, given back, or ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.context import Work, work_on
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, Tracing
from specbatch.pipeline.privacy.tenants import NOBODY_PRIVATE, Privacy
from specbatch.pipeline.runtime.client import Ring
from specbatch.pipeline.runtime.leases import Held, LeaseKeeper
from specbatch.pipeline.runtime.outage import Outage
from specbatch.pipeline.stages import telling
from specbatch.pipeline.stages.ringing import Ringing
from specbatch.schemas.errors import (
    DeviceLostError,
    FencedError,
    ModelChangedError,
    NoEngineError,
    ObjectError,
    RequestCancelledError,
    SpecbatchError,
    StoreError,
    UsageError,
)
from specbatch.schemas.records import GroupWork, JobRow, Lease
from specbatch.schemas.refusals import RIGHTS

log = logging.getLogger(__name__)


def _lies_in(uri: str, folder: str) -> bool:
    return uri == folder or uri.startswith(f"{folder.rstrip('/')}/")


class UnshownError(Exception):
    """A bug met on work whose texts are not kept; the words of the error that it stands for, less
    what they quoted."""


class Guarding(Ringing):
    """What the stages work under."""

    def __init__(
        self,
        store: Store,
        ring: Ring,
        keeper: LeaseKeeper,
        privacy: Privacy = NOBODY_PRIVATE,
        tracing: Tracing = UNTRACED,
        outage: Outage | None = None,
    ) -> None:
        super().__init__(store, ring)
        self._outage = outage or Outage()
        self._keeper = keeper
        self._privacy = privacy
        self._tracing = tracing

    @contextmanager
    def _guarded(self, lease: Lease, host: Engines | None = None) -> Iterator[Held]:
        """Keep the lease alive; on failure give the unit back with the reason."""
        on_cancel = (lambda: host.cancel(lease.job_id)) if host else (lambda: None)
        work_on(Work.of(lease))
        try:
            with (
                self._tracing.attempt(lease) as span,
                self._keeper.hold(lease, on_cancel, span) as held,
            ):
                yield held
        except FencedError as error:
            log.info("dropped: %s", error)
        except (StoreError, ObjectError) as error:
            if self._lies_with_rights(lease, error) or not error.refused:
                self._failed(lease, error)
            else:
                self._refused(lease, error)
        except RequestCancelledError:
            if held.cancelled.is_set():
                self._store.cancel_group(lease)
                self._ring_job(lease.job_id)
            else:
                self._store.release(lease, "the worker was stopped", forgiven=True)
        except ModelChangedError as error:
            # Whoever has the right files may do it, and so may this worker once it has them.
            words = self._words(lease, error)
            log.warning("job %s group %s: %s", lease.job_id, lease.group_index, words)
            self._store.release(lease, words, forgiven=True)
        except UsageError as error:
            # The job itself is wrong; no retry will help.
            if lease.group_index is None:
                self._store.fail_job(lease, self._words(lease, error))
            else:
                self._store.release(lease, self._words(lease, error), whole=True)
                self._ring_again(lease)
        except DeviceLostError as error:
            words = self._words(lease, error)
            released = self._store.release(lease, words, forgiven=error.blameless)
            self._ring_again(lease, released.cut_off)
            raise
        except SpecbatchError as error:
            self._failed(lease, error)
        except Exception as error:
            words = self._words(lease, error)
            released = self._store.release(lease, words)
            self._ring_again(lease, released.cut_off)
            if f"{type(error).__name__}: {error}" == words:
                raise
            # Whoever logs it must see neither its words nor those of what it came from.
            raise UnshownError(words).with_traceback(error.__traceback__) from None

    def _failed(self, lease: Lease, error: SpecbatchError) -> None:
        words = self._words(lease, error)
        log.warning("job %s group %s: %s", lease.job_id, lease.group_index, words)
        # A file, the storage, or what an engine is made of: no row's fault.
        damaged = isinstance(error, ObjectError | NoEngineError)
        released = self._store.release(lease, words, whole=damaged)
        self._ring_again(lease, released.cut_off)

    # --- places that refuse to be written -----------------------------------------------------
    def _lies_with_rights(self, lease: Lease, error: SpecbatchError) -> bool:
        """Whether this one job's output lacks rights, which do not come by themselves."""
        cause = error.__cause__
        rights = isinstance(cause, OSError) and cause.errno in RIGHTS
        return rights and not self._outage.ends and self._is_of_one_job(lease, error)

    def _is_of_one_job(self, lease: Lease, error: SpecbatchError) -> bool:
        """Whether no other job needs the place: it is an output, or what is made on the way."""
        if lease.group_index is not None or not isinstance(error, ObjectError):
            return False
        return not _lies_in(error.place, self._store.get_job(lease.job_id).workspace_uri)

    def _refused(self, lease: Lease, error: SpecbatchError) -> None:
        """Give the unit back, without an attempt, and hold back what needs that place."""
        give_back = partial(self._store.release, lease, self._words(lease, error), forgiven=True)
        try:
            give_back()
        except StoreError as unkept:
            if not unkept.refused:
                raise
            self._outage.begin(error, {lease: give_back})
            return
        if self._is_of_one_job(lease, error):
            self._outage.begin_of_job(lease.job_id, error)
        else:
            self._outage.begin(error, self._probes(error))

    def _probes(self, error: SpecbatchError) -> Mapping[Hashable, Callable[[], object]]:
        """What tries the place again, without computing anything for it, by a name."""
        del error
        return {}

    def _begin(self, held: Held, job: JobRow, work: GroupWork | None = None) -> None:
        """The job is known: mind its deadline, and tell whose work it is."""
        self._keeper.mind(held, job.deadline_at)
        telling.begun(held.span, held.lease.stage, job, work)

    def _words(self, lease: Lease, error: BaseException) -> str:
        """What the store keeps of an error, and a log shows."""
        try:
            job = self._store.get_job(lease.job_id)
        except SpecbatchError:
            job = None
        return self._privacy.error(job, error)

    @staticmethod
    def _engines(host: Engines | None, kind: str) -> Engines:
        if host is None:
            raise UsageError(
                f"this worker has no engine to {kind} with: start `specbatch worker {kind}`"
            )
        host.check()  # nothing is claimed once the device is gone
        return host
