"""A proposer worker that dies, freezes or never comes: the job finishes with the same outputs."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from contracts.shorthand import claim, ingest
from ledger.builders import JOB, Clock

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.runtime.sweeper import Sweeper
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.speculation import DecisionAction
from support import demo
from support.databases import sqlite_store
from support.outcomes import Outcome, outcome
from support.workers import WorkerProcess, command, wait_until, worker

GROUPS = 4
ROWS = 16
PATIENCE_SEC = 60.0


# --- the sweeper ----------------------------------------------------------------------------
class Bed:
    """A sweeper over three groups that wait for drafts, at a time that tests move."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.enqueued: list[DueWork] = []
        self.store = sqlite_store(self.clock)
        ingest(self.store, groups=3, first_stage=Stage.PROPOSE)
        self.sweeper = Sweeper(self.store, self.enqueued.append, 5.0, PATIENCE_SEC)

    def sweep(self) -> list[tuple[Stage, int | None]]:
        """Stages and groups that it enqueued."""
        self.enqueued.clear()
        self.sweeper.sweep()
        return [(message.stage, message.group_index) for message in self.enqueued]


def test_groups_that_nobody_takes_up_go_on_and_are_enqueued_at_once() -> None:
    bed = Bed()
    bed.clock.advance(PATIENCE_SEC)
    assert bed.sweep() == [(Stage.PROPOSE, index) for index in range(3)]
    assert bed.store.decisions(JOB) == []
    claim(bed.store, 1, Stage.PROPOSE)  # somebody holds this one: the others wait behind it
    bed.clock.advance(1.0)
    assert (Stage.VERIFY, 0) not in bed.sweep()
    bed.clock.advance(PATIENCE_SEC)  # its lease runs out, and nobody follows
    bed.sweep()
    stages = {message.group_index: message.stage for message in bed.store.due()}
    assert stages == {0: Stage.VERIFY, 1: Stage.PROPOSE, 2: Stage.VERIFY}
    [decision] = bed.store.decisions(JOB)
    assert decision.action is DecisionAction.SKIPPED
    assert decision.reason == (
        "2 groups (0, 2) skip drafting: no propose worker claimed them within 60 s"
    )
    bed.clock.advance(PATIENCE_SEC + 1)
    assert (Stage.VERIFY, 1) in bed.sweep()
    assert "group 1 skips drafting" in bed.store.decisions(JOB)[-1].reason


def test_a_reason_names_only_so_many_groups() -> None:
    clock = Clock()
    store = sqlite_store(clock)
    ingest(store, groups=30, first_stage=Stage.PROPOSE)
    clock.advance(PATIENCE_SEC + 1)
    Sweeper(store, lambda _: None, 5.0, PATIENCE_SEC).sweep()
    [decision] = store.decisions(JOB)
    assert decision.reason.startswith("30 groups (0, 1, 2, 3, 4, 5, 6, 7, ...) skip drafting")


def test_groups_go_on_even_if_that_cannot_be_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed()

    def refuse(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(bed.store, "note_decisions", refuse)
    bed.clock.advance(PATIENCE_SEC + 1)
    with caplog.at_level(logging.WARNING):
        assert bed.sweep() == [(Stage.VERIFY, index) for index in range(3)]
    assert "the disk is full" in caplog.text


# --- processes ------------------------------------------------------------------------------
def spec_of(folder: Path) -> str:
    """A job whose blocks take a while to draft."""
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, ROWS), folder / "prompts.parquet")
    spec = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": "out"},
        "verifier": str(demo.VERIFIER),
        "proposer": str(demo.DRAFT),
        "sampling": {"max_tokens": 128, "temperature": 0.8, "seed": 3, "ignore_eos": True},
        "speculation": {"pregenerate": True, "pregenerate_tokens": 128},
        "group_size": ROWS // GROUPS,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return "job.yaml"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The job in one process that nothing happens to."""
    home = tmp_path_factory.mktemp("undisturbed")
    environment = {"SPECBATCH_WORKSPACE": str(home / "workspace")}
    report = command("submit-job", spec_of(home), "--local", environment=environment, cwd=home)
    assert report["state"] == "done"
    with closing(make_store(Settings(workspace=str(home / "workspace")))) as store:
        return outcome(store, report["job"])


