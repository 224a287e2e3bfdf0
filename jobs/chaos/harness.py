"""Runs small jobs on a site while disturbances hit its store, broker and workers.

A run arms its disturbances and submits jobs until each disturbance has fired. When all jobs have
ended, all frozen workers are thawed and all late messages have arrived, the run checks each job
for conservation.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.conservation import (
    Census,
    Key,
    Outcome,
    Report,
    census,
    outcomes,
    report,
)
from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.job import models, spec_of, write_input
from specbatch.jobs.chaos.orders import Arming, EngineKind, Order
from specbatch.jobs.chaos.plan import Deed, Disturbance, Incident, IncidentKind, Plan
from specbatch.jobs.chaos.pool import ChaosError, Pool
from specbatch.jobs.chaos.stand_in import NUMERIC_CLASS
from specbatch.jobs.chaos.standstill import standstill
from specbatch.pipeline.bootstrap import make_client, make_store, patient
from specbatch.pipeline.engines.models.fingerprint import snapshot_of
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.leases import owner_here
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import VLLM, Settings
from specbatch.schemas.sqlite_urls import url_of_file
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE
from specbatch.workers.app import make_app, make_enqueue
from specbatch.workers.lifecycle import queue_names

if TYPE_CHECKING:
    from redis import Redis

# A fraction of a usual one, so that a run is short.
LEASE_SEC: dict[EngineKind, float] = {"stand-in": 0.8, "real": 2.5, "vllm": 2.5}
VLLM_OPTIONS = {"enforce_eager": True, "max_model_len": 256}  # started often: no compiling
MOST_JOBS = 60  # of a run: often another worker than the chosen one reaches a place
_UNDISTURBED = Plan(-1, (), group_size=4, writes_ahead=True)

_BUSY_SEC = 60.0  # of a copy: workers write meanwhile, and one may be frozen during a write

OTHER_CLASS = "stand-in/bf16/1"
OTHER_WEIGHTS = 1  # version of the verifier's weights on the other host
MINUTES_APART = (-600.0, -120.0, 120.0, 600.0)  # in seconds
_FULL = "disk-is-full"
_EVIL = "nobody-sent-this"

Notify = Callable[[str], None]
Phases = Generator[None, None, None]
T = TypeVar("T")


class StoreCopy:
    """A copy of a store on SQLite, which can be taken repeatedly, as an operator does."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._copy = database.with_name("copy.db")

    def take(self) -> None:
        """Copy the store; workers may be running."""
        self._copy.unlink(missing_ok=True)
        _back_up(self._database, self._copy)

    def restore(self, *, at_work: bool) -> None:
        """Restore the copy. `at_work`: workers are running and have the store open."""
        if at_work:
            _back_up(self._copy, self._database)
            return
        for suffix in ("-wal", "-shm"):
            self._database.with_name(self._database.name + suffix).unlink(missing_ok=True)
        fresh = self._database.with_suffix(".new")
        shutil.copyfile(self._copy, fresh)
        fresh.replace(self._database)


def _back_up(source: Path, target: Path) -> None:
    with (
        closing(sqlite3.connect(source, timeout=_BUSY_SEC)) as reading,
        closing(sqlite3.connect(target, timeout=_BUSY_SEC)) as writing,
    ):
        reading.backup(writing)


@dataclass(slots=True)
class Ran:
    """The result of a run."""

    plan: Plan
    fired: list[Disturbance] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    restarts: int = 0
    happened: bool = True  # the plan's incident, if it has one
    unlawful: list[str] = field(default_factory=list)  # found while a job ran

    @property
    def violations(self) -> list[str]:
        at_end = [f"job {r.job_id}: {v}" for r in self.reports for v in r.violations]
        return [*self.unlawful, *at_end]

    @property
    def missed(self) -> list[Disturbance]:
        """Disturbances that did not fire in any job."""
        met = list(self.fired)
        return [d for d in self.plan.disturbances if d not in met]


