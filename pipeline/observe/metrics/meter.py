"""Counts what a worker does: records that the store accepted, groups on their way, engine steps.

A job's label is its name and a row's label its tag, as the store keeps them. Where nothing is kept
of a job's texts (`hash-only`), both are `private`. Metrics show nothing else of a job or a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.metric_names import Labels
from specbatch.schemas.errors import FencedError
from specbatch.schemas.figures import StepFigures
from specbatch.schemas.policies import outcome
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import TICK_KINDS, TICKS_PER_SEC, passes_of
from specbatch.schemas.records import (
    NO_TAG,
    CompletionRecord,
    JobRow,
    Lease,
    Origin,
    Stage,
)
from specbatch.schemas.timekeeping import usd_of

PRIVATE = "private"  # for the name and the tags of a job of which no texts are kept
UNKNOWN = "unknown"  # a job that this process never read; the proposer of drafts without a source
NO_PROPOSER = "none"
MOST_JOBS = 1024  # whose names are kept
MOST_STEPS = 256  # that are buffered

if TYPE_CHECKING:  # the light install has no prometheus_client
    from specbatch.pipeline.observe.metrics.registry import Metrics

log = logging.getLogger(__name__)
P = ParamSpec("P")


def _harmless(
    count: Callable[Concatenate[Meter, P], None],
) -> Callable[Concatenate[Meter, P], None]:
    """Log an error of counting once and continue: the work itself is done by then."""

    @wraps(count)
    def guarded(self: Meter, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            count(self, *args, **kwargs)
        except Exception:
            if count.__name__ not in self._broken:
                self._broken.add(count.__name__)
                log.exception("metrics are incomplete from now on")

    return guarded


class Meter:
    """Counts what a worker does; a scrape sees all of a commit or nothing of it. Thread-safe.

    The methods that the store's listener calls raise nothing.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._jobs: OrderedDict[str, tuple[str, PrivacyMode]] = OrderedDict()  # by job id
        self._claimed: dict[Lease, float] = {}  # leases in use, and since when
        self._asked: dict[Lease, bool] = {}  # see `asking`; whether a heartbeat missed it meanwhile
        self._broken: set[str] = set()  # methods whose failure was logged
        self._turned: dict[str, dict[str, bool]] = {}  # by job id and proposer: drafting is off
        self._collapsed: dict[str, dict[str, bool]] = {}  # by job id and proposer
        metrics.ask(names.BREAKER_OPEN, partial(self._of_jobs_here, self._turned))
        metrics.ask(names.COLLAPSED, partial(self._of_jobs_here, self._collapsed))

    # --- jobs -------------------------------------------------------------------------------
    @_harmless
    def knows(self, job: JobRow) -> None:
        """Label the job by its name from now on."""
        with self._lock:
            self._jobs[job.job_id] = (job.name, job.privacy)
            self._jobs.move_to_end(job.job_id)
            while len(self._jobs) > MOST_JOBS:
                old, _ = self._jobs.popitem(last=False)
                self._turned.pop(old, None)
                self._collapsed.pop(old, None)

    def job_label(self, job_id: str) -> str:
        name, mode = self._jobs.get(job_id, (UNKNOWN, PrivacyMode.FULL))
        return PRIVATE if mode is PrivacyMode.HASH_ONLY else name

    def _tag_label(self, job_id: str, tag: str | None) -> str:
        _, mode = self._jobs.get(job_id, (UNKNOWN, PrivacyMode.FULL))
        if mode is PrivacyMode.HASH_ONLY:
            return PRIVATE
        return NO_TAG if tag is None else tag

    # --- what the store accepted -------------------------------------------------------------
    @_harmless
    def recorded(self, job_id: str, records: Sequence[CompletionRecord]) -> None:
        """Completions that were committed, together."""
        job = self.job_label(job_id)
        proposed: Counter[tuple[str, str]] = Counter()  # by proposer and tag
        accepted: Counter[tuple[str, str]] = Counter()
        emitted: Counter[int] = Counter()
        for record in records:
            if record.reused_from is None:
                emitted.update(record.origins)
            for proposer, drafted in by_proposer(record).items():
                key = (proposer, self._tag_label(job_id, record.tag))
                proposed[key] += drafted[0]
                accepted[key] += drafted[1]
        cost = sum(record.cost_usd for record in records)
        metrics = self.metrics
        with metrics.together():
            for key, by in proposed.items():
                metrics.count(names.PROPOSED, job, *key, by=by)
                metrics.count(names.ACCEPTED, job, *key, by=accepted[key])
            for origin in Origin:
                by = emitted[origin]
                metrics.count(names.EMITTED, job, origin.name.lower(), by=by)
            copies = [record for record in records if record.reused_from is not None]
            copied = sum(len(record.token_ids) for record in copies)
            metrics.count(names.EMITTED, job, "reused", by=copied)
            metrics.count(names.REUSED, job, by=len(copies))
            for reason, count in Counter(r.finish_reason for r in records).items():
                metrics.count(names.COMPLETIONS, job, reason.value, by=count)
            for tag, count in Counter(r.tag for r in records if r.is_malformed).items():
                metrics.count(names.MALFORMED, job, self._tag_label(job_id, tag), by=count)
            said = [(r.tag, found) for r in records if (found := outcome(r.rulings)) is not None]
            ruled = Counter((tag, found.verdict.ruling) for tag, found in said)
            for (tag, verdict), count in ruled.items():
                label = self._tag_label(job_id, tag)
                metrics.count(names.RULED, job, label, verdict.value, by=count)
            prompts = sum(r.prompt_tokens for r in records if r.sample_index == 0)
            metrics.count(names.PROMPT_TOKENS, job, by=prompts)
            metrics.count(names.COST, job, by=cost)
            metrics.count(names.BASELINE_COST, job, by=max(0.0, cost + saved_usd(records)))

    @_harmless
    def quarantined(self, codes: Iterable[str]) -> None:
        for code, count in Counter(codes).items():
            self.metrics.count(names.QUARANTINED, code, by=count)

    # --- groups on their way ----------------------------------------------------------------
    @_harmless
    def claimed(self, lease: Lease, waited_sec: float | None = None) -> None:
        with self._lock:
            self._claimed[lease] = self._clock()
            if lease.job_id in self._jobs:
                self._jobs.move_to_end(lease.job_id)
        if waited_sec is not None:
            self.metrics.observe(names.QUEUE_SECONDS, max(0.0, waited_sec), lease.stage.value)

    @_harmless
    def done(self, lease: Lease) -> None:
        """A group went to its next stage, or a job was read or published."""
        began = self._leaves(lease)
        if began is not None and lease.group_index is not None:
            took = self._clock() - began
            self.metrics.observe(names.COMPUTE_SECONDS, took, lease.stage.value)

    @_harmless
    def given_back(self, lease: Lease, is_failure: bool) -> None:
        if self._leaves(lease) is not None and is_failure:
            self.metrics.count(names.RETRIES, lease.stage.value)

    @contextmanager
    def asking(self, lease: Lease, ends: bool = False) -> Iterator[None]:
        """Around a call to the store about a lease: counts a refusal. With `ends` the attempt is
        over whatever the store answers."""
        with self._lock:
            self._asked[lease] = False
        try:
            yield
            if self._asked.get(lease) and not ends:
                self._fenced(lease)  # a heartbeat missed it meanwhile
        except FencedError:
            self._fenced(lease)
            raise
        finally:
            if ends:
                self._leaves(lease)
            with self._lock:
                self._asked.pop(lease, None)

    @_harmless
    def missed(self, leases: set[Lease]) -> None:
        """A heartbeat did not find these leases, so they are lost. A lease that the store is being
        asked about may have ended a moment ago: there the store's answer decides."""
        with self._lock:
            asked = self._asked.keys() & leases
            self._asked |= dict.fromkeys(asked, True)
        for lease in leases - asked:
            self._fenced(lease)

    @_harmless
    def _fenced(self, lease: Lease) -> None:
        """Another worker holds the lease. An attempt counts once, whoever finds that out."""
        if self._leaves(lease) is not None:
            self.metrics.count(names.FENCED, lease.stage.value)

    def _leaves(self, lease: Lease) -> float | None:
        with self._lock:
            return self._claimed.pop(lease, None)

    # --- the sweeper ------------------------------------------------------------------------
    @_harmless
    def swept(self) -> None:
        self.metrics.count(names.SWEEPS)

    @_harmless
    def enqueued(self, stage: Stage) -> None:
        self.metrics.count(names.ENQUEUED, stage.value)

    # --- engines ----------------------------------------------------------------------------
    def observer(self, verifies: bool) -> EngineMeter:
        """Counts the work of one kind of engines."""
        return EngineMeter(self, verifies)

    def ask_blocks(self, read: Callable[[], Iterable[Sequence[int]]]) -> None:
        """At every reading, ask for the KV blocks of all engines, by state."""

        def blocks() -> Mapping[Labels, float]:
            sums = map(sum, zip(*read(), strict=True))
            return {(state,): n for state, n in zip(names.BLOCK_STATES, sums, strict=False)}

        self.metrics.ask(names.KV_BLOCKS, blocks)

    # --- drafting that is off ---------------------------------------------------------------
    def drafting_switched(self, job_id: str, proposer: str, is_off: bool) -> None:
        """A decision about drafting on a job."""
        with self._lock:
            self._turned.setdefault(job_id, {})[proposer] = is_off

    def acceptance_collapsed(self, job_id: str, proposer: str, is_far_below: bool) -> None:
        """Acceptance on a job fell far below its best, or is back."""
        with self._lock:
            self._collapsed.setdefault(job_id, {})[proposer] = is_far_below

    def _of_jobs_here(self, told: Mapping[str, Mapping[str, bool]]) -> Mapping[Labels, float]:
        """What was told of the jobs that are verified here now, by job and proposer."""
        with self._lock:
            here = {lease.job_id for lease in self._claimed if lease.stage is Stage.VERIFY}
            of_jobs = {job_id: dict(told.get(job_id, {})) for job_id in here}
        found: dict[Labels, float] = {}
        for job_id, of in of_jobs.items():
            for proposer, is_so in of.items():
                key = (self.job_label(job_id), proposer)
                found[key] = max(found.get(key, 0.0), float(is_so))
        return found


