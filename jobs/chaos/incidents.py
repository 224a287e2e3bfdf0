"""Incidents: each prepares itself, begins during a job, and undoes what it did.

An incident is a generator that yields twice: before it begins, and before it ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.copies import StoreCopy
from specbatch.jobs.chaos.orders import Order
from specbatch.jobs.chaos.plan import Deed, Incident, IncidentKind
from specbatch.jobs.chaos.pool import Pool
from specbatch.pipeline.ledger.contract import Store
from specbatch.workers.lifecycle import queue_names

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")
Phases = Generator[None, None, None]

OTHER_CLASS = "stand-in/bf16/1"
OTHER_WEIGHTS = 1  # version of the verifier's weights on the other host
MINUTES_APART = (-600.0, -120.0, 120.0, 600.0)  # in seconds
_FULL = "disk-is-full"
_EVIL = "nobody-sent-this"


class Surroundings(Protocol):
    """What incidents may change: a site's store, broker, workers and files. `Site` is one."""

    folder: Path
    verifier: str
    proposer: str
    workers: int
    order: Order
    pool: Pool
    store: Store
    copy: StoreCopy
    broker_url: str
    full: str
    skews_sec: tuple[float, ...]

    def learn_as(self, order: Order) -> None: ...

    def meanwhile(self, work: Callable[[], T], what: str) -> T: ...


@dataclass(slots=True)
class Running:
    """An incident of a run and its state."""

    incident: Incident
    phases: Phases
    begun_at: float | None = None  # on the monotonic clock
    is_over: bool = False

    def move_on(self, rows_done: int) -> str | None:
        """Begin or end the incident if that is due. Returns what was done."""
        if self.begun_at is None:
            if rows_done < self.incident.at_rows:
                return None
            next(self.phases)
            self.begun_at = time.monotonic()
            return f"begins: {self.incident.kind}"
        if self.is_over or time.monotonic() < self.begun_at + self.incident.lasts_sec:
            return None
        self.end()
        return f"ends: {self.incident.kind}"

    def close(self) -> None:
        """Undo the preparation of an incident that never began."""
        self.phases.close()

    def end(self) -> None:
        """End the incident now, if it has begun."""
        if self.begun_at is not None and not self.is_over:
            self.is_over = True
            next(self.phases, None)


def prepared(here: Surroundings, incident: Incident) -> Running:
    """An incident that may begin."""
    phases = _KINDS[incident.kind](here, incident)
    next(phases)
    return Running(incident, phases)


def _model_swapped(here: Surroundings, incident: Incident) -> Phases:
    """Replace the model's files, as a deployment to the same folder does, and restore them later.

    Some workers are killed and then load the new files. Afterwards all workers restart, because a
    worker keeps the files that it has loaded.
    """
    draw = random.Random(incident.variant)
    folder = here.folder / here.verifier
    parts = draw.sample(stand_in_model.REPLACED, draw.randint(1, 2))
    killed = draw.sample(range(here.workers), draw.randint(1, here.workers))
    name, version = folder.name, 1 + draw.randrange(3)
    yield
    for part in parts:
        stand_in_model.replace_part(folder, part, name, version)
    for number in killed:
        here.pool.disturb(number, Deed.KILL)
    yield
    for part in parts:
        stand_in_model.replace_part(folder, part, name, 0)
    for number in range(here.workers):
        here.pool.disturb(number, Deed.KILL)


def _models_mixed(here: Surroundings, incident: Incident) -> Phases:
    """Add workers of a host whose folder of that name differs in one part."""
    home = here.folder / "other-host"
    for ref in (here.verifier, here.proposer):
        stand_in_model.write_model(home / ref, Path(ref).name)
    verifier = home / here.verifier
    stand_in_model.replace_part(verifier, stand_in_model.REPLACED[0], verifier.name, OTHER_WEIGHTS)
    return _joined_by(here, incident, home=str(home))