@dataclass(slots=True)
class Site:
    """A site on which runs happen. Not thread-safe."""

    store: Store
    objects: Objects
    client: Client
    pool: Pool
    folder: Path
    outputs: str
    prompts: str
    verifier: str
    proposer: str
    order: Order  # as its workers have it
    workers: int
    broker_url: str
    copy: StoreCopy
    expected: Mapping[Key, Outcome] = field(default_factory=dict)
    notify: Notify = lambda _: None
    full: str = ""  # see `Arming`, from the next run on
    skews_sec: tuple[float, ...] = ()
    _learned: dict[Pinned, Mapping[Key, Outcome]] = field(default_factory=dict)
    _number: int = 0

    def run(self, plan: Plan, incident: Running | None = None) -> Ran:
        """Carry out a plan and check that rows and time were conserved.

        `incident` replaces the plan's.
        """
        ran = Ran(plan)
        before = self.pool.restarts
        self.full, self.skews_sec = "", ()
        if plan.incident is not None:
            incident = incident or prepared(self, plan.incident)
        self._arm(plan)
        for attempt in range(MOST_JOBS):
            self._job(ran, f"{plan.seed}-{attempt}", incident)
            if not ran.missed and (incident is None or incident.is_over):
                break
        if incident is not None:
            ran.happened = incident.is_over
            incident.close()
        self._number += 1
        self.pool.arm(Arming(self._number, (), ""))
        self.pool.settle()
        ran.reports = [self.report(r.job_id, plan.restores) for r in ran.reports]
        ran.restarts = self.pool.restarts - before
        return ran

    def learn(self) -> None:
        """Run the job once undisturbed. Later runs must give the same outcomes."""
        ran = Ran(_UNDISTURBED)
        self._job(ran, "undisturbed")
        done = self.store.get_job(ran.reports[0].job_id)
        self.expected = self._learned[_plain(Pinned.of(done))] = self._outcomes(done)

    def learn_as(self, order: Order) -> None:
        """The same with a running worker that has other files or another class."""
        path = Path(order.home) / self.verifier
        fingerprint = snapshot_of(self.verifier, path).fingerprint.digest
        pinned = Pinned(order.numeric_class or NUMERIC_CLASS, fingerprint)
        if pinned not in self._learned:
            ran = Ran(_UNDISTURBED)
            self._job(ran, f"undisturbed-{len(self._learned)}", pinned=pinned)
            done = self.store.get_job(ran.reports[0].job_id)
            self._learned[pinned] = self._outcomes(done)
            if self._learned[pinned] == self.expected:
                raise ChaosError(f"the outcomes of {pinned} are the same as those of others")

    def _outcomes(self, done: JobRow) -> Mapping[Key, Outcome]:
        found = outcomes(done.output_uri, self.objects)
        expected = dict(found)
        if len(expected) < len(found) or done.state is not JobState.PARTIAL:
            raise ChaosError(f"the undisturbed job {done.job_id} is {done.state}, not as it should")
        return expected

    def report(self, job_id: str, restored: bool = False) -> Report:
        """Check a job against the outcomes of the fingerprint and class that it has pinned."""
        pinned = _plain(Pinned.of(self.store.get_job(job_id)))
        expected = self._learned.get(pinned, self.expected)
        return report(self.store, self.objects, job_id, expected, restored)

    def let_go(self, orders: Sequence[Order]) -> None:
        """End added workers, and wait until the store knows that they are gone.

        They are killed, so they count as alive for some leases. A job that began meanwhile might
        pin the class of most of them, and wait for another such worker for ever.
        """
        self.pool.let_go(orders)
        self.pool.until(self._knows_no_others, "the sessions of killed workers to end")

    def _knows_no_others(self) -> bool:
        """Whether all workers that are alive as far as the store knows are in the pool."""
        known = {worker.owner for worker in self.store.backlog().workers}
        return known <= {owner_here(pid) for pid in self.pool.pids}

    def meanwhile(self, work: Callable[[], T], what: str) -> T:
        """Take turns until the work is done, because it may wait for a frozen worker."""
        with ThreadPoolExecutor(1) as thread:
            doing = thread.submit(work)
            self.pool.until(doing.done, what)
        return doing.result()

    def _arm(self, plan: Plan) -> None:
        self._number += 1
        counts = str(self.folder / "counts")
        self.pool.fired.clear()
        self.pool.arm(
            Arming(
                self._number,
                plan.disturbances,
                counts,
                plan.message_seed,
                self.full,
                self.skews_sec,
            )
        )

    def _job(
        self,
        ran: Ran,
        name: str,
        incident: Running | None = None,
        pinned: Pinned = Pinned(),
    ) -> None:
        """Run one job to its end and note what happened to it."""
        output = f"{self.outputs}/{self._number}-{name}"
        spec = spec_of(
            ran.plan, self.prompts, output, self.verifier, self.proposer, self.order.engine, pinned
        )
        job, _ = self.meanwhile(lambda: self.client.submit(spec), "the submission")

        def is_over() -> bool:
            self._note_fired(ran, job.job_id)
            rows_done = self.store.progress(job.job_id).rows_done
            if incident is not None and (what := incident.move_on(rows_done)):
                self.notify(f"  {what}: {self._census(job.job_id)}")
            return self.store.get_job(job.job_id).state.is_final

        self._until_over(job.job_id, is_over, f"the end of job {job.job_id} ({ran.plan})")
        if incident is not None:
            incident.end()  # it may have reopened the job
            again = f"the end of job {job.job_id}, once more ({ran.plan})"
            self._until_over(job.job_id, is_over, again)
        self._note_fired(ran, job.job_id)
        ran.reports.append(Report(job.job_id, JobState.RUNNING, self._census(job.job_id)))

    def _until_over(self, job_id: str, is_over: Callable[[], bool], what: str) -> None:
        """Take turns until a job has ended. The error says what the job waits for."""
        try:
            self.pool.until(is_over, what)
        except ChaosError as error:
            silence_sec = LEASES_OF_SILENCE * self.order.settings["lease_sec"]
            found = standstill(self.store, _redis(self), job_id, silence_sec)
            raise ChaosError(f"{error}\n{found}") from error

    def _note_fired(self, ran: Ran, job_id: str) -> None:
        """Note fired disturbances. Even then every key must be in one place."""
        while self.pool.fired:
            _, fired = self.pool.fired.popleft()
            if fired.run != self._number:
                continue
            disturbance = ran.plan.disturbances[fired.index]
            ran.fired.append(disturbance)
            counted = self._census(job_id)
            self.notify(f"  {disturbance}: {counted}")
            if not counted.holds and self.expected:
                ran.unlawful.append(f"job {job_id} after {disturbance}: {counted}")

    def _census(self, job_id: str) -> Census:
        return census(self.store, self.objects, job_id, self.expected)