class Site:
    """A job over Redis, with short leases. Only the worker that verifies loses patience soon:
    nothing is skipped before it is there."""

    def __init__(self, redis_url: str, home: Path) -> None:
        self.home = home
        self.environment = {
            "SPECBATCH_BROKER_URL": redis_url,
            "SPECBATCH_WORKSPACE": str(home / "workspace"),
            "SPECBATCH_LEASE_SEC": "3",
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        }
        self.store = make_store(Settings(workspace=str(home / "workspace")))
        report = self.command("submit-job", spec_of(home))
        self.job_id = report["job"]

    def command(self, *arguments: str) -> dict[str, Any]:
        return command(*arguments, environment=self.environment, cwd=self.home)

    @contextmanager
    def worker(self, *arguments: str) -> Iterator[WorkerProcess]:
        patience = {"SPECBATCH_PROPOSE_PATIENCE_SEC": "2" if arguments == VERIFY else "600"}
        with worker(*arguments, environment=self.environment | patience, cwd=self.home) as process:
            yield process

    def groups(self) -> list[tuple[bool, bool]]:
        """(has drafts, is held by a proposer) of all groups, by the store's own rows."""
        path = self.home / "workspace" / "specbatch.db"
        with closing(sqlite3.connect(path)) as database:
            rows = database.execute(
                "SELECT coalesce(drafts, 'null') != 'null', "
                "stage = 'propose' AND lease_owner IS NOT NULL FROM groups"
            )
            return [(bool(has_drafts), bool(held)) for has_drafts, held in rows]

    def end_between_two_drafts(self, end: Callable[[], None]) -> bool:
        """Whether one group is drafted and another one held; if so, the proposer is ended there.

        Nobody can write meanwhile: the group stays held, and a worker that freezes while it writes
        would keep SQLite's lock from all others.
        """
        path = self.home / "workspace" / "specbatch.db"
        with closing(sqlite3.connect(path, timeout=60.0, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            found = {(True, False), (False, True)} <= set(self.groups())
            if found:
                end()
            database.execute("ROLLBACK")
        return found

    def finish(self, one: WorkerProcess) -> None:
        wait_until("the job's end", lambda: self.store.get_job(self.job_id).state.is_final, [one])
        assert self.store.get_job(self.job_id).state == "done"

    def skipped(self) -> list[str]:
        return [
            d.reason
            for d in self.store.decisions(self.job_id)
            if d.action is DecisionAction.SKIPPED
        ]


VERIFY = ("verify", "--verifier", str(demo.VERIFIER))
PROPOSE = ("propose", "--proposer", str(demo.DRAFT), "--concurrency", "1")


@pytest.fixture
def site(redis_url: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(redis_url, tmp_path)
    yield site
    site.store.close()


def test_a_proposer_that_was_never_started_holds_nothing_up(
    site: Site, undisturbed: Outcome
) -> None:
    with site.worker("ingest"), site.worker("record"), site.worker(*VERIFY) as verifier:
        site.finish(verifier)
    assert outcome(site.store, site.job_id) == undisturbed
    assert sum(count_of(reason) for reason in site.skipped()) == GROUPS
    assert all("no propose worker claimed" in reason for reason in site.skipped())


@pytest.mark.parametrize("end", [WorkerProcess.kill, WorkerProcess.freeze], ids=["kill", "freeze"])
def test_a_proposer_that_ends_in_the_middle_holds_nothing_up(
    site: Site, undisturbed: Outcome, end: Callable[[WorkerProcess], None]
) -> None:
    with site.worker("ingest") as reader, site.worker(*PROPOSE) as proposer:
        wait_until("the input is read", site.groups, [reader])
        wait_until(
            "one group drafted, another one held",
            lambda: site.end_between_two_drafts(lambda: end(proposer)),
            poll_sec=0.0,
        )
        with site.worker("record"), site.worker(*VERIFY) as verifier:
            site.finish(verifier)
            assert outcome(site.store, site.job_id) == undisturbed
            undrafted = sum(not has_drafts for has_drafts, _ in site.groups())
            assert 0 < undrafted < GROUPS
            assert sum(count_of(reason) for reason in site.skipped()) == undrafted
            if end is WorkerProcess.freeze:  # it comes to itself, and its draft is refused
                proposer.thaw()
                wait_until(
                    "it is fenced",
                    lambda: "attempt abandoned, lease lost: " in proposer.text(),
                    [proposer],
                )
                assert outcome(site.store, site.job_id) == undisturbed


def count_of(reason: str) -> int:
    """Groups that a reason tells of."""
    words = reason.split()
    return 1 if words[0] == "group" else int(words[0])
