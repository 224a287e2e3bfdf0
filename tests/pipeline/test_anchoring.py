"""Logs of published jobs that have no anchor get one later."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.anchors import MOST_AGE_SEC, Anchoring, Anchors
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EntryKind, Head
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings

NOW = 1_000_000.0
JOB = "a" * 20


@dataclass
class Log:
    """A job's row and log, as a store answers."""

    kinds: list[EntryKind]
    finished_at: float | None = NOW
    state: JobState = JobState.DONE


@dataclass
class Logs:
    jobs: dict[str, Log] = field(default_factory=dict)

    def list_jobs(self, limit: int) -> list[Any]:
        rows = [
            SimpleNamespace(job_id=job_id, state=one.state, finished_at=one.finished_at)
            for job_id, one in self.jobs.items()
        ]
        return rows[:limit]

    def log(self, job_id: str, after: int = 0) -> Iterator[Any]:
        for number, kind in enumerate(self.jobs[job_id].kinds, start=1):
            if number > after:
                yield SimpleNamespace(number=number, kind=str(kind))

    def log_head(self, job_id: str) -> Head:
        number = len(self.jobs[job_id].kinds)
        return Head(number, bytes([number]) * 32)


@pytest.fixture
def logs() -> Logs:
    return Logs({JOB: Log([EntryKind.SUBMITTED, EntryKind.PUBLISHED])})


@pytest.fixture
def anchors(tmp_path: Path) -> Anchors:
    key = base64.urlsafe_b64encode(bytes(32)).decode()
    settings = Settings(anchor_uri=str(tmp_path / "anchors"), anchor_key=key)
    made = Anchors.of_settings(settings, Objects())
    assert made is not None
    return made


@pytest.fixture
def anchoring(logs: Logs, anchors: Anchors) -> Anchoring:
    return Anchoring(cast(Store, logs), anchors, clock=lambda: NOW)


def test_a_publication_without_an_anchor_gets_one_once(
    anchoring: Anchoring, anchors: Anchors
) -> None:
    assert anchoring.catch_up() == [JOB]
    assert anchors.last_number(JOB) == 2
    assert anchoring.catch_up() == []


def test_what_was_anchored_when_it_was_published_is_left_alone(
    logs: Logs, anchoring: Anchoring, anchors: Anchors
) -> None:
    anchoring.published(JOB)
    logs.jobs[JOB].kinds.append(EntryKind.EXPORTED)
    assert anchoring.catch_up() == []
    assert anchors.last_number(JOB) == 2


def test_a_second_publication_is_missed_by_itself(
    logs: Logs, anchoring: Anchoring, anchors: Anchors
) -> None:
    anchoring.published(JOB)
    assert anchoring.catch_up() == []
    logs.jobs[JOB].kinds += [EntryKind.RETRIED, EntryKind.PUBLISHED]
    logs.jobs[JOB].finished_at = NOW + 1
    assert anchoring.catch_up() == [JOB]
    assert anchors.last_number(JOB) == 4


def test_jobs_that_run_failed_or_are_old_are_not_anchored(logs: Logs, anchoring: Anchoring) -> None:
    published = [EntryKind.SUBMITTED, EntryKind.PUBLISHED]
    logs.jobs = {
        "b" * 20: Log([*published, EntryKind.RETRIED], None, JobState.RUNNING),
        "c" * 20: Log([EntryKind.SUBMITTED, EntryKind.FAILED], NOW, JobState.FAILED),
        "d" * 20: Log(published, NOW - MOST_AGE_SEC - 1),
    }
    assert anchoring.catch_up() == []


def test_a_place_that_is_away_is_tried_again(
    anchoring: Anchoring, anchors: Anchors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise ObjectError("away", passing=True)

    with monkeypatch.context() as patch:
        patch.setattr(anchors, "put", away)
        with pytest.raises(ObjectError, match="away"):
            anchoring.catch_up()
    assert anchoring.catch_up() == [JOB]
