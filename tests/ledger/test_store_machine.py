"""Random lives of a job: SQLite and the in-memory twin must agree after every step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger.builders import (
    DRAFTS,
    LEASE_SEC,
    RESULTS,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.memory_store import MemoryStore
from specbatch.pipeline.ledger.migrate import upgrade
from specbatch.pipeline.ledger.sql_store import SqlStore
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.records import Bell, JobState, Lease, RejectedRow, Stage, StageTiming

OWNERS = st.sampled_from(["w1", "w2"])
WORK = st.sampled_from([Stage.PROPOSE, Stage.VERIFY, Stage.RECORD])
LEASES = st.sampled_from([0, 0, 0, 1, 2, 3, 30])  # which of the leases, the newest first

FIRST = st.sampled_from([Stage.PROPOSE, Stage.VERIFY])
ENDS = st.sampled_from(["finish", "finish", "release", "vanish"])


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the kind and words of the error."""
    try:
        return call()
    except (SpecbatchError, ValueError) as error:
        return type(error), str(error)


class TwinStores(RuleBasedStateMachine):
    template: Path  # a migrated, empty database

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = shutil.copy(self.template, self.folder.name)
        self.clock = Clock()
        self.memory = MemoryStore(max_attempts=2, clock=self.clock)
        self.sql = SqlStore(f"sqlite:///{path}", max_attempts=2, clock=self.clock)
        self.leases: list[Lease] = []
        self.job = ""
        self.submit()

    def submit(self) -> None:
        """From here on it is about this job."""
        self.job = f"job{len(self.memory.list_jobs()):05d}"
        self.both(lambda store: store.create_job(new_job(self.job)))

    def teardown(self) -> None:
        self.both(lambda store: store.failed_groups(self.job))
        self.both(lambda store: list(store.completions(self.job)))
        self.both(lambda store: list(store.rejected(self.job)))
        self.sql.close()
        self.folder.cleanup()

    def both(self, call: Callable[[Store], Any]) -> Any:
        expected = outcome(lambda: call(self.memory))
        assert outcome(lambda: call(self.sql)) == expected
        return expected

    def keep(self, work: Any) -> None:
        if work is not None:
            self.leases.append(work.lease)

    def holds(self, *stages: Stage) -> bool:
        """Whether the newest lease is of these stages; rules pick older ones too."""
        return bool(self.leases) and self.lease(0).stage in stages

    def lease(self, number: int) -> Lease:
        return self.leases[-1 - number % len(self.leases)]

    @initialize(first=FIRST, groups=st.integers(1, 3))
    def ingest(self, first: Stage, groups: int) -> None:
        self.claim_job(Stage.INGEST, "w1")
        for _ in range(groups):
            self.add_group(0, first)
        self.finish_ingest(0)

    @precondition(lambda self: self.memory.get_job(self.job).state.is_final)
    @rule(first=FIRST, groups=st.integers(0, 3))
    def next_job(self, first: Stage, groups: int) -> None:
        """Without groups it is left unread, so that ingest has random lives too."""
        self.submit()
        if groups:
            self.ingest(first, groups)

    # --- time and jobs ----------------------------------------------------------------------
    @rule(seconds=st.sampled_from([1.0, LEASE_SEC]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(stage=st.sampled_from([Stage.INGEST, Stage.PUBLISH]), owner=OWNERS)
    def claim_job(self, stage: Stage, owner: str) -> None:
        self.keep(self.both(lambda store: store.claim_job(self.job, stage, owner, LEASE_SEC)))

    @rule(then_end=st.booleans())
    def request_cancel(self, then_end: bool) -> None:
        self.both(lambda store: store.request_cancel(self.job))
        if then_end and self.memory.get_job(self.job).stage is Stage.PUBLISH:
            self.work("w1", ["finish"])
            self.retry_job()

    @rule()
    def retry_job(self) -> None:
        self.both(lambda store: store.retry_job(self.job))

    # --- with a lease -----------------------------------------------------------------------
    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(number=LEASES, first=FIRST)
    def add_group(self, number: int, first: Stage) -> None:
        index = self.memory.get_job(self.job).groups_total
        bad = [RejectedRow(100 + index, None, "empty", "empty")]
        group, lease = new_group(index, first_stage=first), self.lease(number)
        self.both(lambda store: store.add_groups(lease, [group], bad, index, position(index)))

    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(number=LEASES)
    def finish_ingest(self, number: int) -> None:
        lease = self.lease(number)
        self.both(lambda store: store.finish_ingest(lease, 8, {"verifier": "abc"}))

    @precondition(lambda self: self.holds(Stage.PUBLISH))
    @rule(number=LEASES, state=st.sampled_from([JobState.DONE, JobState.PARTIAL]))
    def finish_job(self, number: int, state: JobState) -> None:
        lease = self.lease(number)
        self.both(lambda store: store.finish_job(lease, state))

    @precondition(lambda self: self.leases and self.lease(0).group_index is None)
    @rule(then_retry=st.booleans())
    def fail_job(self, then_retry: bool) -> None:
        lease = self.lease(0)
        self.both(lambda store: store.fail_job(lease, "cannot be used"))
        if then_retry:
            self.retry_job()

    @precondition(lambda self: self.leases)
    @rule(number=LEASES)
    def release(self, number: int) -> None:
        lease = self.lease(number)
        self.both(lambda store: store.release(lease, "broken"))

    @precondition(lambda self: self.leases)
    @rule()
    def heartbeat(self) -> None:
        self.both(lambda store: store.heartbeat(self.leases[-5:], LEASE_SEC))

    # --- groups -----------------------------------------------------------------------------
    @rule(index=st.integers(0, 2), stage=WORK, owner=OWNERS)
    def claim_group(self, index: int, stage: Stage, owner: str) -> None:
        self.keep(
            self.both(lambda store: store.claim_group(self.job, index, stage, owner, LEASE_SEC))
        )

    @rule(owner=OWNERS)
    def claim_what_is_due(self, owner: str) -> None:
        for bell in self.both(lambda store: store.due())[:1]:
            self.keep(self.both(partial(self.answer, bell, owner)))

    @staticmethod
    def answer(bell: Bell, owner: str, store: Store) -> Any:
        if bell.group_index is None:
            return store.claim_job(bell.job_id, bell.stage, owner, LEASE_SEC)
        return store.claim_group(bell.job_id, bell.group_index, bell.stage, owner, LEASE_SEC)

    @rule(owner=OWNERS, ends=st.lists(ENDS, min_size=2, max_size=8))
    def work(self, owner: str, ends: list[str]) -> None:
        """What workers do: take the next unit and finish it, give it back, or die."""
        for end in ends:
            known = len(self.leases)
            self.claim_what_is_due(owner)
            if len(self.leases) == known or end == "vanish":
                self.clock.advance(LEASE_SEC)
            elif end == "release":
                self.release(0)
            else:
                self.finish_stage(self.lease(0))

    def finish_stage(self, lease: Lease) -> None:
        if lease.stage is Stage.INGEST:
            self.finish_ingest(0)
        elif lease.stage is Stage.PUBLISH:
            self.finish_job(0, JobState.PARTIAL)
        elif lease.stage is Stage.RECORD:
            self.commit_group(0)
        else:
            self.advance(0, 0.5)

    @precondition(lambda self: self.holds(Stage.PROPOSE, Stage.VERIFY))
    @rule(number=LEASES, compute_sec=st.sampled_from([0.0, 0.5]))
    def advance(self, number: int, compute_sec: float) -> None:
        lease, timing = self.lease(number), StageTiming(0.0, compute_sec)
        proposes = lease.stage is Stage.PROPOSE
        to, artefact = (Stage.VERIFY, DRAFTS) if proposes else (Stage.RECORD, RESULTS)
        self.both(lambda store: store.advance(lease, to, artefact, timing))

    @precondition(lambda self: self.holds(Stage.RECORD))
    @rule(number=LEASES)
    def commit_group(self, number: int) -> None:
        lease = self.lease(number)
        records = [completion(row + 4 * (lease.group_index or 0)) for row in range(2)]
        timing = StageTiming(0.25, 1.0)
        self.both(lambda store: store.commit_group(lease, records, timing, {"steps": 1}))

    @precondition(lambda self: self.leases and self.memory.get_job(self.job).cancel_requested)
    @rule(number=LEASES)
    def cancel_group(self, number: int) -> None:
        lease = self.lease(number)
        self.both(lambda store: store.cancel_group(lease))

    # --- what must hold ---------------------------------------------------------------------
    @invariant()
    def both_show_the_same(self) -> None:
        self.both(lambda store: store.get_job(self.job))
        self.both(lambda store: store.progress(self.job))
        self.both(lambda store: store.due())

    @invariant()
    def a_job_is_never_stuck(self) -> None:
        """Whatever happened: it has ended, is due, is held, or one of its groups is."""
        job = self.memory.get_job(self.job)
        later = Clock()
        later.now = self.clock.now + 2 * LEASE_SEC
        self.memory._now = later
        due = self.memory.due()
        self.memory._now = self.clock
        assert job.state.is_final == (not due)


@pytest.fixture(autouse=True)
def _template(tmp_path: Path) -> None:
    TwinStores.template = tmp_path / "store.db"
    upgrade(f"sqlite:///{TwinStores.template}")


TestTwinStores = TwinStores.TestCase
TestTwinStores.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
