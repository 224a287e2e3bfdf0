"""The figures of a job's report, read from the store: sums where SQL can, streams elsewhere.

Two passes over a job: its groups, which know when they were done, then its completions, of which
only counters stay. Texts come last, and only those of the few that are shown; `report_texts.py`
reads their prompts from the workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.report.counts import Fill, Tally, Timeline, spread
from specbatch.pipeline.observe.report.facts import (
    CostPart,
    Facts,
    Night,
    Quarantined,
    ShownRow,
    StagePart,
)
from specbatch.pipeline.observe.terminal.progress import resume_command
from specbatch.pipeline.observe.units import date_of, plural, version_here
from specbatch.pipeline.operations.report_texts import Texts
from specbatch.pipeline.policy.costs.job_costs import JobCost, line_of
from specbatch.pipeline.policy.costs.savings import drafted
from specbatch.pipeline.policy.costs.stage_costs import DEVICE
from specbatch.schemas.backlog import is_interrupted
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.job_figures import RowFigures
from specbatch.schemas.masking import masked
from specbatch.schemas.placement import DEFAULT_POOL
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import JobRow, JobState, Prompts, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.timekeeping import SessionRow, usd_of
from specbatch.schemas.usage import PARTS

EXAMPLES = 5  # of each reason for quarantine
MOST_FAILED = 20  # rows or groups that are listed one by one
MOST_CODES = 50
MOST_NIGHTS = 60
EVERY = 500  # completions between two progress reports

OnProgress = Callable[[int, int], None]

MEANING = {
    TimeKind.PREFILL: "reading prompts",
    TimeKind.VERIFY: "deciding tokens that were kept",
    TimeKind.DRAFT: "drafting",
    TimeKind.REJECTED: "verifying drafts that were refused",
    TimeKind.PADDING: "padding rows of passes",
    TimeKind.OVERHEAD: "outside the models, while busy",
    TimeKind.LOST: "attempts and drafts that came to nothing",
    TimeKind.IDLE: "without work",
}
PENDING = "in flight, or not recorded yet"


def gather(
    store: Store,
    settings: Settings,
    job_id: str,
    samples: int,
    made_at: float,
    with_texts: bool = True,
    on_progress: OnProgress = lambda *_: None,
) -> Facts:
    """All figures of a job; `on_progress` gets how many completions were read, and of how many.

    Raises `JobNotFoundError` and `StoreError`.
    """
    job = store.get_job(job_id)
    progress = store.progress(job.job_id)
    # 1) Groups: when each was done, how long it waited and worked.
    groups = list(store.group_figures(job.job_id))
    timeline = Timeline(groups, job.started_at)
    done = [g for g in groups if g.stage is Stage.DONE]
    # 2) Completions: counters, outliers, those that are shown.
    tally = Tally(timeline, Fill(_session_of(store, job)), samples, job.job_id)
    total = progress.completions
    for number, row in enumerate(store.row_figures(job.job_id)):
        tally.see(row)
        if number % EVERY == 0:
            on_progress(number, total)
    on_progress(total, total)
    # 3) Money, in sums of the database.
    cost = JobCost(
        *(job, store.job_times(job.job_id), store.row_times(job.job_id)),
        store.stage_usage(job.job_id),
    )
    line = line_of([cost])
    # 4) Texts.
    texts = Texts.of(store, settings, job, with_texts)
    slowest = tuple(map(texts.outlier, tally.slowest.rows))
    least = tuple(map(texts.outlier, tally.least_accepted.rows))
    shown = _outputs(texts, tally.shown.rows)
    by_tag, tags_left_out = tally.by_tag()
    by_source, decisions = tally.by_source(), store.decisions(job.job_id)
    unfinished = store.failed_groups(job.job_id)
    if not texts.words:
        by_tag, tags_left_out, decisions = (), 0, [replace(d, reason="") for d in decisions]
    return Facts(
        job=job,
        progress=progress,
        resume=_resume(store, settings, job),
        made_at=made_at,
        version=version_here(),
        texts=texts.hidden,
        words=texts.words,
        tokens_as_ids=texts.pieces is None,
        usd=cost.total.usd,
        parts=_parts(cost),
        stages=_stages(cost),
        saved=line.saved,
        usd_per_1k=line.usd_per_1k_tokens,
        usd_per_document=line.usd_per_document,
        drafted=drafted(job.report, progress.proposed),
        by_tag=by_tag,
        tags_left_out=tags_left_out,
        by_source=by_source,
        over_time=timeline.moments(),
        nights=_nights(store, job),
        depths=tally.depths(),
        positions=tally.positions(),
        fill=tally.fill.bars(),
        mean_fill=tally.fill.mean,
        fill_sampled=tally.fill.stride,
        queue=spread([g.queue_sec for g in done]),
        compute=spread([g.compute_sec for g in done]),
        slowest=slowest,
        least_accepted=least,
        decisions=tuple(decisions),
        decisions_by_action=Counter(d.action.value for d in decisions),
        quarantined=_quarantined(store, job, texts.hidden is None),
        failed_groups=_failed(
            unfinished, texts.words and (texts.hidden is None or not job.privacy.is_full)
        ),
        failed_groups_total=len(unfinished),
        audits=tuple(store.audits(job.job_id)),
        versions=_versions(store, job, texts.templates()),
        devices=_devices(store.sessions(job.job_id)),
        samples=shown,
    )


def _nights(store: Store, job: JobRow) -> tuple[Night, ...]:
    """The newest ones, rows of all tags together."""
    found: dict[tuple[int, str], list[float]] = {}
    for one in store.acceptance_days(job.tenant, job.name):
        if one.fingerprint and one.tested:
            sums = found.setdefault((one.day, one.fingerprint), [0.0, 0.0])
            sums[0] += one.tested
            sums[1] += one.agreed
    labels = {model.fingerprint: model.label for model in store.models()}
    newest = sorted(found.items(), key=lambda item: item[0][0])[-MOST_NIGHTS:]
    return tuple(
        Night(date_of(day), labels.get(fingerprint, shown(fingerprint)), *sums)
        for (day, fingerprint), sums in newest
    )


def _resume(store: Store, settings: Settings, job: JobRow) -> str | None:
    """The command that resumes the job, if it was interrupted."""
    workers = store.backlog().workers if job.state is JobState.RUNNING else ()
    stopped = is_interrupted(job, store.holders, workers, settings.lease_sec)
    return resume_command(job.job_id) if stopped else None


def _session_of(store: Store, job: JobRow) -> dict[int, int]:
    """By group, the session whose results it kept, because steps are numbered by session."""
    numbers: dict[str, int] = {}
    return {
        one.attempt.group_index: numbers.setdefault(one.session_id, len(numbers))
        for one in store.time_slices(job.job_id)
        if one.kept and one.attempt.stage is Stage.VERIFY
    }


def _outputs(texts: Texts, rows: Sequence[RowFigures]) -> tuple[ShownRow, ...]:
    """In the order of the input."""
    ordered = sorted(rows, key=lambda row: (row.row_index, row.sample_index))
    return tuple(shown for row in ordered if (shown := texts.output(row)) is not None)


def _parts(cost: JobCost) -> tuple[CostPart, ...]:
    sheet = cost.sheet
    parts = [(kind.value, MEANING[kind], sheet.of(kind)) for kind in TimeKind]
    parts.append(("pending", PENDING, sheet.pending))
    return tuple(
        CostPart(kind, meaning, amount.sec, amount.usd)
        for kind, meaning, amount in parts
        if amount.ticks
    )


def _stages(cost: JobCost) -> tuple[StagePart, ...]:
    """Stages that cost anything; none where only devices did, and those are in the parts."""
    if not cost.usage:
        return ()
    return tuple(
        StagePart(
            stage.value,
            tuple(usd_of(one.of(part)) for part in (DEVICE, *PARTS)),
            usd_of(one.total),
            usd_of(one.lost),
        )
        for stage, one in cost.by_stage.items()
    )


def _quarantined(store: Store, job: JobRow, with_texts: bool) -> tuple[Quarantined, ...]:
    """By reason, the most frequent first. Keeps no more rows than it lists."""
    counts: Counter[str] = Counter()
    examples: dict[str, list[tuple[str, str]]] = {}
    for row in store.rejected(job.job_id):
        counts[row.code] += 1
        shown = examples.setdefault(row.code, [])
        if len(shown) < EXAMPLES:
            named = "" if row.row_id is None or not with_texts else f" (id {row.row_id})"
            shown.append((f"row {row.row_index:,}{named}", row.reason if with_texts else ""))
    return tuple(
        Quarantined(code, count, tuple(examples[code]))
        for code, count in counts.most_common(MOST_CODES)
    )


def _failed(
    found: Sequence[tuple[int, str, Prompts, str]], with_words: bool
) -> tuple[tuple[str, str], ...]:
    """The first failed groups or rows, each with the reason."""
    return tuple(
        (
            f"group {index:,}, {plural(prompts.rows, 'row')}, {word}",
            (error or "no reason given") if with_words else "",
        )
        for index, word, prompts, error in found[:MOST_FAILED]
    )


def _versions(
    store: Store, job: JobRow, templates: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """What decided the output and identifies it. Includes only the spec's values without text, and
    its `templates` as far as they may be shown."""
    spec: dict[str, Any] = dict(job.spec)
    sampling, engine = spec.get("sampling") or {}, spec.get("engine") or {}
    speculation = spec.get("speculation") or {}
    report, head = job.report, store.log_head(job.job_id)
    named = [
        ("job", job.job_id),
        ("spec, digest", job.spec_digest),
        ("verifier", job.verifier),
        ("verifier, SHA-256", report.get("verifier_sha256")),
        ("verifier, weights", report.get("verifier_weights")),
        ("proposer", job.proposer or "none"),
        ("proposer, SHA-256", report.get("proposer_sha256")),
        ("exactness", engine.get("exactness")),
        ("dtype", engine.get("dtype")),
        ("verification", speculation.get("verification")),
        ("temperature", sampling.get("temperature")),
        ("seed", sampling.get("seed")),
        ("most tokens", sampling.get("max_tokens")),
        ("samples per prompt", sampling.get("n")),
        *templates,
        ("input format", report.get("input_format")),
        ("output", job.output_uri),
        ("privacy", job.privacy.value),
        ("audit log, entries", head.number or None),
        ("audit log, head", head.hash.hex() if head.number else None),
    ]
    return tuple((name, masked(str(value))) for name, value in named if value is not None)


def _devices(sessions: Sequence[SessionRow]) -> tuple[str, ...]:
    """The devices that the job used: each kind with its price and number of sessions."""
    counts = Counter(session.device for session in sessions)
    return tuple(
        f"{number} × {device.kind}, {device.region}, {device.tenure}, "
        f"{'' if device.pool == DEFAULT_POOL else f'pool {device.pool}, '}"
        f"${device.price_microusd / 1e6:g} per hour"
        for device, number in sorted(counts.items(), key=lambda item: -item[1])
    )