def _classes_mixed(here: Surroundings, incident: Incident) -> Phases:
    return _joined_by(here, incident, numeric_class=OTHER_CLASS)


def _joined_by(here: Surroundings, incident: Incident, **unlike: str) -> Phases:
    """Learn the outcomes of these workers first, then let them work beside the others."""
    orders = [
        replace(
            here.order,
            number=here.workers + number,
            log=str(here.folder / f"worker-{here.workers + number}.log"),
            **unlike,  # type: ignore[arg-type]  # fields that are strings
        )
        for number in range(1 + incident.variant % 2)
    ]
    here.pool.hire(orders)
    try:
        here.learn_as(orders[0])
        yield
        yield
    finally:
        here.pool.let_go(orders)


def _restored(here: Surroundings, incident: Incident) -> Phases:
    """Copy the store at the beginning and restore it at the end, even after the job's end."""
    yield
    here.meanwhile(here.copy.take, "the copy of the store")
    yield
    if incident.kind is IncidentKind.STORE_RESTORED:
        here.meanwhile(lambda: here.copy.restore(at_work=True), "the store to be restored")
        return
    with here.pool.stopped():
        here.store.close()  # the next operation reconnects
        here.copy.restore(at_work=False)


def _queue_of_wrong_type(here: Surroundings, incident: Incident) -> Phases:
    draw = random.Random(incident.variant)
    names = queue_names(here.order.kinds, here.verifier, here.proposer)
    chosen = draw.sample(names, draw.randint(1, 3))
    yield
    redis = _redis(here)
    for name in chosen:
        redis.set(name, "no list")
    yield
    here.pool.until(
        lambda: all(redis.type(name) != b"string" for name in chosen),
        "the strings to be moved aside",
    )


def _unacked_garbage(here: Surroundings, incident: Incident) -> Phases:
    texts: Sequence[bytes] = (
        b"garbage",
        b"[1, 2",
        b"null",
        b'[{"body": "e30="}, "", ""]',
        b"\xff\xfe",
    )
    tags = [f"{_EVIL}-{number}" for number in range(1 + incident.variant % 3)]
    yield
    redis = _redis(here)
    for number, tag in enumerate(tags):
        redis.hset("unacked", tag, texts[(incident.variant + number) % len(texts)])
        redis.zadd("unacked_index", {tag: 0.0})
    here.pool.disturb(incident.variant % here.workers, Deed.KILL)  # its successor reads them all
    yield
    here.pool.until(
        lambda: all(redis.zscore("unacked_index", tag) is None for tag in tags),
        "the garbage to be dropped",
    )


def _disk_full(here: Surroundings, _: Incident) -> Phases:
    """Make every write fail everywhere until there is space again."""
    flag = here.folder / _FULL
    here.full = str(flag)
    yield
    flag.touch()
    yield
    flag.unlink()


def _clocks_apart(here: Surroundings, incident: Incident) -> Phases:
    """Set workers' clocks apart for the whole run. The submitter's own clock is right."""
    draw = random.Random(incident.variant)
    here.skews_sec = tuple(draw.choice(MINUTES_APART) for _ in range(here.workers))
    yield
    yield


def _redis(here: Surroundings) -> Redis:
    from redis import Redis

    client: Redis = Redis.from_url(here.broker_url)
    return client


_KINDS: dict[IncidentKind, Callable[[Surroundings, Incident], Phases]] = {
    IncidentKind.MODEL_SWAPPED: _model_swapped,
    IncidentKind.MODELS_MIXED: _models_mixed,
    IncidentKind.CLASSES_MIXED: _classes_mixed,
    IncidentKind.STORE_RESTORED: _restored,
    IncidentKind.STORE_RESTORED_STOPPED: _restored,
    IncidentKind.QUEUE_OF_WRONG_TYPE: _queue_of_wrong_type,
    IncidentKind.UNACKED_GARBAGE: _unacked_garbage,
    IncidentKind.DISK_FULL: _disk_full,
    IncidentKind.CLOCKS_APART: _clocks_apart,
}
