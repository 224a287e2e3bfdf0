"""Random lives of jobs with turns, limits, kept rows and inputs that wait: the twins agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger.builders import LEASE_SEC, completion
from ledger.test_store_machine import LEASES, OWNERS, TwinStores

from specbatch.pipeline.ledger.sql.migrate import upgrade
from specbatch.schemas.records import Stage, StageTiming

CLAIMS = st.sampled_from([(Stage.VERIFY, "big"), (Stage.VERIFY, "big"), (Stage.PROPOSE, "small")])


class TurnsOfTwins(TwinStores):
    """What `TwinStores` does, and what is told here."""

    @rule(claim=CLAIMS, owner=OWNERS)
    def claim_next(self, claim: tuple[Stage, str], owner: str) -> None:
        self.keep(self.both(lambda store: store.claim_next(*claim, owner, LEASE_SEC)))

    @rule()
    def sweep(self) -> None:
        self.both(lambda store: store.close_over())
        self.both(lambda store: store.stop_overdue())

    @precondition(lambda self: self.leases)
    @rule(number=LEASES, usd=st.sampled_from([0.0, 0.25, 0.75]))
    def look(self, number: int, usd: float) -> None:
        held = dict.fromkeys([*self.leases[-3:], self.lease(number)], usd)
        self.both(lambda store: store.look(held))

    @precondition(lambda self: self.holds(Stage.VERIFY))
    @rule(number=LEASES, rows=st.sets(st.integers(0, 3)))
    def keep_part(self, number: int, rows: set[int]) -> None:
        lease, timing = self.lease(number), StageTiming(0.0, 0.5, 0.25)
        if lease.stage is not Stage.VERIFY:
            return
        records = [completion(row + 4 * (lease.group_index or 0)) for row in sorted(rows)]
        self.both(lambda store: store.keep_part(lease, records, timing, {"steps": 1}))
        self.both(lambda store: store.kept_rows(self.job))

    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(most_open=st.integers(1, 4))
    def pause_ingest(self, most_open: int) -> None:
        lease = self.lease(0)
        self.both(lambda store: store.pause_ingest(lease, most_open))


@pytest.fixture(autouse=True)
def _template(tmp_path: Path) -> None:
    TurnsOfTwins.template = tmp_path / "store.db"
    upgrade(f"sqlite:///{TurnsOfTwins.template}")


TestTurnsOfTwins = TurnsOfTwins.TestCase
TestTurnsOfTwins.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
