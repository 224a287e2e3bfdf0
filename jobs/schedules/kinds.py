"""What schedules run besides jobs: by kind its options, and the function that does it.

A function is what the command of that name calls. It may import much, so it does that itself: a
scheduler reads this table and runs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.figures import SLOW_FALLS, SPEND
from specbatch.schemas.rollouts import DEFAULT_STEPS, shares_of
from specbatch.schemas.settings import Settings
from specbatch.schemas.training import LEAST_EPOCHS, MOST_EPOCHS, DataOrder, Parameters
from specbatch.schemas.uris import model_ref

log = logging.getLogger(__name__)

_DATA = DataOrder()
MOST_NAMED = 5  # in a sentence
JOB = "job"  # the kind that is submitted, and done by workers


class Outcome(NamedTuple):
    """What a run found, in one sentence without texts of jobs."""

    summary: str
    is_well: bool = True  # False: the time counts as failed, and is not tried again
    found: Mapping[str, Any] | None = None  # figures for metrics, if it is well


class Options(BaseModel):
    """Fields of `options` in a schedule file."""

    # An attempt's process is given them as JSON, which has no infinity.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def beside(self, _folder: Path) -> Self:
        """With paths that are relative to the file's folder made absolute."""
        return self


@dataclass(frozen=True, slots=True)
class Kind:
    """`run(options, settings, store, logical_at)` raises what commands raise."""

    options: type[Options]
    run: Callable[[Any, Settings, Store, float], Outcome]


class PurgeOptions(Options):
    tenant: str | None = Field(default=None, description="only this tenant's jobs")
    output: bool = Field(default=False, description="delete the files of outputs as well")


def purge(options: PurgeOptions, settings: Settings, store: Store, _logical_at: float) -> Outcome:
    """What retention says is due."""
    from specbatch.pipeline.operations.purging import purge_due

    return Outcome(*purge_due(settings, store, options.tenant, options.output))


def drift(_options: Options, _settings: Settings, store: Store, _logical_at: float) -> Outcome:
    """Which acceptance falls slowly, of all tenants; the metric and its alert tell of the newest
    run."""
    falls = store.slow_falls()
    names = sorted(
        {f"{name or 'jobs without a name'} ({by})" for (name, by), of in falls.items() if of}
    )
    summary = f"of {len(falls):,} acceptances {len(names):,} fall slowly"
    summary += f": {', '.join(names[:MOST_NAMED])}" if names else ""
    return Outcome(
        summary, found={SLOW_FALLS: [[*key, of] for key, of in sorted(falls.items(), key=str)]}
    )


class AuditOptions(Options):
    tenant: str | None = Field(default=None, description="only this tenant's jobs")
    days: float = Field(default=1.0, gt=0, description="jobs that ended in so many last days")
    jobs: int = Field(default=3, ge=1, description="at most so many of them")
    sample: float = Field(default=0.02, ge=0, le=1, description="share of completions to replay")


def audit(options: AuditOptions, settings: Settings, store: Store, logical_at: float) -> Outcome:
    """Some of last nights' jobs, others every time. What it finds fails the time."""
    from specbatch.pipeline.operations.nightly_audit import audit_some
    from specbatch.pipeline.operations.tools import make_auditor

    sec, seed = options.days * DAY_SEC, int(logical_at)
    auditor = make_auditor(settings, store)
    found = audit_some(auditor, sec, options.jobs, options.sample, seed, options.tenant)
    return Outcome(found.sentence, not (found.bad or found.not_replayed))


class LearnOptions(Options):
    model: str = Field(description="the draft model's name in the registry")
    verifier: str = Field(description="the model whose drafts it writes: folder or hub id")
    folder: str = Field(default="trained", description="where trained models go, a folder each")
    tenant: str = Field(default=_DATA.tenant, description="whose jobs, and for whom it drafts")
    job: str = Field(default="", description="only jobs of this name")
    steps: tuple[float, ...] = Field(
        default=tuple(100.0 * share for share in DEFAULT_STEPS),
        description="of the rollout: percent of groups, rising to 100",
    )
    held_out: float = Field(
        default=_DATA.held_out, ge=0.001, le=0.9, description="share of the prompts to judge by"
    )
    epochs: float = Field(
        default=Parameters().epochs,
        ge=LEAST_EPOCHS,
        le=MOST_EPOCHS,
        description="times to go through the data",
    )

    def beside(self, folder: Path) -> Self:
        paths = {
            "verifier": model_ref(self.verifier, folder),
            "folder": str((folder / Path(self.folder).expanduser()).resolve()),
        }
        return self.model_copy(update=paths)

    @field_validator("steps")
    @classmethod
    def _rise_to_all(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        shares_of(steps)
        return steps


def learn(options: LearnOptions, settings: Settings, store: Store, logical_at: float) -> Outcome:
    """Train, try, and roll out what is better. The scheduler's machine needs the engine extra."""
    require_engine_extra()
    from specbatch.pipeline.learning.nightly import LearnOrder
    from specbatch.pipeline.learning.nightly import learn as learn_from
    from specbatch.pipeline.learning.wiring import stop_signals

    order = LearnOrder(
        name=options.model,
        verifier=options.verifier,
        folder=Path(options.folder),
        tenant=options.tenant,
        job=options.job,
        steps=shares_of(options.steps),
        held_out=options.held_out,
        parameters=Parameters(epochs=options.epochs, device=settings.device),
    )
    night = datetime.fromtimestamp(logical_at, UTC).strftime("%Y-%m-%d-%H%M")
    with stop_signals() as stopped:  # a step ends, and a checkpoint is written
        return Outcome(learn_from(settings, store, order, night, stopped.is_set).summary)


class MismatchOptions(Options):
    tenant: str = Field(default="default", description="whose jobs")
    days: float = Field(default=7.0, gt=0, description="jobs that ended in so many last days")
    top: int = Field(default=20, ge=1, description="how many of each are logged")


def mismatches(
    options: MismatchOptions, _settings: Settings, store: Store, _logical_at: float
) -> Outcome:
    """What was refused most goes to the log; the row says how much it was."""
    from specbatch.pipeline.operations.mismatches import mismatches as find

    found = find(store, options.tenant, options.days, options.top)
    for one in (*found.tokens, *found.tags):
        log.info("%s", one)
    return Outcome(found.sentence)


class SpendOptions(Options):
    limit_usd: float | None = Field(default=None, ge=0, description="dollars a month may cost")


def spend(options: SpendOptions, _settings: Settings, store: Store, _logical_at: float) -> Outcome:
    """This month's spend; the metric and its alert tell of the newest run."""
    from specbatch.pipeline.operations.spending import sentence, spend_of

    found = spend_of(store, time.time(), options.limit_usd)
    usd = {"to_date": found.to_date_usd, "forecast": found.forecast_usd, "limit": found.limit_usd}
    known = {name: value for name, value in usd.items() if value is not None}
    return Outcome(sentence(found), found={SPEND: known})


KINDS: Mapping[str, Kind] = {
    "audit": Kind(AuditOptions, audit),
    "drift": Kind(Options, drift),
    "learn": Kind(LearnOptions, learn),
    "mismatches": Kind(MismatchOptions, mismatches),
    "purge": Kind(PurgeOptions, purge),
    "spend": Kind(SpendOptions, spend),
}
