"""Figures that cross rooms on their way to whoever measures: of one pass, and of a whole store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbatch.schemas.audit import Correctness
from specbatch.schemas.records import JobState, Stage

NOT_AUDITED = Correctness()


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of an engine, told when it is over."""

    passes: Sequence[tuple[int, int]]  # tokens and sequences of each forward pass of it
    most_sequences: int  # that the engine lets in
    depths: Mapping[tuple[str, int], int]  # (proposer or "", draft tokens): sequences
    ticks: Sequence[int]  # that it took, by kind, as `Ticks` has them
    preemptions: int = 0
    raised_passes: int = 0
    proposer_failures: int = 0


@dataclass(frozen=True, slots=True)
class OpenUnits:
    """Units of work at one stage that are not done: groups, or jobs at INGEST and PUBLISH."""

    ready: int = 0  # nobody holds them, or their lease ran out
    leased: int = 0
    stuck: int = 0  # of those that are ready, with a lease that ran out
    oldest_sec: float = 0.0  # how long the oldest of those that are ready has waited


@dataclass(frozen=True, slots=True)
class ScheduleRuns:
    """What became of a schedule's runs."""

    last_success_at: float | None = None  # when one was submitted last, seconds since the epoch
    missed: int = 0  # lately


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The whole store at one moment. What is not there has no entry."""

    units: Mapping[Stage, OpenUnits] = field(default_factory=dict)
    jobs: Mapping[JobState, int] = field(default_factory=dict)  # that are not over
    rows_failed: int = 0  # of those, quarantined ones included
    workers: Mapping[str, int] = field(default_factory=dict)  # by kind of device
    audited: Correctness = NOT_AUDITED  # lately
    schedules: Mapping[str, ScheduleRuns] = field(default_factory=dict)  # by name
