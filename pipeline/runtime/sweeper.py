"""Re-rings the bell for every unit that is ready or whose lease ran out; sends groups on that wait
for drafts in vain; stops jobs that are over a limit, and closes what nobody may work on any more.

The broker may forget; the store does not. Sweeping twice, or from many processes, is harmless.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Ring
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import Bell, Stage
from specbatch.schemas.refusals import is_news
from specbatch.schemas.speculation import PRE_GENERATED, Decision, DecisionAction

log = logging.getLogger(__name__)

_NAMED = 8  # groups that a reason names
PATIENCE_SEC = 30.0
EAGER_SEC = 2.0  # a worker that took a message claims its unit within that
LEAST_INTERVAL_SEC = 1.0
SILENCE_SEC = 180.0

Kind = tuple[Stage, str | None, int]
Queued = Callable[[Bell], tuple[str, int]]  # the queue that a bell rings on, and what waits there


def unknown(bell: Bell) -> tuple[str, int]:
    return str(_kind(bell)), 0


def _kind(bell: Bell) -> Kind:
    """Bells of one kind ring on one queue."""
    return bell.stage, bell.model, bell.priority


class Sweeper:
    """Sweeps at once, then every `interval_sec`, in a thread of its own; sooner while messages get
    lost.

    A group that nobody drafts for in `propose_patience_sec` goes on without drafts. A bell that
    was rung gets `bell_patience_sec` before it counts as lost; and where as many are `queued` as
    units are due, none is missing, however long they have waited. Where nothing is queued a worker
    has taken the message, and would have claimed the unit at once: a message that did not come to
    that counts as lost after `EAGER_SEC`, and after twice as long each further time.
    """

    def __init__(
        self,
        store: Store,
        ring: Ring,
        interval_sec: float,
        propose_patience_sec: float,
        bell_patience_sec: float = PATIENCE_SEC,
        queued: Queued = unknown,
        silence_sec: float = SILENCE_SEC,
        only_job: str | None = None,
    ) -> None:
        """A worker of which nothing was heard for `silence_sec` is not paid for any longer.

        `only_job`: messages are enqueued for this job alone.
        """
        self._only_job = only_job
        self._silence_sec = silence_sec
        self._store = store
        self._ring = ring
        self._interval_sec = interval_sec
        self._propose_patience_sec = propose_patience_sec
        self._bell_patience_sec = bell_patience_sec
        self._queued = queued
        self._rung: dict[Bell, tuple[float, int]] = {}  # when last, and how often
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
        """Ring for what is due and was not rung for lately (else a long queue would fill up with
        doubles); returns how many bells.

        What else fails keeps no bell from ringing: it is logged, and the first `StoreError` of it
        is raised at the end.
        """
        failed: list[StoreError] = []
        parts = {
            "send on groups that wait for drafts in vain": self.skip_proposals,
            "stop jobs that are over a limit": self.stop_overdue,
            "close what nobody may work on any more": self.close_over,
            "end the sessions of workers that are gone": self.end_silent,
        }
        for what, part in parts.items():
            try:
                part()
            except StoreError as error:
                if is_news(error):
                    log.warning("could not %s; will retry at the next sweep: %s", what, error)
                failed.append(error)
            if failed and self._stop.is_set():  # each part may wait long for a database
                raise failed[0]
        rung = self._ring_for_due()
        if failed:
            raise failed[0]
        return rung

    def _ring_for_due(self) -> int:
        now = time.monotonic()
        due = self._store.due(job_id=self._only_job)
        self._rung = {b: self._rung[b] for b in due if b in self._rung}
        missing = self._missing(due, [b for b in due if self._may_be_lost(b, now)], now)
        lost = sum(bell in self._rung for bell in missing)
        for bell in missing:
            self._ring(bell)
            self._rung[bell] = (now, self._times(bell) + 1)
        self._adapt(lost)
        return len(missing)

    def _adapt(self, lost: int) -> None:
        """Sweep sooner while messages get lost, and step by step later once they do not."""
        least = min(LEAST_INTERVAL_SEC, self._interval_sec)
        if lost:
            self.wait_sec = max(least, self.wait_sec / 4)
        else:
            self.wait_sec = min(self._interval_sec, self.wait_sec * 2)

    def _times(self, bell: Bell) -> int:
        return self._rung[bell][1] if bell in self._rung else 0

    def _waited_sec(self, bell: Bell, now: float) -> float:
        return now - self._rung[bell][0] if bell in self._rung else math.inf

    def _may_be_lost(self, bell: Bell, now: float) -> bool:
        """Whether it was rung long enough ago, if nothing is queued."""
        patience = self._bell_patience_sec
        if self._queued is not unknown:
            patience = min(patience, EAGER_SEC * 2.0 ** min(self._times(bell) - 1, 16))
        return self._waited_sec(bell, now) >= patience

    def _missing(self, due: Sequence[Bell], late: Sequence[Bell], now: float) -> list[Bell]:
        """Of the late bells as many as lack in their queues, those rung longest ago first.

        Else all sweepers together would ring for all that waits, again and again: hundreds of
        bells a second that nobody gets to.
        """
        queue_of: dict[Kind, str] = {}
        lengths: dict[str, int] = {}
        lacking: dict[str, int] = {}
        for kind, example in {_kind(bell): bell for bell in late}.items():
            queue_of[kind], waiting = self._queued(example)
            lengths[queue_of[kind]] = waiting
            lacking.setdefault(queue_of[kind], -waiting)
        for bell in due:
            if (name := queue_of.get(_kind(bell))) is not None:
                lacking[name] += 1
        missing = []
        for bell in sorted(late, key=lambda bell: -self._waited_sec(bell, now)):
            name = queue_of[_kind(bell)]
            if lengths[name] and self._waited_sec(bell, now) < self._bell_patience_sec:
                continue  # it may be one of those that are queued
            if lacking[name] > 0:
                lacking[name] -= 1
                missing.append(bell)
        return missing

    def stop_overdue(self) -> None:
        """Stop jobs that are over a limit."""
        for job_id in sorted(self._store.stop_overdue()):
            about = {"job": job_id}
            log.warning("job %s is over its deadline or budget and stops", job_id, extra=about)

    def close_over(self) -> None:
        """Close what nobody may work on any more."""
        self._store.close_over()

    def end_silent(self) -> None:
        """Pay no longer for workers that nobody hears of."""
        for session_id in self._store.end_silent_sessions(self._silence_sec):
            log.warning("session %s ends: nothing is heard of its worker", session_id)
        self._store.forget_silent_processes(self._silence_sec)

    def skip_proposals(self) -> None:
        """Dead, frozen and missing proposers hold nothing up; the job's decisions say so."""
        patience = self._propose_patience_sec
        skipped: defaultdict[str, list[int]] = defaultdict(list)
        for job_id, index in self._store.skip_proposals(patience):
            skipped[job_id].append(index)
        for job_id, indexes in skipped.items():
            reason = (
                f"{_groups(indexes)} without drafts, for no proposer worker had taken "
                f"{'it' if len(indexes) == 1 else 'them'} up for {patience:g} s"
            )
            log.warning("job %s: %s", job_id, reason, extra={"job": job_id})
            decision = Decision(time.time(), DecisionAction.SKIPPED, PRE_GENERATED, reason)
            try:
                self._store.note_decisions(job_id, [decision])
            except StoreError as error:  # they went on all the same, and have to be rung for
                if is_news(error):
                    log.warning("this could not be noted: %s", error)

    def _run(self) -> None:
        while True:
            try:
                self.sweep()
            except StoreError as error:
                if is_news(error):
                    log.warning("sweep failed, the next one will do: %s", error)
            except Exception:
                log.exception("sweep failed, the next one will do")
            if self._stop.wait(self.wait_sec):
                return


def _groups(indexes: list[int]) -> str:
    if len(indexes) == 1:
        return f"group {indexes[0]} goes on"
    named = ", ".join(map(str, indexes[:_NAMED]))
    more = ", ..." if len(indexes) > _NAMED else ""
    return f"{len(indexes)} groups ({named}{more}) go on"
