"""The harness does what it says to real processes, and finds what is planted for it to find."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.in_process import LEASE_SEC, armed, shop
from faults.sites import Jolt, Jolts
from redis import Redis

from specbatch.jobs.chaos.harness import OTHER_CLASS, Ran, Site, prepared, site
from specbatch.jobs.chaos.plan import Deed, Disturbance, Incident, IncidentKind, Plan
from specbatch.jobs.chaos.pool import ChaosError
from specbatch.jobs.chaos.stand_in import NUMERIC_CLASS, HashedTokens
from specbatch.jobs.chaos.stand_in_model import EOS, VOCAB_SIZE, weights_of
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.ledger.sql import groups
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.errors import FencedError
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.records import JobState, SamplingParams, Stage, StageTiming
from specbatch.schemas.tables import Group
from support.workers import wait_until

PLAIN = Plan(0, (), group_size=4, writes_ahead=True)


def plan(*disturbances: Disturbance, writes_ahead: bool = True) -> Plan:
    return Plan(0, disturbances, group_size=4, writes_ahead=writes_ahead)


def log_of(here: Site) -> str:
    return "".join(p.read_text(errors="replace") for p in sorted(here.folder.glob("worker-*.log")))


def test_outputs_are_what_the_stand_in_is_known_to_write(one_site: Site) -> None:
    job = one_site.run(PLAIN).reports[0]
    rows = read_output(one_site.store.get_job(job.job_id).output_uri).to_pylist()
    model = weights_of(one_site.folder / one_site.verifier) + NUMERIC_CLASS.encode()
    checked = 0
    for row in rows:
        if row["finish_reason"] == "error":
            continue
        prompt = tuple(f"The story of {row['row_index']} sailors and".encode())
        law = HashedTokens(
            Request("", prompt, SamplingParams(), row["seed"]), VOCAB_SIZE, model=model
        )
        tokens = [law.at(place)[0] for place in range(12)]
        stop = tokens.index(EOS) + 1 if EOS in tokens else 12
        assert row["token_ids"] == tokens[:stop]
        checked += 1
    assert checked == 20


def test_a_worker_with_the_stand_in_loads_no_torch(one_site: Site) -> None:
    assert one_site.run(PLAIN).violations == []
    for pid in one_site.pool.pids:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_killed_worker_is_started_anew(one_site: Site) -> None:
    before = one_site.pool.pids
    kill = Disturbance(CrashPoint.VERIFY, Deed.KILL, nth=2, worker=1)
    ran = one_site.run(plan(kill))
    assert ran.fired == [kill]
    assert ran.restarts == 1
    assert ran.violations == []
    after = one_site.pool.pids
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_frozen_worker_finds_its_lease_gone(one_site: Site) -> None:
    freeze = Disturbance(CrashPoint.ARTEFACT_WRITE, Deed.FREEZE, nth=4)  # the first results
    abandoned = "attempt abandoned, lease lost: "
    before = log_of(one_site).count(abandoned)
    for _ in range(6):  # on a busy machine nobody may have come for the group before it woke
        ran = one_site.run(plan(freeze))
        assert ran.fired == [freeze]
        assert ran.restarts == 0
        assert ran.violations == []
        if log_of(one_site).count(abandoned) > before:
            return
    raise AssertionError("no frozen worker was told that its group is another's")


def test_a_worker_that_is_frozen_with_the_databases_lock_holds_no_submission_up(
    one_site: Site,
) -> None:
    freeze = plan(Disturbance(CrashPoint.SQL_COMMIT, Deed.FREEZE))
    one_site._arm(freeze)
    wait_until("one is frozen", lambda: any(map(is_frozen, one_site.pool.pids)))
    ran = Ran(freeze)
    one_site._job(ran, "behind-it")  # SQLite waits for ten seconds, and then refuses
    assert not ran.missed
    assert not ran.unlawful
    one_site.pool.settle()


def test_a_worker_that_stops_after_it_was_thawed_is_thawed_again(one_site: Site) -> None:
    """It tells of its stop before it stops, and its run may be over in between."""
    pool = one_site.pool
    pid = pool.pids[0]
    pool.disturb(0, Deed.FREEZE)
    wait_until("it is frozen", lambda: is_frozen(pid))
    pool.thaw_all()
    wait_until("it is thawed", lambda: not is_frozen(pid))
    os.kill(pid, signal.SIGSTOP)
    wait_until("it is frozen again", lambda: is_frozen(pid))
    pool.settle()
    assert not is_frozen(pid)


def test_workers_may_be_hit_from_outside(one_site: Site) -> None:
    pool = one_site.pool
    hits = Jolts(
        Jolt("kill", lambda: pool.disturb(0, Deed.KILL), at_rows=0),
        Jolt("freeze", lambda: pool.disturb(1, Deed.FREEZE), at_rows=1),
    )
    ran = one_site.run(PLAIN, hits)
    assert hits.done == ["kill", "freeze"]
    assert ran.restarts == 1
    assert ran.violations == []


def test_a_worker_that_loses_its_device_ends_and_is_started_anew(one_site: Site) -> None:
    lose = Disturbance(CrashPoint.VERIFY, Deed.BREAK, nth=3, variant=1)
    pool = one_site.pool
    before, fell = pool.restarts, "the device fell off the bus"
    told = log_of(one_site).count(fell)
    ran = one_site.run(plan(lose))
    assert ran.fired == [lose]
    assert ran.violations == []
    # It ends by itself, in its own time: the job may be over before that.
    pool.until(lambda: pool.restarts == before + 1, "the worker's end")
    assert log_of(one_site).count(fell) > told


def test_added_workers_are_gone_for_the_store_too_before_the_next_job(one_site: Site) -> None:
    """Killed ones count as alive for some leases, and a job pins the class of most live workers."""
    two = Incident(IncidentKind.CLASSES_MIXED, lasts_sec=math.inf, variant=1)
    joined = prepared(one_site, two)
    joined.move_on(two.at_rows)
    assert classes_alive(one_site) == {NUMERIC_CLASS, OTHER_CLASS}
    joined.end()
    assert classes_alive(one_site) == {NUMERIC_CLASS}


def test_the_error_of_a_job_that_does_not_end_says_what_it_waits_for(one_site: Site) -> None:
    here, redis = one_site, Redis.from_url(one_site.broker_url)
    usual, nobodys = here.pool.patience_sec, Pinned("nobodys/f32/1")
    redis.rpush("a-queue", "one", "two")
    lose_patience = Jolt("lose patience", partial(setattr, here.pool, "patience_sec", -1.0), 0)
    with pytest.raises(ChaosError) as raised:
        here._job(Ran(plan(writes_ahead=False)), "in-vain", Jolts(lose_patience), nobodys)
    here.pool.patience_sec = usual
    redis.delete("a-queue")
    job_id = here.store.list_jobs(limit=1)[0].job_id
    here.client.cancel(job_id)
    here.pool.until(lambda: here.store.get_job(job_id).state.is_final, "its end")
    said = str(raised.value)
    assert f"job {job_id} is " in said
    assert f"waits for a worker of numeric class nobodys/f32/1; alive: {NUMERIC_CLASS}" in said
    assert f"serves {NUMERIC_CLASS}" in said
    assert "key a-queue is a list of 2" in said


def classes_alive(here: Site) -> set[str]:
    serves = [worker.serves for worker in here.store.backlog().workers]
    return {name for each in serves if each for name in each.names}


def is_running(pid: int) -> bool:
    """Whether it is there, and not only its name: nobody may have asked yet how it ended."""
    return state_of(pid) not in ("Z", "X")


def is_frozen(pid: int) -> bool:
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The letter that the kernel has for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def test_workers_end_with_their_supervisor(tmp_path: Path, redis_url: str) -> None:
    with site(tmp_path / "site", redis_url) as here:
        pids = here.pool.pids
        assert all(map(is_running, pids))
        os.kill(pids[0], signal.SIGSTOP)
    wait_until("their end", lambda: not any(map(is_running, pids)))


# --- planted --------------------------------------------------------------------------------
# Imported by every interpreter that finds it on its path. Once the file `now` is there, its workers
# have a store whose groups are done before their rows are there: two transactions instead of one.
IN_TWO = """
from pathlib import Path
from specbatch.pipeline.ledger.sql import groups
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.crash_points import CrashPoint, reach

