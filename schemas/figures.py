"""Figures for metrics: those of one engine step, and those of a whole store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbatch.schemas.audit import Correctness
from specbatch.schemas.backlog import Backlog

NOT_AUDITED = Correctness()
# By job name (None: of jobs of which no texts are kept) and proposer: whether its acceptance falls
# slowly on rows of some tag.
SlowFalls = Mapping[tuple[str | None, str], bool]

# What runs of schedules found, in `schedule_runs`, by kind.
SLOW_FALLS = "slow_falls"
SPEND = "spend"


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One finished step of an engine."""

    passes: Sequence[tuple[int, int]]  # tokens and sequences of each forward pass of it
    most_sequences: int  # that the engine lets in
    depths: Mapping[tuple[str, int], int]  # (proposer or "", draft tokens): sequences
    ticks: Sequence[int]  # its 100-ns units by kind, in the order of `Ticks`
    preemptions: int = 0
    raised_passes: int = 0
    proposer_failures: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleRuns:
    """Results of a schedule's runs."""

    last_success_at: float | None = None  # when one was submitted or done last, in seconds since
    # the epoch
    missed: int = 0  # lately
    failed: int = 0  # lately: they, or their jobs, ended as failed …
    partial: int = 0  # … or with an output that lacks rows …
    late: int = 0  # … or were stopped by their deadline
    duration_sec: float | None = None  # of what ended last; of a job from its submission


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The whole store at one moment."""

    backlog: Backlog
    audited: Correctness = NOT_AUDITED  # lately
    schedules: Mapping[str, ScheduleRuns] = field(default_factory=dict)  # by name
    draft_switches: Mapping[str, int] = field(default_factory=dict)  # by kind of scope
    at_risk: Mapping[str | None, int] = field(default_factory=dict)  # jobs that will miss their
    # deadline, by name; None: of those of which no texts are kept
    slow_falls: SlowFalls = field(default_factory=dict)  # of the newest run of `drift`
    spend: Mapping[str, float] = field(default_factory=dict)  # of `spend`: `to_date`, `forecast`
    # and `limit` in dollars, as far as there are any
