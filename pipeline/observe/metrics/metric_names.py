"""All metrics: their names, types, labels and meanings. Every other module takes them from here.

Tests hold the dashboards, the alerts and the documented table to this list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specbatch.schemas.budgets import Period
from specbatch.schemas.provenance import TICK_KINDS
from specbatch.schemas.records import CLAIMABLE, ROW_CODES, FinishReason, JobState, Stage


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Whose figure a metric is."""

    PROCESS = "process"  # what this process did: add up over processes
    STORE = "store"  # the whole store, the same from every process: take the maximum


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Names of counters end in `_total`; units are in the name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    scope: Scope = Scope.PROCESS
    buckets: tuple[float, ...] = ()  # of a histogram, rising
    # Values of the labels where all are known beforehand: such series begin at 0.
    values: tuple[tuple[str, ...], ...] = field(default=(), repr=False)


Labels = tuple[str, ...]  # one value for each label of a metric
Values = tuple[str, ...]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_LONG = (*_SECONDS[6:], 3600, 3 * 3600, 8 * 3600)
_SHORT = (0.0001, 0.00025, 0.0005, *_SECONDS[:11])
_SHARES = tuple(round(share / 10, 1) for share in range(1, 11))
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

FINISHED: Values = tuple(reason.value for reason in FinishReason)
GROUP_STAGES: Values = tuple(s.value for s in (Stage.PROPOSE, Stage.VERIFY, Stage.RECORD))
STAGES: Values = tuple(stage.value for stage in CLAIMABLE)
LIVE_STATES: Values = tuple(state.value for state in JobState if not state.is_final)
BLOCK_STATES: Values = ("used", "free", "cached")
FAILURES: Values = ("pass", "proposer")
UNIT_STATES: Values = ("ready", "leased")
RESULTS: Values = ("same", "different")
PERIODS: Values = tuple(period.value for period in Period)


def _counter(name: str, text: str, *labels: str, values: tuple[Values, ...] = ()) -> Metric:
    return Metric(f"specbatch_{name}_total", Kind.COUNTER, text, labels, values=values)


def _gauge(
    name: str,
    text: str,
    *labels: str,
    scope: Scope = Scope.PROCESS,
    values: tuple[Values, ...] = (),
) -> Metric:
    return Metric(f"specbatch_{name}", Kind.GAUGE, text, labels, scope, values=values)


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

# --- tokens, as the store accepted them -------------------------------------------------------
PROPOSED = _counter("proposed_tokens", "draft tokens verified", "job", "proposer", "tag")
ACCEPTED = _counter("accepted_tokens", "draft tokens accepted", "job", "proposer", "tag")
EMITTED = _counter(
    "emitted_tokens", "tokens of completions; origin: plain, accepted, corrected, bonus, reused",
    "job", "origin",
)  # fmt: skip
PROMPT_TOKENS = _counter("prompt_tokens", "prompt tokens of recorded rows, of each row once", "job")
COMPLETIONS = _counter("completions", "recorded completions", "job", "finish_reason")
MALFORMED = _counter(
    "malformed_outputs", "outputs without the response format that was asked for", "job", "tag"
)
RULED = _counter(
    "policy_verdicts", "completions that content policies changed or kept back",
    "job", "tag", "verdict",
)  # fmt: skip
REUSED = _counter("reused_completions", "completions that are copies of earlier ones", "job")
COST = _counter("cost_usd", "dollars attributed to recorded completions", "job")
BASELINE_COST = _counter(
    "baseline_cost_usd",
    "dollars they would have cost at depth 0: their cost plus savings, measured by control steps",
    "job",
)

# --- the engine, with work that was lost ------------------------------------------------------
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
    "engine_batch_fill_ratio", "sequences in a pass ÷ the most it admits", _SHARES
)
KV_BLOCKS = _gauge(
    "engine_kv_blocks", "the verifier's KV blocks; state: used, free, cached", "state",
    values=(BLOCK_STATES,),
)  # fmt: skip
PREEMPTIONS = _counter("engine_preemptions", "sequences preempted for lack of KV blocks")
FAILED_CALLS = _counter(
    "engine_failed_calls", "calls that raised and were recovered from; what: pass, proposer",
    "what", values=(FAILURES,),
)  # fmt: skip
DEVICE_SECONDS = _counter(
    "engine_device_seconds", f"device time of engines by what took it: {', '.join(TICK_KINDS)}",
    "kind", values=(TICK_KINDS,),
)  # fmt: skip
FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "from a request's arrival at the engine to its first token",
    _SECONDS,
    "job",
)
PER_TOKEN = _histogram(
    "time_per_output_token_seconds",
    "of finished requests, for each token after the first",
    _SHORT,
    "job",
)
BREAKER_OPEN = _gauge(
    "breaker_open",
    "1 while drafting is switched off for a job that is verified here; proposer *: all drafting",
    "job", "proposer",
)  # fmt: skip
COLLAPSED = _gauge(
    "acceptance_collapsed",
    "1 while a proposer's acceptance on a job that is verified here is below half of its best",
    "job", "proposer",
)  # fmt: skip
DRIFT = _histogram(
    "drift_kl_nats", "KL(verifier ‖ proposer) at sampled positions",
    (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10), "proposer",
)  # fmt: skip

