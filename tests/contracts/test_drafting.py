"""What is kept for drafting may be away, late, unreadable or garbage: jobs continue without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import JOB, LEASE_SEC, Clock, new_job

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import FencedError, StoreError
from specbatch.schemas.records import Artefact, JobRow, Lease, Stage
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.speculation import AcceptanceCount, PastOutput
from support.databases import new_database

SPEC = load_spec({"input": {"uri": "/in"}, "output": {"uri": "/out"}, "verifier": "/big"})
WAIT_SEC = 60.0


class Shaky(SqlStore):
    """A store that is away when a test says so, and has the past that a test gives it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(new_database(), max_attempts=9, clock=clock)
        self.past: list[PastOutput] = []
        self.away = False
        self.asked = 0
        self.garbage: Any = None  # where knowledge should be

    def past_outputs(self, *_: object, **__: object) -> Iterator[PastOutput]:
        self.asked += 1
        self._check()
        yield from self.past[:1]
        self._check()
        yield from self.past[1:]

    def knowledge(self, key: str) -> Any:
        self._check()
        return super().knowledge(key) if self.garbage is None else self.garbage

    def keep_knowledge(self, key: str, state: Any) -> None:
        self._check()
        super().keep_knowledge(key, state)
        self.garbage = None

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        self._check()
        return super().acceptance(tenant, job_name)

    def learn_acceptance(self, *_: object, **__: object) -> None:
        self._check()

    def _check(self) -> None:
        if self.away:
            raise StoreError("the database is away")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Shaky:
    return Shaky(clock)


@pytest.fixture
def begin(store: Shaky, tmp_path: Path) -> Callable[[str], tuple[Lease, JobRow]]:
    """Claim a job's ingest; the job is made if there is none."""

    def claim(job_id: str = JOB) -> tuple[Lease, JobRow]:
        workspace = str(tmp_path / job_id)
        store.create_job(new_job(job_id, spec=SPEC.model_dump(), workspace_uri=workspace))
        work = store.claim_job(job_id, Stage.INGEST, "me", LEASE_SEC)
        assert work is not None
        return work.lease, store.get_job(job_id)

    return claim


def past(*tokens: int) -> PastOutput:
    return PastOutput("earlier", "row-0", 0, tokens)


def test_a_store_that_is_away_costs_the_history_and_not_the_job(
    store: Shaky, begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    drafting = Drafting(store, Objects())
    lease, job = begin()
    store.past, store.away = [past(1, 2, 3)], True
    with caplog.at_level(logging.WARNING):
        drafting.prepare(lease, job, SPEC, "words")
    assert "the database is away" in caplog.text
    job = store.get_job(JOB)
    assert job.report == {"vocabulary": "words"}, "later jobs may draft from it all the same"
    assert drafting.history(job) is None
    assert drafting.priors(job) == []
    drafting.learn(job, Lessons((AcceptanceCount("ngram", None, 1, 2),)))
    assert "could not save draft statistics" in caplog.text


def test_a_second_attempt_takes_what_the_first_wrote(store: Shaky, begin: Any) -> None:
    drafting = Drafting(store, Objects())
    store.past = [past(1, 2, 3)]
    lease, job = begin()
    drafting.prepare(lease, job, SPEC, "words")
    store.release(lease, "interrupted")
    written = store.get_job(JOB).report
    lease, job = begin()
    store.past = [past(4, 5, 6)]
    drafting.prepare(lease, job, SPEC, "words")
    assert store.asked == 1
    assert store.get_job(JOB).report == written
    history = drafting.history(store.get_job(JOB))
    assert history is not None
    assert history.past("row-0", 0) == (1, 2, 3)


def test_an_attempt_that_lost_its_lease_does_not_write_over_the_next_one_s_history(
    store: Shaky, begin: Any, clock: Clock
) -> None:
    drafting = Drafting(store, Objects())
    late, seen_by_it = begin()
    clock.advance(LEASE_SEC + 1)
    lease, job = begin()
    store.past = [past(1, 2, 3)]
    drafting.prepare(lease, job, SPEC, "words")
    store.past = [past(4, 5, 6, 7)]
    with pytest.raises(FencedError):
        drafting.prepare(late, seen_by_it, SPEC, "words")
    history = drafting.history(store.get_job(JOB))
    assert history is not None
    assert history.past("row-0", 0) == (1, 2, 3)


@pytest.mark.parametrize("tokens", [0, 3])
def test_jobs_that_want_no_history_do_not_ask_for_one(
    store: Shaky, begin: Any, tokens: int
) -> None:
    drafting = Drafting(store, Objects())
    store.past = [past(1, 2, 3)]
    lease, job = begin()
    values = SPEC.model_dump() | {"speculation": {"history_tokens": tokens}}
    drafting.prepare(lease, job, JobSpec.model_validate(values), "words")
    assert store.asked == (tokens > 0)
    assert ("history" in store.get_job(JOB).report) == (tokens > 0)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [Path.unlink, _cut], ids=["gone", "cut"])
