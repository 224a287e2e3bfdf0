"""What the page shows of a tenant: its jobs, reports, rollouts, reviews and use, in the figures
that the commands show. Knows nothing of HTTP.

It shows what the API would: no other tenant's things, and no folders or names of the operator.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from specbatch.jobs.serve.errors import ApiError, unknown, without_places
from specbatch.pipeline.ledger.budget_rules import left_tokens, left_usd, per
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.fair_share import DEFAULT_WEIGHT
from specbatch.pipeline.observe.report.facts import Facts
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.observe.terminal.progress import INTERRUPTED, interrupted_line
from specbatch.pipeline.observe.terminal.summary import summary_rows
from specbatch.pipeline.observe.terminal.top import JobNow, Watch
from specbatch.pipeline.observe.units import NOTHING, count, percent, seconds, usd, when
from specbatch.pipeline.operations.report import gather
from specbatch.pipeline.operations.report_texts import why_no_texts
from specbatch.pipeline.operations.summaries import summary_of
from specbatch.pipeline.operations.tools import UNREAD, called, check_readable, held_completions
from specbatch.pipeline.policy.ratios import Interval
from specbatch.pipeline.policy.rollout import figures_of
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.backlog import is_interrupted
from specbatch.schemas.budgets import Account, Budget
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.policies import HELD_BACK, Decided, Place, Reviews
from specbatch.schemas.records import NORMAL, PRIORITIES, CompletionRecord, JobRow, JobState
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.rollouts import Rollout
from specbatch.schemas.serving import Page, TenantUse
from specbatch.schemas.settings import Settings
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE

MOST_LOOKED_AT = 500  # a tenant's newest jobs: for reviews that wait, and names of rollouts' scopes
MOST_ROLLOUTS = 50
MOST_ITEMS = 25  # of a review, at once: their texts are read from files
SAMPLES = 6  # outputs of a report, token by token
TONES = {
    "done": "good",
    "partial": "warn",
    "failed": "bad",
    "cancelled": "bad",
    INTERRUPTED: "warn",
    "waiting": "plain",
}
CANNOT_BE_READ = UNREAD.partition(":")[0]  # the rest is for people with the command
_OPERATOR = "the operator"
_SPACE = "\N{NO-BREAK SPACE}"
_PLACES = ("verifier", "proposer", "output")  # versions that name them


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job as it stands. `cells` are its texts by name: a page has them from the beginning, and
    its script gets them again."""

    job: JobRow
    progress: JobProgress
    state: str
    cells: Mapping[str, str]
    waits: str | None = None

    @property
    def is_live(self) -> bool:
        return not self.progress.state.is_final

    @property
    def tone(self) -> str:
        return TONES.get(self.state, "live")

    @property
    def share(self) -> float:
        """Of its prompts, those that are done."""
        total = self.progress.rows_total
        return self.progress.rows_done / total if total else 0.0

    @property
    def as_json(self) -> dict[str, Any]:
        """What the page's script puts into the page."""
        return {
            "id": self.job.job_id,
            "cells": dict(self.cells),
            "tone": self.tone,
            "share": round(self.share, 4),
            "live": self.is_live,
            "said": self._said,
        }

    @property
    def _said(self) -> str:
        """What is worth saying aloud: it changes four times while a job runs, and at its end."""
        quarters = int(4 * self.share) * 25
        how_far = f", {quarters}{_SPACE}%" if self.is_live and quarters else ""
        return f"{self.job.name}: {self.state}{how_far}"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job's own page."""

    line: JobLine
    limits: Sequence[tuple[str, str]]
    figures: Sequence[tuple[str, str]]
    notices: Sequence[tuple[str, str]]  # tone, sentence
    in_review: int


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout that concerns a tenant. What its operator has written is told to a tenant of its
    own alone."""

    rollout: Rollout
    candidate: str
    is_own: bool
    groups: int | None = None  # seen; None: they are other tenants' too
    figures: Sequence[tuple[str, str, str]] = ()  # figure, side, value

    @property
    def is_live(self) -> bool:
        return self.rollout.ended_at is None


@dataclass(frozen=True, slots=True)
class BudgetView:
    """What a tenant may spend in a period, and what is left of it. None: no limit."""

    period: str
    tokens: int | None
    left_tokens: int | None
    usd: float | None
    left_usd: float | None


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant's share, and what it has had by period."""

    tenant: str
    weight: float
    privacy: str
    states: Mapping[JobState, int]
    use: Sequence[tuple[str, TenantUse]]  # by period
    budgets: Sequence[BudgetView]
    reserved_tokens: int
    reserved_usd: float  # an estimate


