"""What supervisor and workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specbatch.jobs.chaos.plan import Disturbance
from specbatch.pipeline.bootstrap import KINDS

EngineKind = Literal["stand-in", "real"]


@dataclass(frozen=True, slots=True)
class Arming:
    """What is to happen from now on, for all workers of a pool alike."""

    run: int
    disturbances: tuple[Disturbance, ...]
    counts: str  # folder in which all of them count together
    message_seed: int | None = None
    full: str = ""  # while this file is there, their disk is full
    skews_sec: tuple[float, ...] = ()  # what their clocks are ahead, by number; beyond: nothing


NOTHING = Arming(0, (), "")


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be. `settings` are those of `schemas/settings.py`, by name."""

    number: int  # among its pool's
    settings: dict[str, Any]
    engine: EngineKind
    verifier: str
    proposer: str | None
    log: str
    kinds: tuple[str, ...] = KINDS
    concurrency: int = 4
    step_sec: float = 0.0  # of the stand-in
    numeric_class: str = ""  # of the stand-in; empty: its usual one
    home: str = ""  # folder that names of models start from: another one is another host's disk
    arming: Arming = NOTHING


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker takes work."""


@dataclass(frozen=True, slots=True)
class IsArmed:
    """A worker knows what is to happen in a run."""

    run: int


@dataclass(frozen=True, slots=True)
class Fired:
    """A disturbance of a run, by its place in the plan, is about to befall a worker."""

    run: int
    index: int


@dataclass(frozen=True, slots=True)
class Ask:
    """How many tasks does a worker have in hand?"""


@dataclass(frozen=True, slots=True)
class Busy:
    """The answer."""

    tasks: int


Event = Ready | IsArmed | Fired | Busy
