"""All metrics by name: what they are, of which type, with which labels. Everything else asks here.

The dashboards, the alerts and the documented table are held to this list by tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specbatch.schemas.provenance import TICK_KINDS
from specbatch.schemas.records import FinishReason, JobState, Origin, Stage


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Whose figure it is."""

    PROCESS = "process"  # of what this process did: add up over processes
    STORE = "store"  # of the whole store, the same from every process: take the maximum


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Names of counters end in `_total`; units are in the name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    scope: Scope = Scope.PROCESS
    buckets: tuple[float, ...] = ()  # of a histogram, rising
    # What labels may say, where all of it is known beforehand: such series begin with 0.
    values: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    highest: bool = False  # of a gauge: among processes that share a port the highest counts


Values = tuple[str, ...]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_LONG = (*_SECONDS[6:], 3600, 3 * 3600, 8 * 3600)
_SHORT = (0.0001, 0.00025, 0.0005, *_SECONDS[:11])
_SHARES = tuple(round(share / 10, 1) for share in range(1, 11))
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

ORIGINS: Values = tuple(origin.name.lower() for origin in Origin)
FINISHED: Values = tuple(reason.value for reason in FinishReason)
GROUP_STAGES: Values = tuple(s.value for s in (Stage.PROPOSE, Stage.VERIFY, Stage.RECORD))
STAGES: Values = (Stage.INGEST.value, *GROUP_STAGES, Stage.PUBLISH.value)
LIVE_STATES: Values = tuple(state.value for state in JobState if not state.is_final)
BLOCK_STATES: Values = ("used", "free", "cached")
FAILURES: Values = ("pass", "proposer")
UNIT_STATES: Values = ("ready", "leased")
RESULTS: Values = ("same", "different")


def _counter(
    name: str,
    text: str,
    *labels: str,
    scope: Scope = Scope.PROCESS,
    values: tuple[Values, ...] = (),
) -> Metric:
    return Metric(f"specbatch_{name}_total", Kind.COUNTER, text, labels, scope, values=values)


def _gauge(
    name: str,
    text: str,
    *labels: str,
    scope: Scope = Scope.PROCESS,
    values: tuple[Values, ...] = (),
    highest: bool = False,
) -> Metric:
    full = f"specbatch_{name}"
    return Metric(full, Kind.GAUGE, text, labels, scope, values=values, highest=highest)


def _histogram(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    *labels: str,
    values: tuple[Values, ...] = (),
) -> Metric:
    full = f"specbatch_{name}"
    return Metric(full, Kind.HISTOGRAM, text, labels, buckets=buckets, values=values)


STORE = Scope.STORE

# --- tokens, as the store took them -----------------------------------------------------------
PROPOSED = _counter("proposed_tokens", "draft tokens verified", "job", "proposer", "tag")
ACCEPTED = _counter("accepted_tokens", "draft tokens accepted", "job", "proposer", "tag")
EMITTED = _counter(
    "emitted_tokens", "tokens of completions; origin: plain, accepted, corrected, bonus",
    "job", "origin",
)  # fmt: skip
PROMPT_TOKENS = _counter("prompt_tokens", "prompt tokens of recorded rows, of each row once", "job")
COMPLETIONS = _counter("completions", "recorded completions", "job", "finish_reason")
COST = _counter("cost_usd", "dollars attributed to recorded completions", "job")
BASELINE_COST = _counter(
    "baseline_cost_usd",
    "dollars they would have cost at depth 0: their cost and what was saved, by control steps",
    "job",
)