def _plain(pinned: Pinned) -> Pinned:
    """The pins without those that outputs do not depend on."""
    return pinned._replace(proposer_fingerprint=None)


def _names(folder: Path, *paths: str) -> list[str]:
    return [str(Path(path).relative_to(folder.resolve())) for path in paths]


@contextmanager
def site(
    folder: Path,
    broker_url: str,
    *,
    engine: EngineKind = "stand-in",
    workers: int = 2,
    database_url: str = "",
    workspace: str = "",
    s3_endpoint_url: str | None = None,
    workers_s3_url: str | None = None,
    step_sec: float = 0.0,
    copy: StoreCopy | None = None,
    forkserver: ForkServer | None = None,
    notify: Notify = lambda _: None,
) -> Iterator[Site]:
    """A site with running workers that knows the expected outcomes of its job.

    `workers_s3_url`: where workers find S3, if that differs from this process.
    `copy`: copies the store; needed for a store that is not on SQLite.
    `forkserver`: starts the workers, with the environment that it was started with itself; by
    default the site has one of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = ""
    settings = Settings(
        broker_url=broker_url,
        database_url=database_url or url_of_file(folder / "specbatch.db"),
        workspace=workspace or str(folder / "work"),
        s3_endpoint_url=workers_s3_url or s3_endpoint_url,
        lease_sec=LEASE_SEC[engine],
        sweep_interval_sec=0.1,
        message_patience_sec=0.5,
        propose_patience_sec=4 * LEASE_SEC[engine],
        max_attempts=1000,  # disturbances must not use up a job's attempts
        kv_cache_mib=256 if engine == VLLM else 64,
        engine=VLLM if engine == VLLM else "exact",
        vllm_options=VLLM_OPTIONS,
    )
    verifier, proposer = models(folder / "models", engine)
    if engine == "stand-in":  # names that mean other files on other hosts
        home, (verifier, proposer) = str(folder.resolve()), _names(folder, verifier, proposer)
    prompts = write_input(folder)
    orders = [
        Order(
            number=number,
            settings=settings.model_dump(),
            engine=engine,
            verifier=verifier,
            proposer=proposer,
            log=str(folder / f"worker-{number}.log"),
            step_sec=step_sec,
            home=home,
        )
        for number in range(workers)
    ]
    with ExitStack() as stack:
        store = stack.enter_context(closing(make_store(settings)))
        forks = forkserver or stack.enter_context(closing(ForkServer(engine)))
        pool = stack.enter_context(Pool(orders, settings.lease_sec, forks))
        app = stack.enter_context(closing(make_app(settings)))
        made = Site(
            store=store,
            objects=Objects(s3_endpoint_url),
            client=make_client(settings, patient(make_enqueue(app)), store),
            pool=pool,
            folder=folder,
            outputs=f"{workspace.rstrip('/')}/outputs" if workspace else str(folder / "outputs"),
            prompts=str(prompts),
            verifier=verifier,
            proposer=proposer,
            order=orders[0],
            workers=workers,
            broker_url=broker_url,
            copy=copy or StoreCopy(folder / "specbatch.db"),
            notify=notify,
        )
        made.learn()
        yield made


# --- incidents ----------------------------------------------------------------------------------
@dataclass(slots=True)
class Running:
    """An incident of a run and its state.

    Its phases prepare it, begin it, and undo what it did; they yield twice, before the last two.
    """

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


def prepared(here: Site, incident: Incident) -> Running:
    """An incident that may begin."""
    phases = _KINDS[incident.kind](here, incident)
    next(phases)
    return Running(incident, phases)


def _model_swapped(here: Site, incident: Incident) -> Phases:
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


def _models_mixed(here: Site, incident: Incident) -> Phases:
    """Add workers of a host whose folder of that name differs in one part."""
    home = here.folder / "other-host"
    for ref in (here.verifier, here.proposer):
        stand_in_model.write_model(home / ref, Path(ref).name)
    verifier = home / here.verifier
    stand_in_model.replace_part(verifier, stand_in_model.REPLACED[0], verifier.name, OTHER_WEIGHTS)
    return _joined_by(here, incident, home=str(home))


def _classes_mixed(here: Site, incident: Incident) -> Phases:
    return _joined_by(here, incident, numeric_class=OTHER_CLASS)


def _joined_by(here: Site, incident: Incident, **unlike: str) -> Phases:
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
        here.let_go(orders)


def _restored(here: Site, incident: Incident) -> Phases:
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


def _queue_of_wrong_type(here: Site, incident: Incident) -> Phases:
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


def _unacked_garbage(here: Site, incident: Incident) -> Phases:
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


def _disk_full(here: Site, _: Incident) -> Phases:
    """Make every write fail everywhere until there is space again."""
    flag = here.folder / _FULL
    here.full = str(flag)
    yield
    flag.touch()
    yield
    flag.unlink()


def _clocks_apart(here: Site, incident: Incident) -> Phases:
    """Set workers' clocks apart for the whole run. The submitter's own clock is right."""
    draw = random.Random(incident.variant)
    here.skews_sec = tuple(draw.choice(MINUTES_APART) for _ in range(here.workers))
    yield
    yield


def _redis(here: Site) -> Redis:
    from redis import Redis

    client: Redis = Redis.from_url(here.broker_url)
    return client


_KINDS: dict[IncidentKind, Callable[[Site, Incident], Phases]] = {
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
