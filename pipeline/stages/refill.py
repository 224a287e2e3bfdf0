"""Refills: more of a pre-generated block, requested over the broker while its sequence runs.

The verify side (`Refills`) asks when a block runs low. The propose side (`Refiller`) continues from
the output so far, with the request's own noise. Messages may be late, doubled or lost: the engine
finds out where a hint continues, and verifies every token of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from specbatch.pipeline.engines.contract import Engines, Request, Wanted
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.tracing.context import CurrentWork, work_on
from specbatch.pipeline.policy.tuning import PILOT_TOKENS
from specbatch.pipeline.runtime.device_time import Timing
from specbatch.pipeline.runtime.last_used import LastUsed
from specbatch.pipeline.stages.requests import (
    continuation,
    requests_of,
    row_and_sample,
    scope_of,
)
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import ReadRows, reader
from specbatch.schemas.draft_switches import DraftSwitches
from specbatch.schemas.errors import DeviceLostError, SpecbatchError
from specbatch.schemas.messages import (
    HINT_EXPIRES_SEC,
    MAX_HINT_TOKENS,
    MAX_OUTPUT_TOKENS,
    HintMessage,
    RefillMessage,
)
from specbatch.schemas.placement import ANYWHERE
from specbatch.schemas.records import JobRow, Stage, request_id_of
from specbatch.schemas.spec import JobSpec, spec_of
from specbatch.schemas.speculation import PRE_GENERATED
from specbatch.schemas.timekeeping import HINTS, Attempt

log = logging.getLogger(__name__)

MOST_OPEN = 64  # asked and unanswered: what a dead proposer's queue can fill up with
PATIENCE = 2 * MOST_OPEN  # unanswered in a row, after which nothing is asked ...
PAUSE_SEC = 120.0  # ... for so long
_JOBS_KEPT, _FILES_KEPT = 4, 4  # of each, in a propose worker's memory


class HintChannel(Protocol):
    """How a verify worker reaches proposers, and they it."""

    @property
    def reply_to(self) -> str:
        """The queue for answers."""
        ...

    def ask(self, proposer: str, message: RefillMessage) -> None:
        """Send to the workers of a proposer, soon or never: the caller does not wait."""
        ...


class Refills:
    """What a verify worker asked for, and the answers. Thread-safe."""

    def __init__(self, channel: HintChannel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._allowed: dict[str, tuple[int, str]] = {}  # request id: group index, proposer
        self._open: dict[str, float] = {}  # request id: when it was asked, oldest first
        self._in_a_row = 0  # that nobody answered
        self._paused_until = -float("inf")
        self._lock = threading.Lock()
        self.asked = self.answers = 0

    @contextmanager
    def allowed(
        self, group_index: int, proposer: str, requests: Sequence[Request]
    ) -> Iterator[None]:
        """Inside the block more may be asked for these requests."""
        mine = {r.request_id: (group_index, proposer) for r in requests}
        with self._lock:
            self._allowed.update(mine)
        try:
            yield
        finally:
            with self._lock:
                for request_id, place in mine.items():
                    # By identity: a newer attempt at the group may have taken the id over.
                    if self._allowed.get(request_id) is place:
                        del self._allowed[request_id]
                        self._open.pop(request_id, None)

    def want(self, wanted: Wanted) -> None:
        """An engine wants more of a block: ask for it, unless too much is unanswered.

        Called in the engine's thread.
        """
        now = self._clock()
        with self._lock:
            place = self._allowed.get(wanted.request_id)
            self._give_up(now)
            open_here = len(self._open) - (wanted.request_id in self._open)
            if place is None or now < self._paused_until or open_here >= MOST_OPEN:
                return
            if len(wanted.output) > MAX_OUTPUT_TOKENS:
                return
            self._open.pop(wanted.request_id, None)
            self._open[wanted.request_id] = now
            self.asked += 1
        job_id, _, _ = wanted.request_id.split("/")
        row, sample = row_and_sample(wanted.request_id)
        message = RefillMessage(
            job_id=job_id,
            group_index=place[0],
            row_index=row,
            sample_index=sample,
            output_ids=wanted.output,
            late=wanted.late,
            reply_to=self._channel.reply_to,
        )
        self._channel.ask(place[1], message)

    def answered(self, message: HintMessage) -> str | None:
        """A hint arrived: the id of the request it is for, None when nobody needs it."""
        request_id = request_id_of(message.job_id, message.row_index, message.sample_index)
        with self._lock:
            self._in_a_row = 0
            self.answers += 1
            self._open.pop(request_id, None)
            return request_id if request_id in self._allowed else None

    def _give_up(self, now: float) -> None:
        """Give up on requests that are too old; after too many of them, ask nothing for a while."""
        for request_id, asked_at in list(self._open.items()):
            if now < asked_at + HINT_EXPIRES_SEC:
                break
            del self._open[request_id]
            self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            log.info("no proposer answers: no refills are asked for in %.0f s", PAUSE_SEC)
            self._paused_until, self._in_a_row = now + PAUSE_SEC, 0


def refilled(
    refills: Refills | None,
    job: JobRow,
    spec: JobSpec,
    group_index: int,
    requests: Sequence[Request],
) -> AbstractContextManager[None]:
    """More of these requests' blocks may be asked for inside, where blocks were made at all."""
    wanted = spec.speculation.depth != "shadow" and any(r.draft_ids for r in requests)
    wanted = wanted and may_be_refilled(job, spec)
    if refills is None or spec.draft_model is None or not wanted:
        return nullcontext()
    return refills.allowed(group_index, spec.draft_model, requests)