class EngineMeter:
    """Counts what a worker's engines do; the engine's thread calls every method.

    Steps are buffered, and counted when there are many or somebody reads: a step of a small model
    takes little longer than counting it. Of an engine that only drafts, all time is drafting, and
    nobody waits for its tokens.
    """

    def __init__(self, meter: Meter, verifies: bool) -> None:
        self._meter = meter
        self._verifies = verifies
        self._metrics = meter.metrics
        self._steps: deque[StepFigures] = deque()
        self._metrics.before_reading(self._count)

    def stepped(self, step: StepFigures) -> None:
        self._steps.append(step)
        if len(self._steps) >= MOST_STEPS:
            self._count()

    def _count(self) -> None:
        steps: list[StepFigures] = []
        with suppress(IndexError):  # in whichever threads: each step is taken once
            while True:
                steps.append(self._steps.popleft())
        if not steps:
            return
        ticks = [sum(of_kind) for of_kind in zip(*(step.ticks for step in steps), strict=True)]
        with self._metrics.together():
            if self._verifies:
                self._count_verified(steps)
                for kind, of_kind in zip(TICK_KINDS, ticks, strict=True):
                    self._metrics.count(names.DEVICE_SECONDS, kind, by=of_kind / TICKS_PER_SEC)
            else:
                self._metrics.count(names.DEVICE_SECONDS, "draft", by=sum(ticks) / TICKS_PER_SEC)

    def _count_verified(self, steps: Sequence[StepFigures]) -> None:
        metrics = self._metrics
        tokens = Counter(tokens for step in steps for tokens, _ in step.passes)
        fill = Counter(n / step.most_sequences for step in steps for _, n in step.passes)
        depths: Counter[tuple[str, int]] = Counter()
        for step in steps:
            depths.update(step.depths)
        metrics.count(names.VERIFIER_CALLS, by=tokens.total())
        for value, times in tokens.items():
            metrics.observe(names.TOKENS_PER_CALL, value, times=times)
        for share, times in fill.items():
            metrics.observe(names.BATCH_FILL, share, times=times)
        for (proposer, depth), times in depths.items():
            metrics.observe(names.DEPTH, depth, proposer or NO_PROPOSER, times=times)
        metrics.count(names.PREEMPTIONS, by=sum(step.preemptions for step in steps))
        raised = sum(step.raised_passes for step in steps)
        metrics.count(names.FAILED_CALLS, "pass", by=raised)
        failed = sum(step.proposer_failures for step in steps)
        metrics.count(names.FAILED_CALLS, "proposer", by=failed)

    def first_token(self, job_id: str, sec: float) -> None:
        if self._verifies:
            self._metrics.observe(names.FIRST_TOKEN, sec, self._meter.job_label(job_id))

    def finished(self, job_id: str, sec_per_token: float) -> None:
        if self._verifies:
            self._metrics.observe(names.PER_TOKEN, sec_per_token, self._meter.job_label(job_id))

    def drafting_switched(self, job_id: str, proposer: str, is_off: bool) -> None:
        self._meter.drafting_switched(job_id, proposer, is_off)

    def acceptance_collapsed(self, job_id: str, proposer: str, is_far_below: bool) -> None:
        self._meter.acceptance_collapsed(job_id, proposer, is_far_below)

    def drifted(self, proposer: str, nats: float) -> None:
        self._metrics.observe(names.DRIFT, nats, proposer)


