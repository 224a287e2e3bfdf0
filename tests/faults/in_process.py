"""A worker in this process, driven by hand: no broker, and a clock that tests move."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ledger.builders import Clock
from sqlalchemy import event

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.conservation import Key, Outcome, Report, outcomes, report
from specbatch.jobs.chaos.job import models, spec_of, write_input
from specbatch.jobs.chaos.orders import EngineKind
from specbatch.jobs.chaos.plan import Plan
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.bootstrap import KINDS, FakeModels, Worker, make_client, make_worker
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas import crash_points
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.records import DueWork
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE
from support.databases import migrated

LEASE_SEC = 60.0
DEAD_SEC = LEASES_OF_SILENCE * LEASE_SEC + 1  # of silence, after which nobody lives
PLAIN = Plan(0, (), group_size=4, writes_ahead=True)
_MOST_ROUNDS = 300


class Died(BaseException):
    """The thread ends here as in a crash: nobody gives anything back."""


def _silent(_: DueWork) -> None:
    """Units are found in the store."""


@dataclass
class Shop:
    """One store, one folder, any number of workers."""

    folder: Path
    store: Store
    clock: Clock
    engine: EngineKind = "stand-in"
    step_sec: float = 0.0
    workers: list[Worker] = field(default_factory=list)
    objects: Objects = field(default_factory=Objects)
    expected: dict[Key, Outcome] = field(default_factory=dict)
    _jobs: int = 0

    def __post_init__(self) -> None:
        self.prompts = str(write_input(self.folder))
        self.verifier, self.proposer = models(self.folder / "models", self.engine)
        self.settings = Settings(
            workspace=str(self.folder / "work"),
            lease_sec=LEASE_SEC,
            max_attempts=100,
            kv_cache_mib=64,
        )

    def hire(self, store: Store | None = None, usd_per_hour: float = 0.2) -> Worker:
        """One more worker, of all kinds; `store` is what it has in the place of ours."""
        worker = make_worker(
            self.settings.model_copy(update={"price_per_device_hour_usd": usd_per_hour}),
            KINDS,
            _silent,
            self.verifier,
            self.proposer,
            store=store or self.store,
            fake_models=self._models() if self.engine == "stand-in" else None,
        )
        self.workers.append(worker)
        return worker

    def submit(self, plan: Plan = PLAIN) -> str:
        """A new job of the plan's shape; its id."""
        job, _ = make_client(self.settings, _silent, self.store).submit(self.spec(plan))
        return job.job_id

    def spec(self, plan: Plan) -> JobSpec:
        """A new job's, with an output of its own."""
        self._jobs += 1
        output = str(self.folder / "outputs" / str(self._jobs))
        return spec_of(plan, self.prompts, output, self.verifier, self.proposer, self.engine)

    def drain(self, job_id: str, worker: Worker | None = None) -> None:
        """Do what is due until the job has ended; where nothing is, a lease has to run out."""
        worker = worker or self.workers[0]
        for _ in range(_MOST_ROUNDS):
            if self.store.get_job(job_id).state.is_final:
                return
            due = [message for message in self.store.due() if message.job_id == job_id]
            for message in due[:1]:
                attempt(worker, message)
            if not due:
                self.clock.advance(LEASE_SEC + 1)
        raise AssertionError(f"job {job_id} does not end: {self.store.due()}")

    def do_next(self, job_id: str, worker: Worker | None = None) -> DueWork:
        """One unit of what is due; which."""
        message = next(message for message in self.store.due() if message.job_id == job_id)
        attempt(worker or self.workers[0], message)
        return message

    def learn(self) -> None:
        """What the job gives when nothing is in its way."""
        job_id = self.submit()
        self.drain(job_id)
        self.expected = dict(outcomes(self.store.get_job(job_id).output_uri, self.objects))

    def report(self, job_id: str, restored: bool = False) -> Report:
        return report(self.store, self.objects, job_id, self.expected, restored)

    def close(self) -> None:
        for worker in self.workers:
            self.dismiss(worker)

    def dismiss_hired(self) -> None:
        """Dismiss all but the first one."""
        while len(self.workers) > 1:
            self.dismiss(self.workers.pop())

    @staticmethod
    def dismiss(worker: Worker) -> None:
        """Have its threads end. Its last word is not heard: see `Timekeeper.close`."""
        for host in worker.engines:
            host.close()
        worker.lease_keeper.close()
        worker.knowledge.close()

    def _models(self) -> FakeModels:
        def engines(model: ModelFolder, beside: ModelFolder | None) -> StandInHost:
            agreement = 0.8 if model.ref == self.proposer else 1.0
            return StandInHost(model, beside, agreement=agreement, step_sec=self.step_sec)

        return FakeModels(engines, stand_in_model.tokenizer)


def attempt(worker: Worker, message: DueWork) -> None:
    """As a task does it: whatever is raised, the next one comes."""
    try:
        worker.run(message.stage, message.job_id, message.group_index)
    except (Exception, Died):
        return


def _without_syncing(connection: Any, _record: Any) -> None:
    """No process dies here, so nothing is lost."""
    connection.execute("PRAGMA synchronous = OFF")


@contextmanager
def shop(folder: Path, engine: EngineKind = "stand-in", step_sec: float = 0.0) -> Iterator[Shop]:
    """On SQLite, with one worker, and knowing what its job gives."""
    clock = Clock()
    url = migrated(folder / "specbatch.db")
    with closing(open_store(url, max_attempts=100, clock=clock)) as store:
        event.listen(store._db._reader, "connect", _without_syncing)
        made = Shop(folder, store, clock, engine, step_sec)
        try:
            made.hire()
            made.learn()
            yield made
        finally:
            made.close()


def back_up(source: Path, target: Path) -> None:
    """Make one database the copy of another, which may be open."""
    with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other)


@contextmanager
def armed(what: Callable[[CrashPoint], None]) -> Iterator[None]:
    """`what` is called at the crash points of this process inside the block."""
    crash_points.arm(what)
    try:
        yield
    finally:
        crash_points.arm(None)