def may_be_refilled(job: JobRow, spec: JobSpec) -> bool:
    """Whether the broker and any proposer's worker may see the job's tokens.

    Not those of a job whose texts are not kept, nor tokens that no policy has judged yet. Nor those
    of a job that may not be worked on anywhere, for `--regions` or `--no-spot`.
    """
    return job.privacy.is_full and not spec.policies and spec.placement == ANYWHERE


class Refiller:
    """Writes on from where a request is, on a proposer's engines."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        host: Engines,
        timing: Timing | None = None,
        switches: Callable[[], DraftSwitches] = DraftSwitches,
    ) -> None:
        """`switches`: what an operator has switched off by now."""
        self._switches = switches
        self._store, self._objects, self._host = store, objects, host
        self._timing = timing or Timing()
        self._readers: LastUsed[str, ReadRows] = LastUsed(_JOBS_KEPT)

    def refill(self, message: RefillMessage) -> HintMessage | None:
        """The answer; None where there is nothing to guess, or nobody to guess for.

        Which prompt it is, and how it is sampled, is the store's word and not the message's. Raises
        `DeviceLostError`.
        """
        work_on(CurrentWork(message.job_id, "refill", message.group_index))
        try:
            return self._refill(message)
        except DeviceLostError:
            raise
        except SpecbatchError as error:
            log.info("no refill for job %s: %s", message.job_id, error)
            return None

    def _refill(self, message: RefillMessage) -> HintMessage | None:
        self._host.check()
        job = self._store.get_job(message.job_id)
        if not job.privacy.is_full:  # its spec may be sealed
            return None
        spec = spec_of(job)
        prompts = self._store.prompts_of(message.job_id, message.group_index)
        over = job.state.is_final or job.cancel_requested
        allowed = spec.may_propose and may_be_refilled(job, spec)
        if over or prompts is None or not allowed:
            return None
        read = self._readers.get(job.job_id, lambda: reader(self._objects, job, _FILES_KEPT))
        rows = read(prompts)
        row = next((row for row in rows if row.row_index == message.row_index), None)
        if row is None or message.sample_index >= row.n:
            return None
        if self._switches().is_off(scope_of(spec, row.tag), PRE_GENERATED):
            return None
        asked = requests_of(job.job_id, spec, row, _no_text)[message.sample_index]
        wanted = spec.speculation.pregenerate_tokens
        first = PILOT_TOKENS if wanted == "auto" else wanted  # of the block
        length = min(first + message.late, MAX_HINT_TOKENS)
        request = continuation(asked, message.output_ids, length)
        service = self._host.service(spec.engine.of_proposer())
        with self._timing.working(Attempt(job.job_id, 0, HINTS, Stage.PROPOSE)) as tickets:
            tickets.append(service.submit(job.job_id, [request]))
            (done,) = tickets[0].wait(HINT_EXPIRES_SEC)
        if done.error is not None or not done.token_ids:
            return None
        return HintMessage(
            job_id=job.job_id,
            row_index=message.row_index,
            sample_index=message.sample_index,
            position=len(message.output_ids),
            token_ids=done.token_ids,
        )


def _no_text(_: Sequence[int]) -> str:
    """Drafts are written without regard to stop strings: see `block_request`."""
    return ""
