"""Messages between the supervisor and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specbatch.jobs.chaos.plan import Disturbance
from specbatch.pipeline.bootstrap import KINDS

EngineKind = Literal["stand-in", "real", "vllm"]  # "real": the exact engine


@dataclass(frozen=True, slots=True)
class Arming:
    """The disturbances from now on, the same for all workers of a pool."""

    run: int
    disturbances: tuple[Disturbance, ...]
    counts: str  # folder in which all of them count together
    message_seed: int | None = None
    full: str = ""  # while this file is there, their disk is full
    skews_sec: tuple[float, ...] = ()  # what their clocks are ahead, by number; beyond: nothing


NOTHING = Arming(0, (), "")


@dataclass(frozen=True, slots=True)
class Order:
    """The description of a worker. `settings` are those of `schemas/settings.py`, by name."""

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
    home: str = ""  # folder of relative model names: another folder acts as another host's disk
    arming: Arming = NOTHING


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker is ready for work."""


@dataclass(frozen=True, slots=True)
class IsArmed:
    """A worker has received the disturbances of a run."""

    run: int


@dataclass(frozen=True, slots=True)
class Fired:
    """A disturbance of a run, by its index in the plan, is about to fire in a worker."""

    run: int
    index: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks how many tasks a worker has."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Answers `Ask`."""

    tasks: int


Event = Ready | IsArmed | Fired | Busy