NOW = Path(__file__).with_name("now")
whole, insert = SqlStore.commit_group, groups._insert

def commit_group(self, *arguments):
    later = []
    if NOW.exists():
        groups._insert = lambda conn, values, of_job: later.append((values, of_job))
    whole(self, *arguments)
    if later:
        reach(CrashPoint.DRAFT_WRITE)  # the job that is run here comes to it nowhere else
        self._write(lambda conn, now: [insert(conn, *one) for one in later])

SqlStore.commit_group = commit_group
"""


def test_a_store_that_commits_in_two_steps_is_found_out(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(IN_TWO)
    path = os.pathsep.join([str(tmp_path / "planted"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))
    kill = Disturbance(CrashPoint.DRAFT_WRITE, Deed.KILL, nth=2)
    with site(tmp_path / "site", redis_url) as here:
        (tmp_path / "planted" / "now").touch()
        ran = here.run(plan(kill, writes_ahead=False))
    assert ran.fired == [kill]
    found = "\n".join(ran.violations)
    assert "are pending" in found
    assert "are not in the output" in found


def test_a_store_without_a_fence_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late word opens a group again whose job has ended."""

    def anybody(job_id: Any, group_index: Any, *_: Any) -> list[Any]:
        return [Group.job_id == job_id, Group.group_index == group_index]

    with shop(tmp_path) as bed:
        job_id = bed.submit()
        while (message := bed.store.due()[0]).stage is not Stage.VERIFY:
            bed.do_next(job_id)
        late = bed.store.claim_group(job_id, message.group_index or 0, Stage.VERIFY, "late", 60.0)
        assert late is not None
        bed.drain(job_id)
        word = (late.lease, Stage.RECORD, late.prompts, StageTiming(0.0))
        with pytest.raises(FencedError):
            bed.store.advance(*word)
        assert bed.report(job_id).violations == ()
        monkeypatch.setattr(groups, "held_by", anybody)
        monkeypatch.setattr(groups, "_leaving", groups._leaving.__wrapped__)  # not the cached one
        bed.store.advance(*word)
        assert "with 3 groups, of which 2 are done" in "\n".join(bed.report(job_id).violations)


# --- a publisher that comes to itself -------------------------------------------------------
def test_a_publisher_that_was_stopped_leaves_alone_what_another_finished(tmp_path: Path) -> None:
    with shop(tmp_path) as bed:
        stopped, other = bed.workers[0], bed.hire()
        job_id = bed.submit()
        while bed.store.due()[0].stage is not Stage.PUBLISH:
            bed.do_next(job_id)
        begun, published, late = [], [], []

        def stop(point: CrashPoint) -> None:
            if point is CrashPoint.LEASE and not begun:
                begun.append(point)
                bed.clock.advance(LEASE_SEC + 1)
                bed.drain(job_id, other)
                published.append(bed.store.get_job(job_id).state)
            elif published:
                late.append(point)

        with armed(stop):
            bed.do_next(job_id, stopped)
        assert published == [JobState.PARTIAL]
        assert not {CrashPoint.UPLOAD, CrashPoint.MANIFEST} & set(late)
        assert bed.report(job_id).violations == ()