# --- the engine, all that was done ------------------------------------------------------------
VERIFIER_CALLS = _counter("engine_verifier_calls", "forward passes of the verifier")
TOKENS_PER_CALL = _histogram(
    "engine_tokens_per_call", "tokens verified by one forward pass", _TOKENS
)
DEPTH = _histogram(
    "engine_speculation_depth",
    "draft tokens of one sequence in one step; proposer: none at depth 0",
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32), "proposer",
)  # fmt: skip
BATCH_FILL = _histogram(
    "engine_batch_fill_ratio", "sequences in a pass ÷ most that are let in", _SHARES
)
KV_BLOCKS = _gauge(
    "engine_kv_blocks", "the verifier's KV blocks; state: used, free, cached", "state",
    values=(BLOCK_STATES,),
)  # fmt: skip
PREEMPTIONS = _counter("engine_preemptions", "sequences put off for want of KV blocks")
FAILED_CALLS = _counter(
    "engine_failed_calls", "calls that raised and were got over; what: pass, proposer", "what",
    values=(FAILURES,),
)  # fmt: skip
DEVICE_SECONDS = _counter(
    "engine_device_seconds", f"engines' device time by what it went into: {', '.join(TICK_KINDS)}",
    "kind", values=(TICK_KINDS,),
)  # fmt: skip
FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds", "from a request's arrival at the engine", _SECONDS, "job"
)
PER_TOKEN = _histogram(
    "time_per_output_token_seconds", "of finished requests, after the first token", _SHORT, "job"
)
BREAKER_OPEN = _gauge(
    "breaker_open",
    "1 while drafting is off by decision on a job that is worked on here; proposer *: all drafting",
    "job", "proposer", highest=True,
)  # fmt: skip
DRIFT = _histogram(
    "drift_kl_nats", "KL(verifier ‖ proposer) at sampled positions",
    (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10), "proposer",
)  # fmt: skip

# --- work through the stages ------------------------------------------------------------------
QUEUE_SECONDS = _histogram(
    "queue_seconds", "a group, ready to claimed", _LONG, "stage", values=(GROUP_STAGES,)
)
COMPUTE_SECONDS = _histogram(
    "compute_seconds", "a group, claimed to done", _SECONDS, "stage", values=(GROUP_STAGES,)
)
RETRIES = _counter(
    "retries", "groups and jobs given back after an error", "stage", values=(STAGES,)
)
FENCED = _counter(
    "fenced_commits", "attempts whose lease was lost: what they wrote was refused", "stage",
    values=(STAGES,),
)  # fmt: skip
SWEEPS = _counter("sweeps", "looks of the sweeper at what is due")
BELLS = _counter("bells", "work messages that sweepers enqueued", "stage", values=(STAGES,))
QUARANTINED = _counter("quarantined_rows", "input rows set aside by ingest", "code")

# --- the store as a whole ---------------------------------------------------------------------
STORE_UP = _gauge(
    "store_up", "1 while the store answers; else its figures are missing", scope=STORE
)
GROUPS = _gauge(
    "groups", "open groups, and jobs to be read or published; state: ready, leased",
    "stage", "state", scope=STORE, values=(STAGES, UNIT_STATES),
)  # fmt: skip
OLDEST_READY = _gauge(
    "oldest_ready_seconds", "how long the oldest of those that are ready has waited", "stage",
    scope=STORE, values=(STAGES,),
)  # fmt: skip
STUCK_LEASES = _gauge(
    "stuck_leases", "leases past their end that nobody has taken over", scope=STORE
)
JOBS = _gauge(
    "jobs", "jobs that are not over, by state", "state", scope=STORE, values=(LIVE_STATES,)
)
ROWS_FAILED = _gauge(
    "failed_rows", "rows that failed or were set aside, of jobs that are not over", scope=STORE
)
WORKERS = _gauge("workers", "devices in worker processes that were heard of", "kind", scope=STORE)
WAITING_JOBS = _gauge(
    "jobs_without_worker", "live jobs that no live worker may verify", "numeric_class",
    scope=STORE,
)  # fmt: skip
LACKING_JOBS = _gauge(
    "jobs_waiting_for_worker", "live jobs whose units at a stage no live worker takes", "stage",
    scope=STORE, values=(STAGES,),
)  # fmt: skip
DEAF_WORKERS = _gauge(
    "workers_without_broker", "worker processes that can take no messages", scope=STORE
)
AUDITED = _gauge(
    "audited_completions", "completions audited in the last 30 days; result: same, different",
    "result", scope=STORE, values=(RESULTS,),
)  # fmt: skip
SCHEDULE_SUCCESS = _gauge(
    "schedule_last_success_timestamp_seconds", "when a run of a schedule was submitted last",
    "schedule", scope=STORE,
)  # fmt: skip
SCHEDULE_MISSED = _gauge(
    "schedule_missed_runs",
    "times of the last 7 days at which nothing was submitted: missed, or failed",
    "schedule",
    scope=STORE,
)

# --- the process ------------------------------------------------------------------------------
DEAF = _gauge(
    "broker_trouble", "processes behind this endpoint that can take no messages from the broker"
)
BUILD = _gauge("build_info", "1; the version that runs", "version", highest=True)
PLANNED_ROLLOUT = _gauge(
    "planned_rollout", "1 while a rollout is announced by the settings", highest=True
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