def saved_usd(records: Iterable[CompletionRecord]) -> float:
    """What drafting saved a group, over the steps that were measured; below 0: it cost more; 0
    without a measured step.

    Measured steps bear the cost of drafts made ahead by their part of the completion's time.
    """
    taken = baseline = 0.0
    for c in records:
        taken += c.decode_sec * TICKS_PER_SEC * c.price_microusd
        share = min(1.0, c.decode_sec / c.compute_sec) if c.compute_sec else 0.0
        taken += share * c.ahead_ticks * c.ahead_price_microusd
        baseline += c.baseline_sec * TICKS_PER_SEC * c.price_microusd
    return usd_of(baseline - taken) if baseline else 0.0


def by_proposer(record: CompletionRecord) -> dict[str, tuple[int, int]]:
    """Draft tokens by proposer, proposed and accepted. They add up to the record's own."""
    if not record.proposed:
        return {}
    origin = record.provenance
    if not origin.makers or sum(origin.drafted) != record.proposed:
        return {UNKNOWN: (record.proposed, record.accepted)}
    found: dict[str, tuple[int, int]] = {}
    accepted, _ = passes_of(record.origins)
    accepted += [0] * (len(origin.makers) - len(accepted))
    # Accepted tokens that a stop inside of the last draft cut off count as accepted.
    accepted[-1] += record.accepted - sum(accepted)
    for source, proposed, agreed in zip(origin.makers, origin.drafted, accepted, strict=True):
        name = origin.sources[source]
        before = found.get(name, (0, 0))
        found[name] = (before[0] + proposed, before[1] + agreed)
    return found