@dataclass(frozen=True, slots=True)
class HeldView:
    """A completion that waits for a person."""

    place: Place
    name: str
    why: str
    row_id: str | None
    text: str | None  # None: it cannot be read or shown


@dataclass(frozen=True, slots=True)
class ReviewView:
    """Completions of a job that wait, the first of them with their texts."""

    job: JobRow
    items: Sequence[HeldView]
    waiting: int
    hidden: str | None  # why no text is shown, if so


@dataclass(frozen=True, slots=True)
class Views:
    """Reads what pages show. Thread-safe."""

    store: Store
    client: Client
    settings: Settings
    privacy: Privacy
    _making: threading.Lock = field(default_factory=threading.Lock)

    # --- jobs -------------------------------------------------------------------------------
    def job(self, tenant: str, job_id: str) -> JobRow:
        """Raises `ApiError`: there is none, or it is another tenant's."""
        # PostgreSQL takes no text with a null character, so none is asked.
        found = None if "\0" in job_id else self.store.tenant_job(tenant, job_id)
        if found is None:
            raise unknown("job", job_id)
        return found

    def lines(self, jobs: Sequence[JobRow]) -> list[JobLine]:
        """How these jobs stand."""
        progress = self.store.progress_of([job.job_id for job in jobs])
        pairs = [(job, progress[job.job_id]) for job in jobs]
        now = self._now([pair for pair in pairs if not pair[1].state.is_final])
        return [self._line(job, progress, now.get(job.job_id)) for job, progress in pairs]

    def _now(self, live: Sequence[tuple[JobRow, JobProgress]]) -> dict[str, JobNow]:
        """As `specbatch top` has them; rates are means since a job's start."""
        if not live:
            return {}
        backlog, lease_sec = self.store.backlog(), self.settings.lease_sec
        held = self.store.holders_of([job.job_id for job, _ in live])
        stopped = {
            job.job_id
            for job, _ in live
            if is_interrupted(job, lambda job_id: held.get(job_id, ()), backlog.workers, lease_sec)
        }
        watch = Watch(LEASES_OF_SILENCE * lease_sec, lease_sec)
        return {job.job_id: job for job in watch.board(backlog, live, 0, stopped).jobs}

    @staticmethod
    def _line(job: JobRow, progress: JobProgress, now: JobNow | None) -> JobLine:
        speed = summary_of(job, progress).tokens_per_sec if now is None else now.tokens_per_sec
        eta = None if now is None else now.eta_sec
        state = str(progress.state) if now is None else now.state
        total = f" of {count(progress.rows_total)}" if progress.rows_total else ""
        line = JobLine(job, progress, state, {}, None if now is None else _waits(job, now))
        cells = {
            "state": state,
            "rows": f"{count(progress.rows_done)}{total}",
            "share": percent(line.share, 0) if progress.rows_total else NOTHING,
            "failed": count(progress.rows_failed),
            "tokens": count(progress.completion_tokens),
            "speed": count(speed),
            "acceptance": percent(progress.acceptance_rate, 0),
            "left": seconds(eta),
            "cost": usd(progress.cost_usd),
        }
        return replace(line, cells=cells)

    def job_view(self, job: JobRow) -> JobView:
        (line,) = self.lines([job])
        summary = summary_of(job, line.progress, line.state == INTERRUPTED)
        return JobView(
            line,
            _limits(job),
            summary_rows(summary)[2:],  # its head says the first two
            self._notices(line),
            self._in_review(job),
        )

    def _notices(self, line: JobLine) -> list[tuple[str, str]]:
        job, found = line.job, list[tuple[str, str]]()
        may_quote = self.privacy.mode_of(job.tenant).strictness <= job.privacy.strictness
        if line.waits:
            found.append(("warn", line.waits))
        if job.cancel_requested:
            ends = "was stopped" if job.state.is_final else "is being stopped"
            why = without_places(job.stop_reason) if job.stop_reason and may_quote else None
            found.append(("warn", f"The job {ends}" + (f": {why}" if why else ".")))
        if job.error and may_quote:
            found.append(("bad", f"Error: {without_places(job.error)}"))
        if job.paused:
            found.append(("plain", "Its input is read on when fewer of its groups are open."))
        if (hidden := why_no_texts(job, self.privacy.mode_of(job.tenant), True)) is not None:
            found.append(("plain", hidden))
        return found

    def report(self, job: JobRow) -> str:
        """The report of `specbatch report`, one at a time. Raises `ApiError` at once while another
        is made: who waits here keeps a thread from the API."""
        if not self._making.acquire(blocking=False):
            raise ApiError(503, "another report is being made: try again in a minute")
        try:
            facts = gather(self.store, self.settings, job.job_id, SAMPLES, time.time())
            return page(for_tenant(facts))
        finally:
            self._making.release()

    # --- rollouts ---------------------------------------------------------------------------
    def rollouts(self, tenant: str) -> list[RolloutView]:
        """Those that concern a tenant, the newest first; without figures."""
        jobs = self.store.tenant_jobs(tenant, Page(MOST_LOOKED_AT))
        names = {job.name for job in jobs}
        every = self.store.rollouts(history=True)
        found = [one for one in every if _concerns(one.scope, tenant, names)]
        labels = {model.fingerprint: model.label for model in self.store.models()}
        return [
            RolloutView(
                one,
                labels.get(one.fingerprint, shown(one.fingerprint)),
                one.scope.tenant == tenant,
            )
            for one in found[: -MOST_ROLLOUTS - 1 : -1]
        ]

    def rollout(self, tenant: str, number: str) -> RolloutView:
        """Raises `ApiError`."""
        found = [one for one in self.rollouts(tenant) if str(one.rollout.number) == number]
        if not found:
            raise unknown("rollout", number)
        (one,) = found
        groups = self.store.rollout_groups(one.rollout.number)
        figures = [
            (name, side, ratio.words)
            for name, sides in figures_of(groups).items()
            for side, ratio in sides.items()
            if _is_known(ratio)
        ]
        return replace(one, groups=len(groups) if one.is_own else None, figures=figures)

    # --- tenants ----------------------------------------------------------------------------
    def tenant(self, tenant: str) -> TenantView:
        day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        periods = {
            "today": day.timestamp(),
            "this month": day.replace(day=1).timestamp(),
            "in all": 0.0,
        }
        (account,) = self.store.tenant_accounts(tenant)
        return TenantView(
            tenant,
            self.settings.tenant_weights.get(tenant, DEFAULT_WEIGHT),
            self.privacy.mode_of(tenant).value,
            self.store.tenant_states(tenant),
            [(name, self.store.tenant_use(tenant, since)) for name, since in periods.items()],
            [_budget(account, one) for one in account.budgets],
            account.reserved_tokens,
            account.reserved_usd,
        )

    # --- reviews ----------------------------------------------------------------------------
    def waiting(self, tenant: str) -> list[tuple[JobRow, int]]:
        """Of a tenant's newest jobs, those with completions that wait, and how many."""
        jobs = self.store.tenant_jobs(tenant, Page(MOST_LOOKED_AT))
        counted = [(job, self._in_review(job)) for job in jobs]
        return [(job, number) for job, number in counted if number]

    def _in_review(self, job: JobRow) -> int:
        held = bool(job.report.get(HELD_BACK)) and job.purged_at is None
        return len(self.store.reviews(job.job_id).pending) if held else 0

    def review(self, job: JobRow) -> ReviewView:
        """The first that wait, with their texts."""
        reviews = self.store.reviews(job.job_id)
        first = reviews.pending[:MOST_ITEMS]
        found = self._texts(job, reviews, first)
        several = any(sample for _, sample in reviews.held)
        items = [
            HeldView(
                place,
                called(place, several),
                reviews.held[place].why,
                found[place].row_id if place in found else None,
                found[place].text if place in found else None,
            )
            for place in first
        ]
        return ReviewView(job, items, len(reviews.pending), self._hidden(job))

    def decide(self, job: JobRow, decided: Mapping[Place, Decided], by: str) -> None:
        """Decide on completions, as `specbatch review` does. Raises `UsageError`."""
        reviews = self.store.reviews(job.job_id)
        released = [place for place, how in decided.items() if how is Decided.RELEASED]
        found = self._texts(job, reviews, [one for one in released if one in reviews.held])
        check_readable(job, reviews, decided, found)
        self.client.review(job.job_id, decided, by)

    def _texts(
        self, job: JobRow, reviews: Reviews, places: Sequence[Place]
    ) -> Mapping[Place, CompletionRecord]:
        if self._hidden(job) is not None:
            return {}
        some = replace(reviews, held={place: reviews.held[place] for place in places})
        return held_completions(self.settings, self.store, job, some)

    def _hidden(self, job: JobRow) -> str | None:
        return why_no_texts(job, self.privacy.mode_of(job.tenant), True)


