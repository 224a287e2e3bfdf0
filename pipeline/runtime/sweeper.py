"""Enqueues work again whose message is missing. The broker may forget; the store does not.

`Sweeper` enqueues every unit that is ready or whose lease expired. It also skips proposals that
nobody makes, stops jobs over a limit, and closes what nobody may work on any more. Sweeping twice,
or from many processes, is harmless.

`Requeuer` puts a message back into its queue that this worker may not serve.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import JobNotFoundError, StoreError
from specbatch.schemas.numeric_class import Pinned, Serves
from specbatch.schemas.placement import PlacementSpec, Site
from specbatch.schemas.records import DueWork, JobRow, Stage
from specbatch.schemas.refusals import should_log
from specbatch.schemas.speculation import PRE_GENERATED, Decision, DecisionAction

log = logging.getLogger(__name__)

_NAMED = 8  # groups that a reason names
PATIENCE_SEC = 30.0
EAGER_SEC = 2.0  # a worker that took a message claims its unit within that
LEAST_INTERVAL_SEC = 1.0
SILENCE_SEC = 180.0
ACCEPTANCE_DAYS = 400  # of which the acceptance is kept
REQUEUE_EVERY_SEC = 0.5  # at most one message per process
FRESH_SEC = 5.0  # for which the list of live workers is not read again

Kind = tuple[Stage, str | None, int]
QueueLength = Callable[[DueWork], tuple[str, int]]  # the queue of a unit, and what waits there


def unknown(work: DueWork) -> tuple[str, int]:
    return str(_kind(work)), 0


def _kind(work: DueWork) -> Kind:
    """Work of one kind goes to one queue."""
    return work.stage, work.model, work.priority


class Sweeper:
    """Sweeps at once, then every `interval_sec`, in a thread of its own; sooner while messages get
    lost.

    A group that nobody drafts for within `propose_patience_sec` continues without drafts. A message
    counts as lost after `message_patience_sec`. If as many are queued as units are due, none is
    missing, however long they have waited. If nothing is queued, a worker has taken the message and
    would have claimed the unit at once: then it counts as lost after `EAGER_SEC`, and after twice
    as long each further time.
    """

    def __init__(
        self,
        store: Store,
        enqueue: Enqueue,
        interval_sec: float,
        propose_patience_sec: float,
        message_patience_sec: float = PATIENCE_SEC,
        queue_length: QueueLength = unknown,
        silence_sec: float = SILENCE_SEC,
        only_job: str | None = None,
    ) -> None:
        """The session of a worker ends that was not heard of for `silence_sec`.

        `only_job`: enqueue work of this job alone.
        """
        self._only_job = only_job
        self._silence_sec = silence_sec
        self._store = store
        self._enqueue = enqueue
        self._interval_sec = interval_sec
        self._propose_patience_sec = propose_patience_sec
        self._message_patience_sec = message_patience_sec
        self._queue_length = queue_length
        self._held_back: set[str] = set()  # ids of jobs that wait for a budget
        self._enqueued: dict[DueWork, tuple[float, int]] = {}  # when last, and how often
        self._forget_at = 0.0  # when old acceptance is due to be deleted, on the monotonic clock
        self.wait_sec = interval_sec  # until the next sweep
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def sweep(self) -> int:
        """Enqueue what is due and was not enqueued lately; returns how many units.

        (A long queue would otherwise fill up with duplicates.) If another part of the sweep fails,
        it is logged, work is enqueued all the same, and the first `StoreError` is raised at the
        end.
        """
        failed: list[StoreError] = []
        parts: dict[str, Callable[[], object]] = {
            "skip proposals that nobody makes": self.skip_proposals,
            "stop jobs that are over a limit": self.stop_overdue,
            "see which jobs wait for a budget": self.tell_held_back,
            "close what nobody may work on any more": self._store.close_over,
            "end the sessions of workers that are gone": self.end_silent,
            "forget acceptance of long ago": self.forget_old_acceptance,
        }
        for what, part in parts.items():
            try:
                part()
            except StoreError as error:
                if should_log(error):
                    log.warning("could not %s; will retry at the next sweep: %s", what, error)
                failed.append(error)
            if failed and self._stop.is_set():  # each part may wait long for a database
                raise failed[0]
        enqueued = self._enqueue_due()
        if failed:
            raise failed[0]
        return enqueued

    def _enqueue_due(self) -> int:
        now = time.monotonic()
        due = self._store.due(job_id=self._only_job)
        self._enqueued = {work: self._enqueued[work] for work in due if work in self._enqueued}
        missing = self._missing(due, [work for work in due if self._may_be_lost(work, now)], now)
        lost = sum(work in self._enqueued for work in missing)
        for work in missing:
            self._enqueue(work)
            self._enqueued[work] = (now, self._times(work) + 1)
        self._adapt(lost)
        return len(missing)

    def _adapt(self, lost: int) -> None:
        """Sweep sooner while messages get lost, and step by step later once they do not."""
        least = min(LEAST_INTERVAL_SEC, self._interval_sec)
        if lost:
            self.wait_sec = max(least, self.wait_sec / 4)
        else:
            self.wait_sec = min(self._interval_sec, self.wait_sec * 2)

    def _times(self, work: DueWork) -> int:
        return self._enqueued[work][1] if work in self._enqueued else 0

    def _waited_sec(self, work: DueWork, now: float) -> float:
        return now - self._enqueued[work][0] if work in self._enqueued else math.inf

    def _may_be_lost(self, work: DueWork, now: float) -> bool:
        """Whether it was enqueued long enough ago, if its queue is empty."""
        patience = self._message_patience_sec
        if self._queue_length is not unknown:
            patience = min(patience, EAGER_SEC * 2.0 ** min(self._times(work) - 1, 16))
        return self._waited_sec(work, now) >= patience

    def _missing(
        self, due: Sequence[DueWork], late: Sequence[DueWork], now: float
    ) -> list[DueWork]:
        """Of the late units as many as their queues lack, those enqueued longest ago first.

        Otherwise all sweepers together would enqueue everything that waits, again and again:
        hundreds of messages a second that nobody gets to.
        """
        queue_of: dict[Kind, str] = {}
        lengths: dict[str, int] = {}
        lacking: dict[str, int] = {}
        for kind, example in {_kind(work): work for work in late}.items():
            queue_of[kind], waiting = self._queue_length(example)
            lengths[queue_of[kind]] = waiting
            lacking.setdefault(queue_of[kind], -waiting)
        for work in due:
            if (name := queue_of.get(_kind(work))) is not None:
                lacking[name] += 1
        missing = []
        for work in sorted(late, key=lambda work: -self._waited_sec(work, now)):
            name = queue_of[_kind(work)]
            if lengths[name] and self._waited_sec(work, now) < self._message_patience_sec:
                continue  # it may be one of those that are queued
            if lacking[name] > 0:
                lacking[name] -= 1
                missing.append(work)
        return missing

    def stop_overdue(self) -> None:
        """Stop jobs that are over a limit."""
        for job_id in sorted(self._store.stop_overdue()):
            about = {"job": job_id}
            log.warning("job %s is over its deadline or budget and stops", job_id, extra=about)

    def tell_held_back(self) -> None:
        """Log jobs that begin to wait for a budget of their tenant."""
        found = {one.job_id: one for one in self._store.budget_shortfalls()}
        for job_id in sorted(found.keys() - self._held_back):
            log.warning("job %s %s", job_id, found[job_id].words, extra={"job": job_id})
        self._held_back = set(found)

    def end_silent(self) -> None:
        """End the sessions of workers that are gone: nobody pays for them any longer."""
        for session_id in self._store.end_silent_sessions(self._silence_sec):
            log.warning("session %s ends: nothing is heard of its worker", session_id)
        self._store.forget_silent_processes(self._silence_sec)

    def forget_old_acceptance(self) -> None:
        """Once a day is often enough."""
        if time.monotonic() >= self._forget_at:
            self._store.forget_old_acceptance(ACCEPTANCE_DAYS)
            self._forget_at = time.monotonic() + DAY_SEC

    def skip_proposals(self) -> None:
        """Let groups continue whose proposer is dead, frozen or missing; note it as a decision."""
        patience = self._propose_patience_sec
        skipped: defaultdict[str, list[int]] = defaultdict(list)
        for job_id, index in self._store.skip_proposals(patience):
            skipped[job_id].append(index)
        for job_id, indexes in skipped.items():
            reason = (
                f"{_groups(indexes)} drafting: no propose worker claimed "
                f"{'it' if len(indexes) == 1 else 'them'} within {patience:g} s"
            )
            log.warning("job %s: %s", job_id, reason, extra={"job": job_id})
            decision = Decision(time.time(), DecisionAction.SKIPPED, PRE_GENERATED, reason)
            try:
                self._store.note_decisions(job_id, [decision])
            except StoreError as error:  # they must be enqueued all the same
                if should_log(error):
                    log.warning("could not store the decision: %s", error)

    def _run(self) -> None:
        while True:
            try:
                self.sweep()
            except StoreError as error:
                if should_log(error):
                    log.warning("sweep failed; retrying at the next sweep: %s", error)
            except Exception:
                log.exception("sweep failed; retrying at the next sweep")
            if self._stop.wait(self.wait_sec):
                return


def _groups(indexes: list[int]) -> str:
    if len(indexes) == 1:
        return f"group {indexes[0]} skips"
    named = ", ".join(map(str, indexes[:_NAMED]))
    more = ", ..." if len(indexes) > _NAMED else ""
    return f"{len(indexes)} groups ({named}{more}) skip"


class Requeuer:
    """Puts work messages back that a worker took who may not do it. Thread-safe.

    Workers of all numeric classes, regions and pools share their model's queue, so one may take a
    message for a group that it must not verify, or leaves to a cheaper pool. Workers that may would
    stand idle until a sweeper misses the message. It goes back slowly: otherwise two workers could
    pass it to and fro thousands of times.
    """

    def __init__(
        self,
        store: Store,
        enqueue: Enqueue,
        silence_sec: float,
        every_sec: float = REQUEUE_EVERY_SEC,
        clock: Callable[[], float] = time.monotonic,
        site: Site | None = None,
    ) -> None:
        """Workers that were not heard of for `silence_sec` count as dead. `site`: where this worker
        is; None: that does not matter."""
        self._site = site
        self._store = store
        self._enqueue = enqueue
        self._silence_sec = silence_sec
        self._every_sec = every_sec
        self._clock = clock
        self._lock = threading.Lock()  # held while a message waits: that limits the rate
        self._lacking: set[tuple[str, Stage]] = set()  # jobs that no live worker has at a stage
        self._read_at = -FRESH_SEC

    def requeue(
        self,
        job_id: str,
        serves: Serves | None,
        stage: Stage = Stage.VERIFY,
        left: bool = False,
    ) -> None:
        """A worker that serves this took a message for the job, and claimed nothing. `left`: it
        leaves the job to a cheaper pool."""
        try:
            job = self._store.get_job(job_id)
        except JobNotFoundError:
            return
        takes = serves is None or serves.takes(Pinned.of(job))
        if takes and not left and self._is_placed(job):
            return
        with self._lock:
            due = [] if self._is_waiting(job_id, stage) else self._due(job_id, stage)
            if due:
                time.sleep(self._every_sec)
                log.debug("requeued %s: it is for other workers", due[0])
                self._enqueue(due[0])

    def _is_placed(self, job: JobRow) -> bool:
        """Whether a worker here may have the job's rows."""
        placement = PlacementSpec.model_validate(job.spec.get("placement") or {})
        return self._site is None or placement.allows(self._site)

    def _due(self, job_id: str, stage: Stage) -> list[DueWork]:
        """A unit of the job at this stage. It does not matter which: the claim decides."""
        return [w for w in self._store.due(limit=1, job_id=job_id) if w.stage is stage]

    def _is_waiting(self, job_id: str, stage: Stage) -> bool:
        """Whether no live worker may do this stage: then the sweeper's messages are enough."""
        if self._clock() - self._read_at >= FRESH_SEC:
            self._lacking = self._store.backlog().lacking(self._silence_sec)
            self._read_at = self._clock()
        return (job_id, stage) in self._lacking