def test_a_history_that_cannot_be_read_is_none(
    store: Shaky, begin: Any, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    drafting = Drafting(store, Objects())
    store.past = [past(1, 2, 3)]
    lease, job = begin()
    drafting.prepare(lease, job, SPEC, "words")
    job = store.get_job(JOB)
    spoil(Path(job.report["history"]["uri"].removeprefix("file://")))
    with caplog.at_level(logging.WARNING):
        assert drafting.history(job) is None
        assert drafting.history(job) is None
    assert caplog.text.count("continues without its history") == 1


@pytest.mark.parametrize("value", ["a word", {"uri": "/x"}, {"other": 1}, [1]])
def test_a_report_that_says_something_else_is_no_history(
    store: Shaky, begin: Any, value: object
) -> None:
    lease, _ = begin()
    store.note_report(lease, {"history": value})
    assert Drafting(store, Objects()).history(store.get_job(JOB)) is None


class Slow(Objects):
    """Reads one job's files when it is let, the others' at once."""

    def __init__(self, waits_for: str) -> None:
        super().__init__()
        self._waits_for = waits_for
        self.begun, self.let = threading.Event(), threading.Event()
        self.reads = 0

    def get_bytes(self, uri: str, expect: Artefact | None = None) -> bytes:
        self.reads += 1
        if self._waits_for in uri:
            self.begun.set()
            assert self.let.wait(WAIT_SEC)
        return super().get_bytes(uri, expect)


def test_jobs_do_not_wait_for_each_other_s_history_and_read_theirs_once(
    store: Shaky, begin: Any
) -> None:
    objects = Slow("job-slow")
    drafting = Drafting(store, objects)
    store.past = [past(1, 2, 3)]
    jobs = {}
    for job_id in ("job-slow", "job-fast"):
        lease, job = begin(job_id)
        drafting.prepare(lease, job, SPEC, "words")
        jobs[job_id] = store.get_job(job_id)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(drafting.history(jobs["job-slow"])))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert objects.begun.wait(WAIT_SEC)
    assert drafting.history(jobs["job-fast"]) is not None
    assert drafting.priors(jobs["job-slow"]) == []
    assert found == []
    objects.let.set()
    for thread in threads:
        thread.join(WAIT_SEC)
    assert len(found) == 3
    assert found[0] is not None
    assert found[0] is found[1] is found[2]
    assert objects.reads == 2


# --- what is known of machines ------------------------------------------------------------------

GARBAGE: list[Any] = [
    {},
    [],
    "words",
    3,
    {"pass_time": {"drafted": 1, "noise": 0.1, "cells": []}, "draft_times": [], "acceptance": {}},
    {"pass_time": [], "draft_times": {}, "acceptance": {}},
]


@pytest.mark.parametrize("state", GARBAGE)
def test_garbage_is_no_knowledge(store: Shaky, state: Any) -> None:
    store.garbage = state
    kept = KnowledgeStore(store)
    assert kept.load("here") is None
    kept.keep("here", Knowledge())
    kept.close()
    assert KnowledgeStore(store).load("here") == Knowledge()


def test_a_store_that_is_away_takes_no_engine_with_it(
    store: Shaky, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KnowledgeStore(store)
    store.away = True
    with caplog.at_level(logging.WARNING):
        assert kept.load("here") is None
        kept.keep("here", Knowledge())
        kept.close()
        kept.keep("here", Knowledge())
    assert caplog.text.count("could not save the machine knowledge") == 2
    store.away = False
    assert store.knowledge("here") is None
