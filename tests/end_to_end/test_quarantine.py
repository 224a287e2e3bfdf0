"""One prompt that a verifier falls over: its neighbours are done, and it alone is quarantined."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import LEASE_SEC

from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.engines.contract import Request, Ticket
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.errors import EngineError, ObjectError
from specbatch.schemas.records import FIRST_SPLIT_INDEX, JobState, Stage
from specbatch.schemas.spec import EngineSpec
from support.stand_ins import MOST_ROUNDS, Outcome, Site

ROWS = 64
POISONED = 37
PROMPTS = [f"prompt number {i}" for i in range(ROWS)]


class Killed(BaseException):
    """The process is gone: nothing of it runs any more, and nobody gives anything back."""


class Poisoned:
    """A host whose service falls over some prompts, in the way of `error`."""

    def __init__(self, host: StandInHost, error: BaseException, prompts: Sequence[str]) -> None:
        self._host, self._error = host, error
        self._prompts = {tuple(prompt.encode()) for prompt in prompts}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def service(self, spec: EngineSpec) -> Poisoned:
        self._service = self._host.service(spec)
        return self

    def submit(self, job_id: str, requests: Sequence[Request], priors: Any = ()) -> Ticket:
        if self._prompts & {request.prompt_ids for request in requests}:
            raise self._error
        return self._service.submit(job_id, requests, priors)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same job when nothing happens to it."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    job_id = site.submit(PROMPTS)
    site.work(site.worker("w", site.host()))
    found = site.outcome(job_id)
    assert site.state(job_id) is JobState.DONE
    site.close()
    return found


def work_with(site: Site, host: Any, job_id: str) -> None:
    """Workers one after another, each until it dies, until the job has ended."""
    lives = itertools.count()
    context = site.worker(f"life {next(lives)}", host)
    for _ in range(MOST_ROUNDS):
        if site.state(job_id).is_final:
            return
        for message in site.store.due():
            try:
                run_stage(context, message.stage, message.job_id, message.group_index)
            except RuntimeError:
                continue  # Celery logs it, and the worker goes on
            except Killed:
                site.clock.advance(LEASE_SEC)
                context = site.worker(f"life {next(lives)}", host)
                break
    raise AssertionError("the job comes to no end")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("engine step failed: illegal token"), "engine step failed: illegal token"),
        (RuntimeError("index out of range"), "RuntimeError: index out of range"),
        (Killed(), "the worker vanished 3 times while it held this work"),
    ],
    ids=["refused", "a-bug", "killed"],
)
def test_of_64_rows_63_are_done_and_the_poisoned_one_is_quarantined(
    site: Site, undisturbed: Outcome, error: BaseException, reason: str
) -> None:
    job_id = site.submit(PROMPTS)
    work_with(site, Poisoned(site.host(), error, [PROMPTS[POISONED]]), job_id)
    assert site.state(job_id) is JobState.PARTIAL
    healthy = {key: value for key, value in undisturbed.items() if key[0] != POISONED}
    assert site.outcome(job_id) == healthy
    [(_, word, prompts, said)] = site.store.failed_groups(job_id)
    assert (word, prompts.row_start, prompts.rows) == ("failed", POISONED, 1)
    assert said == reason
    progress = site.store.progress(job_id)
    assert (progress.rows_done, progress.rows_failed, progress.rows_total) == (ROWS, 1, ROWS)
    assert progress.groups_done == progress.groups_total == 7

    table = site.output()
    assert table["row_index"].to_pylist() == list(range(ROWS))
    assert table["id"].to_pylist() == [f"r{i}" for i in range(ROWS)]
    errors = table["error"].to_pylist()
    assert errors[POISONED] == said
    assert errors[:POISONED] + errors[POISONED + 1 :] == [None] * (ROWS - 1)

    assert site.client.retry(job_id, quarantined=True) == 1
    site.work(site.worker("cured", site.host()))
    assert site.state(job_id) is JobState.DONE
    assert site.outcome(job_id) == undisturbed
    assert site.output()["error"].to_pylist() == [None] * ROWS
    assert site.client.retry(job_id, quarantined=True) == 0


def test_poisoned_rows_of_several_groups_stand_at_their_places_in_the_output(site: Site) -> None:
    poisoned = [3, 8, 9, 21, 30]
    job_id = site.submit(PROMPTS[:40], group_size=10, n=2)
    host = Poisoned(site.host(), EngineError("broken"), [PROMPTS[i] for i in poisoned])
    work_with(site, host, job_id)
    assert site.state(job_id) is JobState.PARTIAL
    table = site.output()
    assert table["row_index"].to_pylist() == [row for row in range(40) for _ in range(2)]
    failed = [row for row, error in zip(*_columns(table), strict=True) if error is not None]
    assert failed == [row for row in poisoned for _ in range(2)]
    assert site.client.retry(job_id, quarantined=True) == len(poisoned)


def _columns(table: Any) -> tuple[list[int], list[str | None]]:
    return table["row_index"].to_pylist(), table["error"].to_pylist()


def test_storage_that_is_damaged_cuts_nothing(site: Site) -> None:
    job_id = site.submit(PROMPTS)
    host = Poisoned(site.host(), ObjectError("bucket: access denied"), [PROMPTS[POISONED]])
    work_with(site, host, job_id)
    assert site.state(job_id) is JobState.FAILED
    [(index, _, prompts, _)] = site.store.failed_groups(job_id)
    assert (index, prompts.rows) == (0, ROWS)


def test_a_row_that_cannot_be_recorded_is_quarantined_too(
    site: Site, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = site.submit(PROMPTS)
    context = site.worker("w", site.host())
    commit, broken = site.store.commit_group, True

    def refuse(lease: Any, completions: Any, *others: Any) -> None:
        if broken and any(c.row_index == POISONED for c in completions):
            raise RuntimeError("the text cannot be stored")
        commit(lease, completions, *others)

    monkeypatch.setattr(site.store, "commit_group", refuse)
    for _ in range(MOST_ROUNDS):
        if site.state(job_id).is_final:
            break
        for message in site.store.due():
            try:
                run_stage(context, message.stage, message.job_id, message.group_index)
            except RuntimeError:
                continue
    assert site.state(job_id) is JobState.PARTIAL
    assert len(site.outcome(job_id)) == ROWS - 1
    broken = False
    assert site.client.retry(job_id, quarantined=True) == 1
    site.work(context)
    assert site.outcome(job_id) == undisturbed


def test_after_a_failure_both_halves_are_enqueued(site: Site) -> None:
    job_id = site.submit(PROMPTS)
    host = Poisoned(site.host(), EngineError("broken"), [PROMPTS[POISONED]])
    context = site.worker("w", host)
    run_stage(context, Stage.INGEST, job_id, None)
    for _ in range(3):
        site.enqueued.clear()
        run_stage(context, Stage.VERIFY, job_id, 0)
    assert {message.group_index for message in site.enqueued} == {0, FIRST_SPLIT_INDEX}
    site.enqueued.clear()
    run_stage(context, Stage.VERIFY, job_id, 0)  # rows 0 to 31 go well: now the other suspect
    assert FIRST_SPLIT_INDEX in [message.group_index for message in site.enqueued]
