"""Figures that cross rooms on their way to whoever measures: of one pass, and of a whole store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbatch.schemas.audit import Correctness
from specbatch.schemas.backlog import Backlog

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
class ScheduleRuns:
    """What became of a schedule's runs."""

    last_success_at: float | None = None  # when one was submitted last, seconds since the epoch
    missed: int = 0  # lately


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The whole store at one moment."""

    backlog: Backlog
    audited: Correctness = NOT_AUDITED  # lately
    schedules: Mapping[str, ScheduleRuns] = field(default_factory=dict)  # by name