def for_tenant(facts: Facts) -> Facts:
    """A report's figures without the operator's folders and names."""

    def told(text: str | None) -> str | None:
        return None if text is None else without_places(text)

    return replace(
        facts,
        job=replace(
            facts.job, error=told(facts.job.error), stop_reason=told(facts.job.stop_reason)
        ),
        versions=tuple(
            (name, without_places(value) if name in _PLACES else value)
            for name, value in facts.versions
        ),
        failed_groups=tuple((which, without_places(why)) for which, why in facts.failed_groups),
        audits=tuple(
            replace(
                audit,
                actor=_OPERATOR,
                findings=tuple(
                    replace(one, what=without_places(one.what)) for one in audit.findings
                ),
            )
            for audit in facts.audits
        ),
    )


def _budget(account: Account, budget: Budget) -> BudgetView:
    tokens, usd = left_tokens(account, budget), left_usd(account, budget)
    return BudgetView(
        per(budget.period),
        budget.tokens,
        None if tokens is None else max(0, tokens),
        budget.usd,
        None if usd is None else max(0.0, usd),
    )


def _concerns(scope: DeployScope, tenant: str, names: Collection[str]) -> bool:
    """Whether a tenant may know of a scope: it is the tenant's, or everybody's. Unknown names of
    jobs, and tags, may be another tenant's."""
    if scope.tenant:
        return scope.tenant == tenant
    return not scope.tag and (not scope.job_name or scope.job_name in names)


def _waits(job: JobRow, now: JobNow) -> str | None:
    """What it waits for, without the names of workers."""
    if now.state == INTERRUPTED:
        line = interrupted_line(job.job_id)
        return line[0].upper() + line[1:]
    if now.waits is None:
        return None
    waits = re.sub(r"; alive[^;]*", "", now.waits)  # which workers there are is the operator's
    return f"It {without_places(waits)}."


def _limits(job: JobRow) -> list[tuple[str, str]]:
    """When, and how far it may go."""
    times = (
        ("submitted", job.created_at),
        ("started", job.started_at),
        ("ended", job.finished_at),
        ("deadline", job.deadline_at),
    )
    found = [(name, when(at)) for name, at in times if at is not None]
    if job.priority != NORMAL:
        found.append(("priority", PRIORITIES[job.priority]))
    if job.budget_usd is not None:
        found.append(("budget", usd(job.budget_usd)))
    return found


def _is_known(ratio: Interval) -> bool:
    return ratio.value == ratio.value  # not NaN, which is for no data