# --- work through the stages ------------------------------------------------------------------
QUEUE_SECONDS = _histogram(
    "queue_seconds", "a group, from ready to claimed", _LONG, "stage", values=(GROUP_STAGES,)
)
COMPUTE_SECONDS = _histogram(
    "compute_seconds", "a group, from claimed to done", _SECONDS, "stage", values=(GROUP_STAGES,)
)
RETRIES = _counter("retries", "groups and jobs released after an error", "stage", values=(STAGES,))
FENCED = _counter(
    "fenced_commits", "attempts that lost their lease, whose writes the store refused", "stage",
    values=(STAGES,),
)  # fmt: skip
SWEEPS = _counter("sweeps", "passes of the sweeper over due work")
ENQUEUED = _counter("bells", "work messages that the sweeper sent", "stage", values=(STAGES,))
QUARANTINED = _counter(
    "quarantined_rows", "input rows that ingest quarantined", "code", values=(ROW_CODES,)
)

# --- the store as a whole ---------------------------------------------------------------------
STORE_UP = _gauge(
    "store_up", "1 while the store answers; otherwise its figures are missing", scope=STORE
)
GROUPS = _gauge(
    "groups", "open groups, and jobs to ingest or publish; state: ready, leased",
    "stage", "state", scope=STORE, values=(STAGES, UNIT_STATES),
)  # fmt: skip
OLDEST_READY = _gauge(
    "oldest_ready_seconds", "how long the oldest ready group or job has waited", "stage",
    scope=STORE, values=(STAGES,),
)  # fmt: skip
STUCK_LEASES = _gauge("stuck_leases", "expired leases that nobody has taken over", scope=STORE)
JOBS = _gauge("jobs", "unfinished jobs by state", "state", scope=STORE, values=(LIVE_STATES,))
ROWS_FAILED = _gauge("failed_rows", "failed and quarantined rows of unfinished jobs", scope=STORE)
WORKERS = _gauge("workers", "devices of live worker processes by kind", "kind", scope=STORE)
JOBS_WITHOUT_WORKER = _gauge(
    "jobs_without_worker", "live jobs that no live worker can verify", "numeric_class",
    scope=STORE,
)  # fmt: skip
JOBS_WAITING = _gauge(
    "jobs_waiting_for_worker", "live jobs with work at a stage that no live worker serves", "stage",
    scope=STORE, values=(STAGES,),
)  # fmt: skip
JOBS_OVER_BUDGET = _gauge(
    "jobs_over_budget", "live jobs that wait for a budget of their tenant; period: of the budget",
    "period", scope=STORE, values=(PERIODS,),
)  # fmt: skip
WORKERS_WITHOUT_BROKER = _gauge(
    "workers_without_broker", "worker processes that cannot take messages", scope=STORE
)
AUDITED = _gauge(
    "audited_completions", "completions audited in the last 30 days; result: same, different",
    "result", scope=STORE, values=(RESULTS,),
)  # fmt: skip
DRAFT_SWITCHES = _gauge(
    "drafting_switches_off",
    "switches by which operators have turned drafting off; scope: what narrows them",
    "scope",
    scope=STORE,
)
SCHEDULE_SUCCESS = _gauge(
    "schedule_last_success_timestamp_seconds",
    "when a run of a schedule was last submitted, or done", "schedule", scope=STORE,
)  # fmt: skip
SCHEDULE_MISSED = _gauge(
    "schedule_missed_runs",
    "runs of the last 7 days that were not submitted: missed or failed",
    "schedule",
    scope=STORE,
)
SCHEDULE_FAILED = _gauge(
    "schedule_failed_runs",
    "runs of the last 7 days that ended so, or whose job did; outcome: failed, partial, late "
    "(at its deadline)",
    "schedule", "outcome", scope=STORE,
)  # fmt: skip
SCHEDULE_DURATION = _gauge(
    "schedule_duration_seconds",
    "from submission or start to end, of the schedule's run that ended last", "schedule",
    scope=STORE,
)  # fmt: skip
JOBS_AT_RISK = _gauge(
    "jobs_at_risk", "live jobs with a deadline that they will miss at their speed so far", "job",
    scope=STORE,
)  # fmt: skip
SLOW_FALL = _gauge(
    "acceptance_falls_slowly",
    "1 while a job's nights accept less and less of a proposer's drafts, on rows of some tag: by "
    "the newest run of a schedule of kind drift", "job", "proposer", scope=STORE,
)  # fmt: skip
SPEND = _gauge(
    "month_spend_usd",
    "devices this month, by the newest run of a schedule of kind spend; of: to_date, forecast "
    "(at its end), limit", "of", scope=STORE,
)  # fmt: skip

# --- the process ------------------------------------------------------------------------------
BROKER_TROUBLE = _gauge(
    "broker_trouble", "1 while this process cannot take messages from the broker"
)
BUILD = _gauge("build_info", "1; the label names the version that runs", "version")
PLANNED_ROLLOUT = _gauge("planned_rollout", "1 while the settings announce a rollout")

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
