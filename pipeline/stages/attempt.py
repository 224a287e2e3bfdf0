"""One attempt at a unit of work: claimed, kept alive, and given back whatever goes wrong.

What a stage raises ends its attempt: the unit is given back with the reason, except after a lost
lease or a cancel, and another claim does it again with the same outputs. Lost devices and bugs are
raised on as well; only a lost device ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from specbatch.pipeline.engines.contract import Engines, Ticket
from specbatch.pipeline.observe.tracing.context import CurrentWork, work_on
from specbatch.pipeline.runtime.leases import Held
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.storage.objects import probe
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
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import GroupWork, JobRow, Lease, Stage
from specbatch.schemas.refusals import RIGHTS
from specbatch.schemas.timekeeping import Attempt

log = logging.getLogger(__name__)


class UnshownError(Exception):
    """A bug met on work whose texts are not kept: the words of the original error without what they
    quoted."""


def claim_next(
    context: StageContext,
    stage: Stage,
    model: str,
    job_id: str,
    index: int,
    serves: Serves | None = None,
) -> GroupWork | None:
    """Claim the next group in fair-share order.

    If there is none, claim the group that the message names: its job may spell the model
    differently, or the group is to be closed. Jobs that are left to cheaper pools are skipped.
    """
    store, holder = context.store, (context.owner, context.lease_sec)
    mine = context.placer.jobs() if context.placer is not None and serves is not None else None
    if context.only_job is not None and serves is None:  # else `serves` names the one job
        return store.claim_group(job_id, index, stage, *holder)
    work = store.claim_next(stage, model, *holder, serves, mine)
    if work is None and mine is not None and job_id not in mine:
        return None
    return work or store.claim_group(job_id, index, stage, *holder, serves)


@contextmanager
def attempt_on_device(
    context: StageContext, lease: Lease, host: Engines
) -> Iterator[tuple[Held, list[Ticket]]]:
    """An attempt with an engine. It is charged with the device time of the tickets in the list."""
    with (
        context.timing.working(Attempt.of(lease)) as tickets,
        attempt(context, lease, lambda: host.cancel(lease.job_id)) as held,
    ):
        yield held, tickets


def begin(context: StageContext, held: Held, job: JobRow, work: GroupWork | None = None) -> None:
    """The job is known: watch its deadline, and note in the span whose work it is."""
    context.lease_keeper.watch_deadline(held, job.deadline_at)
    spans.begun(held.span, held.lease.stage, job, work)


@contextmanager
def attempt(
    context: StageContext, lease: Lease, on_cancel: Callable[[], None] = lambda: None
) -> Iterator[Held]:
    """Keep the lease alive inside the block; on failure give the unit back with the reason."""
    store = context.store
    work_on(CurrentWork.of(lease))
    try:
        with (
            context.tracing.attempt(lease) as span,
            context.lease_keeper.hold(lease, on_cancel, span) as held,
        ):
            yield held
    except FencedError as error:
        log.info("attempt abandoned, lease lost: %s", error)
    except (StoreError, ObjectError) as error:
        if not error.refused or _lacks_rights(context, lease, error):
            _fail(context, lease, error)
        else:
            _pause(context, lease, error)
    except RequestCancelledError:
        if held.cancelled.is_set():
            store.cancel_group(lease)
        else:
            store.release(lease, "the worker was stopped", forgiven=True)
        context.enqueue_publish(lease.job_id)
    except ModelChangedError as error:
        # A worker that has the right files may do it, also this one once it has them.
        reason = _reason(context, lease, error)
        log.warning("job %s group %s: %s", lease.job_id, lease.group_index, reason)
        store.release(lease, reason, forgiven=True)
        if lease.stage is not Stage.PUBLISH:  # the publication itself would fail again at once
            context.enqueue_publish(lease.job_id)
    except UsageError as error:
        # A job's own stage: no retry will help. A group: another worker may be able to.
        reason = _reason(context, lease, error)
        if lease.group_index is None:
            log.info("job %s fails: %s", lease.job_id, reason)
            store.fail_job(lease, reason)
        else:
            store.release(lease, reason, whole=True)
            context.enqueue_again(lease)
    except DeviceLostError as error:
        reason = _reason(context, lease, error)
        released = store.release(lease, reason, forgiven=error.blameless)
        context.enqueue_again(lease, released.split_off)
        raise
    except SpecbatchError as error:
        _fail(context, lease, error)
    except Exception as error:
        reason = _reason(context, lease, error)
        context.enqueue_again(lease, store.release(lease, reason).split_off)
        if f"{type(error).__name__}: {error}" == reason:
            raise
        # The log must show neither its words nor those of its causes.
        raise UnshownError(reason).with_traceback(error.__traceback__) from None


def _reason(context: StageContext, lease: Lease, error: BaseException) -> str:
    """The words of an error that the store keeps and a log shows."""
    try:
        job = context.store.get_job(lease.job_id)
    except SpecbatchError:
        job = None
    return context.privacy.error(job, error)


def _fail(context: StageContext, lease: Lease, error: SpecbatchError) -> None:
    reason = _reason(context, lease, error)
    log.warning("job %s group %s: %s", lease.job_id, lease.group_index, reason)
    # A damaged file, the storage, or what an engine is made of: no row is at fault.
    damaged = isinstance(error, ObjectError | NoEngineError)
    released = context.store.release(lease, reason, whole=damaged)
    context.enqueue_again(lease, released.split_off)


# --- places that refuse writes ----------------------------------------------------------------
def _pause(context: StageContext, lease: Lease, error: StoreError | ObjectError) -> None:
    """Give the unit back without using up an attempt, and hold back what needs that place."""
    outage = context.outage
    reason = _reason(context, lease, error)
    give_back = partial(context.store.release, lease, reason, forgiven=True)
    try:
        give_back()
    except StoreError as again:
        if not again.refused:
            raise
        outage.begin(error, {lease: give_back})
        return
    if _is_of_one_job(context, lease, error):
        outage.begin_of_job(lease.job_id, error)
    elif isinstance(error, ObjectError) and error.place:
        folder = error.place.rpartition("/")[0]
        outage.begin(error, {folder: partial(probe, context.objects, folder)})
    else:
        outage.begin(error)


def _lacks_rights(context: StageContext, lease: Lease, error: SpecbatchError) -> bool:
    """Whether this one job's output lacks rights, which nobody grants without being told."""
    cause = error.__cause__
    rights = isinstance(cause, OSError) and cause.errno in RIGHTS
    return rights and not context.outage.ends and _is_of_one_job(context, lease, error)


def _is_of_one_job(context: StageContext, lease: Lease, error: SpecbatchError) -> bool:
    """Whether no other job needs the place: it is the job's output, or a file on the way to it."""
    if lease.group_index is not None or not isinstance(error, ObjectError):
        return False
    workspace = context.store.get_job(lease.job_id).workspace_uri
    return error.place != workspace and not error.place.startswith(f"{workspace.rstrip('/')}/")
