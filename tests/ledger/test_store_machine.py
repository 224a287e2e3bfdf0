"""Random lives of a job: the store answers as the rules say after every step, and keeps what
nothing may break: rows are a partition, a lease that is not current writes nothing, a completion
is made once, and a job comes to its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from ledger.claim_model import ClaimModel, Job

from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.audit.replay_log import Checker
from specbatch.schemas.errors import FencedError, SpecbatchError
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    DueWork,
    GroupWork,
    JobRow,
    JobState,
    JobWork,
    Lease,
    RejectedRow,
    Stage,
    StageTiming,
)
from support.databases import sqlite_store

MAX_ATTEMPTS = 2
ROWS = 4  # of a planned group
MOST_CLAIMS = 200  # that bring any job here to its end
OWNERS = st.sampled_from(["w1", "w2"])
WORK = st.sampled_from([Stage.PROPOSE, Stage.VERIFY, Stage.RECORD])
LEASES = st.sampled_from([0, 0, 0, 1, 2, 3, 30])  # which of the leases, the newest first

FIRST = st.sampled_from([Stage.PROPOSE, Stage.VERIFY])
ENDS = st.sampled_from(["finish", "finish", "release", "vanish"])
RARELY = st.sampled_from([False, False, False, True])


def outcome(call: Callable[[], Any]) -> Any:
    """What the answer says of claims, or the kind of the error."""
    try:
        return facts(call())
    except (SpecbatchError, ValueError) as error:
        return type(error)


def facts(answer: Any) -> Any:
    """What `ClaimModel` knows of an answer of the store."""
    match answer:
        case GroupWork():
            return answer.lease, answer.row_start, answer.rows, answer.rows_kept, answer.suspect
        case JobWork():
            return answer.lease
        case JobRow():
            flags = (answer.cancel_requested, answer.paused)
            return answer.state, answer.stage, *flags, answer.groups_total
        case JobProgress():
            done = (answer.rows_done, answer.groups_done)
            return *done, answer.completions, answer.ingest_done
        case DueWork():
            return answer.job_id, answer.stage, answer.group_index
        case list():
            return [facts(one) for one in answer]
    return answer


class StoreLives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.model = ClaimModel(self.clock, MAX_ATTEMPTS)
        self.store = sqlite_store(self.clock, max_attempts=MAX_ATTEMPTS)
        self.leases: list[Lease] = []
        self.suspects: list[Lease] = []  # of groups that workers may have died of
        self.job = ""
        self.submit()

    def submit(self) -> None:
        """From here on it is about this job."""
        self.job = f"job{len(self.model.jobs):05d}"
        self.model.create_job(new_job(self.job))
        self.store.create_job(new_job(self.job))

    def teardown(self) -> None:
        """Claims tell whether both have the same fencing tokens, attempts and rows."""
        self.come_to_the_end(None)
        self.store.close()

    def both(self, call: Callable[[Any], Any]) -> Any:
        expected = outcome(lambda: call(self.model))
        assert outcome(lambda: call(self.store)) == expected
        return expected

    def by_lease(self, lease: Lease, call: Callable[[Any], Any]) -> Any:
        """A write that names a lease: unless that is current, nothing comes of it."""
        current = self.model.is_current(lease)
        found = self.both(call)
        assert current or found in (FencedError, ValueError)
        return found

    @property
    def held(self) -> Job:
        """The job's state, as the model has it."""
        return self.model.jobs[self.job]

    def rows(self, index: int) -> range:
        """The input rows of a group."""
        group = self.held.groups[index]
        first = ROWS * group.file + group.first
        return range(first, first + group.rows)

    def keep(self, claimed: Any) -> None:
        """Remember what a claim answered."""
        if isinstance(claimed, Lease):
            self.leases.append(claimed)
        elif claimed is not None:
            lease, *_, suspect = claimed
            self.leases.append(lease)
            if suspect:
                self.keep_suspect(lease)

    def keep_suspect(self, lease: Lease) -> None:
        """Who claims a group that workers may have died of holds no other one at that moment."""
        others = [
            other
            for other in self.suspects
            if (other.owner, other.stage) == (lease.owner, lease.stage)
            if self.model.is_current(other)
            if self.model.unit(other).lease_until > self.clock.now
        ]
        assert not others
        self.suspects.append(lease)

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

    @precondition(lambda self: self.held.state.is_final)
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
        if then_end and self.held.stage is Stage.PUBLISH:
            self.work("w1", ["finish"])
            self.retry_job()

    @rule(quarantined=st.sampled_from([False, False, True]))
    def retry_job(self, quarantined: bool = False) -> None:
        self.both(lambda store: store.retry_job(self.job, quarantined))

    # --- with a lease -----------------------------------------------------------------------
    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(number=LEASES, first=FIRST)
    def add_group(self, number: int, first: Stage) -> None:
        index = self.held.planned
        bad = [RejectedRow(100 + index, None, "empty", "empty")]
        group, lease = new_group(index, first_stage=first), self.lease(number)
        self.by_lease(
            lease, lambda store: store.add_groups(lease, [group], bad, index, position(index))
        )

    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(number=LEASES)
    def finish_ingest(self, number: int) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.finish_ingest(lease, 8, {"verifier": "abc"}))

    @precondition(lambda self: self.holds(Stage.PUBLISH))
    @rule(number=LEASES, state=st.sampled_from([JobState.DONE, JobState.PARTIAL]))
    def finish_job(self, number: int, state: JobState) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.finish_job(lease, state))

    @precondition(lambda self: self.leases and self.lease(0).group_index is None)
    @rule(then_retry=st.booleans())
    def fail_job(self, then_retry: bool) -> None:
        lease = self.lease(0)
        self.by_lease(lease, lambda store: store.fail_job(lease, "cannot be used"))
        if then_retry:
            self.retry_job()

    @precondition(lambda self: self.leases)
    @rule(number=LEASES, forgiven=RARELY, whole=RARELY)
    def release(self, number: int, forgiven: bool = False, whole: bool = False) -> None:
        lease = self.lease(number)
        self.both(lambda store: store.release(lease, "broken", forgiven, whole))

    @precondition(lambda self: self.leases)
    @rule()
    def heartbeat(self) -> None:
        self.both(lambda store: store.heartbeat(self.leases[-5:], LEASE_SEC))

    # --- groups -----------------------------------------------------------------------------
    @rule(number=st.integers(0, 8), stage=WORK, owner=OWNERS)
    def claim_group(self, number: int, stage: Stage, owner: str) -> None:
        known = sorted(self.held.groups)
        index = known[number % len(known)] if known else number
        self.keep(
            self.both(lambda store: store.claim_group(self.job, index, stage, owner, LEASE_SEC))
        )

    @rule(stage=st.sampled_from([Stage.PROPOSE, Stage.VERIFY, Stage.VERIFY]), owner=OWNERS)
    def claim_next(self, stage: Stage, owner: str) -> None:
        model = "small" if stage is Stage.PROPOSE else "big"
        self.keep(self.both(lambda store: store.claim_next(stage, model, owner, LEASE_SEC)))

    @rule()
    def sweep(self) -> None:
        self.both(lambda store: store.close_over())
        assert self.store.stop_overdue() == set()  # no job here has a limit

    @precondition(lambda self: self.leases)
    @rule(number=LEASES, usd=st.sampled_from([0.0, 0.25, 0.75]))
    def report_costs(self, number: int, usd: float) -> None:
        held = dict.fromkeys([*self.leases[-3:], self.lease(number)], usd)
        assert self.store.cancelled_jobs(held) == self.model.cancelled(held)

    @precondition(lambda self: self.holds(Stage.INGEST))
    @rule(number=LEASES, most_open=st.integers(1, 4))
    def pause_ingest(self, number: int, most_open: int) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.pause_ingest(lease, most_open))

    @rule(patience_sec=st.sampled_from([0.0, 0.5, LEASE_SEC]))
    def skip_proposals(self, patience_sec: float) -> None:
        self.clock.advance(1.0)
        self.both(lambda store: store.skip_proposals(patience_sec))

    @precondition(lambda self: self.holds(Stage.VERIFY))
    @rule(number=LEASES, keep=st.integers(0, 3))
    def split_group(self, number: int, keep: int) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.split_group(lease, keep))

    @rule(owner=st.sampled_from(["w1", "w2", "idle"]), model=st.sampled_from(["big", "big", "?"]))
    def ask_for_split(self, owner: str, model: str) -> None:
        asked = self.both(lambda store: store.ask_for_split(model, owner))
        assert model == "big" or asked is None

    @precondition(lambda self: self.leases and self.lease(0).group_index is None)
    @rule(number=LEASES, value=st.integers(0, 2))
    def note_report(self, number: int, value: int) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.note_report(lease, {"noted": value}))

    @rule(owner=OWNERS)
    def claim_what_is_due(self, owner: str) -> None:
        for due in self.both(lambda store: store.due())[:1]:
            self.keep(self.both(partial(self.answer, due, owner)))

    @staticmethod
    def answer(due: tuple[str, Stage, int | None], owner: str, store: Any) -> Any:
        job_id, stage, index = due
        if index is None:
            return store.claim_job(job_id, stage, owner, LEASE_SEC)
        return store.claim_group(job_id, index, stage, owner, LEASE_SEC)

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

    @rule(dies_of=st.sampled_from([None, None, 0, 3]))
    def come_to_the_end(self, dies_of: int | None) -> None:
        """A worker that gets all of it done, and dies of one row."""
        for life in range(MOST_CLAIMS):
            if self.held.state.is_final:
                return
            known = len(self.leases)
            self.claim_what_is_due(f"life {life}")
            lease = self.lease(0) if self.leases else None
            if len(self.leases) == known or lease is None:
                self.clock.advance(LEASE_SEC)  # it is held, or was only sent on
            elif lease.stage is Stage.VERIFY and dies_of in self.rows(lease.group_index or 0):
                self.clock.advance(LEASE_SEC)
            else:
                self.finish_stage(lease)
        raise AssertionError("it comes to no end")

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
        lease, timing = self.lease(number), StageTiming(compute_sec)
        proposes = lease.stage is Stage.PROPOSE
        to, artefact = (Stage.VERIFY, DRAFTS) if proposes else (Stage.RECORD, RESULTS)
        self.by_lease(lease, lambda store: store.advance(lease, to, artefact, timing))

    @precondition(lambda self: self.holds(Stage.RECORD))
    @rule(number=LEASES)
    def commit_group(self, number: int) -> None:
        lease = self.lease(number)
        records = [completion(row) for row in self.rows_left(lease)]
        timing = StageTiming(1.0)
        self.by_lease(lease, lambda store: store.commit_group(lease, records, timing, {"steps": 1}))

    def rows_left(self, lease: Lease) -> list[int]:
        """The rows of a leased group that a stopped job has not kept yet."""
        if lease.job_id != self.job or lease.group_index not in self.held.groups:
            return []
        group = self.held.groups[lease.group_index]
        return [row for row in self.rows(lease.group_index) if row not in group.kept]

    @precondition(lambda self: self.leases)
    @rule(number=LEASES, done=st.sets(st.integers(0, 3)), then_retry=st.booleans())
    def keep_part(self, number: int, done: set[int], then_retry: bool) -> None:
        """A worker stops a group with some rows done."""
        lease = self.lease(number)
        if lease.stage is Stage.VERIFY:
            records = [completion(r) for i, r in enumerate(self.rows_left(lease)) if i in done]
            timing = StageTiming(1.0, 0.25)
            self.by_lease(lease, lambda store: store.keep_part(lease, records, timing, {}))
        if then_retry and self.held.stage is Stage.PUBLISH:
            self.work("w1", ["finish"])
            self.retry_job()

    @precondition(lambda self: self.leases and self.held.cancelled)
    @rule(number=LEASES)
    def cancel_group(self, number: int) -> None:
        lease = self.lease(number)
        self.by_lease(lease, lambda store: store.cancel_group(lease))

    # --- what must hold ---------------------------------------------------------------------
    @invariant()
    def both_show_the_same(self) -> None:
        self.both(lambda store: store.get_job(self.job))
        self.both(lambda store: store.progress(self.job))
        self.both(lambda store: store.due())
        self.both(lambda store: store.kept_rows(self.job))
        failed = [(index, word) for index, word, _, _ in self.store.failed_groups(self.job)]
        assert failed == self.model.failed_groups(self.job)

    @invariant()
    def every_row_is_in_exactly_one_group(self) -> None:
        rows: list[int] = []
        for group in self.store.groups(self.job):
            index, prompts = group.index, group.prompts
            file = int(prompts.artefact.uri.split("-")[-1].removesuffix(".arrow"))
            first = ROWS * file + prompts.row_start
            mine = range(first, first + prompts.rows)
            assert mine == self.rows(index)
            assert mine
            rows += mine
        assert sorted(rows) == list(range(self.held.planned * ROWS))
        assert self.store.get_job(self.job).prompt_tokens == 5 * len(rows)

    @invariant()
    def groups_are_as_their_log_says(self) -> None:
        facts = LogFacts(self.job)
        assert list(facts.follow(self.store.log(self.job), self.store.log_head(self.job))) == []
        ended = Checker(facts, lambda _: None).groups(self.store.groups(self.job))
        assert [finding.what for finding in ended] == []

    @invariant()
    def a_fencing_token_of_a_unit_has_one_lease(self) -> None:
        names = [(x.job_id, x.group_index, x.token) for x in self.leases]
        assert len(set(names)) == len(names)
        current = [x for x in self.leases if self.model.is_current(x)]
        assert len({(x.job_id, x.group_index) for x in current}) == len(current)

    @invariant()
    def every_completion_is_made_once(self) -> None:
        made = [(c.row_index, c.sample_index) for c in self.store.completions(self.job)]
        done = [i for i, group in self.held.groups.items() if group.stage is Stage.DONE]
        expected = {row for index in done for row in self.rows(index)}
        expected |= self.store.kept_rows(self.job)
        assert made == [(row, 0) for row in sorted(expected)]
        assert self.store.progress(self.job).completions == len(made)

    @invariant()
    def a_job_is_never_stuck(self) -> None:
        """Whatever happened: it has ended, is due, is held, or one of its groups is."""
        now = self.clock.now
        self.clock.advance(2 * LEASE_SEC)
        due = self.store.due()
        self.clock.now = now
        assert self.held.state.is_final == (not due)


def _settings(max_examples: int, steps: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.pipeline  # many lives of a store
class TestStoreLives(StoreLives.TestCase):  # type: ignore[misc]  # made at run time
    settings = _settings(max_examples=25, steps=20)


@pytest.mark.long
class TestStoreLivesAtLength(StoreLives.TestCase):  # type: ignore[misc]  # made at run time
    settings = _settings(max_examples=150, steps=40)
