"""Runs small jobs on a site while disturbances hit its store, broker and workers.

A run arms its disturbances and submits jobs until each disturbance has fired. When all jobs have
ended, all frozen workers are thawed and all late messages have arrived, the run checks each job
for conservation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from specbatch.jobs.chaos.conservation import (
    Census,
    Key,
    Outcome,
    Report,
    census,
    outcomes,
    report,
)
from specbatch.jobs.chaos.copies import StoreCopy, copy_of
from specbatch.jobs.chaos.forkserver import ForkServer
from specbatch.jobs.chaos.incidents import Running, prepared
from specbatch.jobs.chaos.job import models, spec_of, write_input
from specbatch.jobs.chaos.orders import Arming, EngineKind, Order
from specbatch.jobs.chaos.plan import Disturbance, Plan
from specbatch.jobs.chaos.pool import ChaosError, Pool
from specbatch.jobs.chaos.stand_in import NUMERIC_CLASS
from specbatch.pipeline.bootstrap import make_client, make_store, patient
from specbatch.pipeline.engines.models.fingerprint import look_at
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.workers.app import make_app, make_enqueue

LEASE_SEC = {"stand-in": 0.8, "real": 2.5}  # a fraction of a usual one, so that a run is short
MOST_JOBS = 60  # of a run: often another worker than the chosen one reaches a place
_UNDISTURBED = Plan(-1, (), group_size=4, writes_ahead=True)

Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Jolt:
    """A change of the surroundings, made when so many rows of the job are done."""

    name: str
    do: Callable[[], None]
    at_rows: int = 1


@dataclass(slots=True)
class Ran:
    """The result of a run."""

    plan: Plan
    fired: list[Disturbance] = field(default_factory=list)
    jolted: list[str] = field(default_factory=list)
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
    tell: Tell = lambda _: None
    full: str = ""  # see `Arming`, from the next run on
    skews_sec: tuple[float, ...] = ()
    _learned: dict[Pinned, Mapping[Key, Outcome]] = field(default_factory=dict)
    _number: int = 0

    def run(self, plan: Plan, jolts: Sequence[Jolt] = ()) -> Ran:
        """Carry out a plan and check that rows and time were conserved."""
        ran = Ran(plan)
        before = self.pool.restarts
        self.full, self.skews_sec = "", ()
        incident = None if plan.incident is None else prepared(self, plan.incident)
        self._arm(plan)
        waiting = list(jolts)
        for attempt in range(MOST_JOBS):
            self._job(ran, waiting, f"{plan.seed}-{attempt}", incident)
            if not ran.missed and not waiting and (incident is None or incident.is_over):
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
        self._job(ran, [], "undisturbed")
        done = self.store.get_job(ran.reports[0].job_id)
        self.expected = self._learned[_plain(Pinned.of(done))] = self._outcomes(done)

    def learn_as(self, order: Order) -> None:
        """The same with a running worker that has other files or another class."""
        path = Path(order.home) / self.verifier
        fingerprint = look_at(self.verifier, path).fingerprint.digest
        pinned = Pinned(order.numeric_class or NUMERIC_CLASS, fingerprint)
        if pinned not in self._learned:
            ran = Ran(_UNDISTURBED)
            self._job(ran, [], f"undisturbed-{len(self._learned)}", pinned=pinned)
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
        jolts: list[Jolt],
        name: str,
        incident: Running | None = None,
        pinned: Pinned = Pinned(),
    ) -> None:
        """Run one job to its end and note what happened to it."""
        output = f"{self.outputs}/{self._number}-{name}"
        spec = spec_of(ran.plan, self.prompts, output, self.verifier, self.proposer, pinned)
        job = self._submit(spec)

        def is_over() -> bool:
            self._note_fired(ran, job.job_id)
            if incident is not None and (what := incident.move_on(self._rows_done(job.job_id))):
                self.tell(f"  {what}: {self._census(job.job_id)}")
            if jolts and self._rows_done(job.job_id) >= jolts[0].at_rows:
                jolt = jolts.pop(0)
                self.tell(f"  {jolt.name}")
                jolt.do()
                ran.jolted.append(jolt.name)
            return self.store.get_job(job.job_id).state.is_final

        self.pool.until(is_over, f"the end of job {job.job_id} ({ran.plan})")
        if incident is not None:
            incident.end()  # it may have reopened the job
            self.pool.until(is_over, f"the end of job {job.job_id}, once more ({ran.plan})")
        self._note_fired(ran, job.job_id)
        ran.reports.append(Report(job.job_id, JobState.RUNNING, self._census(job.job_id)))

    def _submit(self, spec: JobSpec) -> JobRow:
        return self.meanwhile(lambda: self.client.submit(spec), "the submission")[0]

    def _rows_done(self, job_id: str) -> int:
        return self.store.progress(job_id).rows_done

    def _note_fired(self, ran: Ran, job_id: str) -> None:
        """Note fired disturbances. Even then every key must be in one place."""
        while self.pool.fired:
            _, fired = self.pool.fired.popleft()
            if fired.run != self._number:
                continue
            disturbance = ran.plan.disturbances[fired.index]
            ran.fired.append(disturbance)
            counted = self._census(job_id)
            self.tell(f"  {disturbance}: {counted}")
            if not counted.holds and self.expected:
                ran.unlawful.append(f"job {job_id} after {disturbance}: {counted}")

    def _census(self, job_id: str) -> Census:
        return census(self.store, self.objects, job_id, self.expected)


def _plain(pinned: Pinned) -> Pinned:
    """The pins without those that outputs do not depend on."""
    return pinned._replace(proposer_fingerprint=None)


def _names(folder: Path, *paths: str) -> list[str]:
    return [str(Path(path).relative_to(folder.resolve())) for path in paths]


@contextlib.contextmanager
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
    fresh: bool = False,
    tell: Tell = lambda _: None,
) -> Iterator[Site]:
    """A site with running workers that knows the expected outcomes of its job.

    `fresh`: start each worker as a new interpreter, not as a fork of a warm process.
    `workers_s3_url`: where workers find S3, if that differs from this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = ""
    settings = Settings(
        broker_url=broker_url,
        database_url=database_url or f"sqlite:///{folder / 'specbatch.db'}",
        workspace=workspace or str(folder / "work"),
        s3_endpoint_url=workers_s3_url or s3_endpoint_url,
        lease_sec=LEASE_SEC[engine],
        sweep_interval_sec=0.1,
        message_patience_sec=0.5,
        propose_patience_sec=4 * LEASE_SEC[engine],
        max_attempts=1000,  # disturbances must not use up a job's attempts
        kv_cache_mib=64,
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
    with contextlib.ExitStack() as stack:
        store = make_store(settings)
        stack.callback(store.close)
        forkserver = None
        if not fresh:
            forkserver = ForkServer(engine)
            stack.callback(forkserver.close)
        pool = stack.enter_context(Pool(orders, settings.lease_sec, forkserver))
        app = make_app(settings)
        stack.callback(app.close)
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
            copy=copy_of(settings.store_url, folder),
            tell=tell,
        )
        made.learn()
        yield made
