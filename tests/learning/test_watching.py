"""What a worker notices of the models that `models:NAME` stands for, and what it makes of it."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning.registry import register
from specbatch.pipeline.learning.watching import ModelWatch, spread
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.registry import Deployment, DeployScope
from specbatch.schemas.settings import Settings
from support.databases import migrated
from support.models import TinyPair, tiny_llama

WAIT_SEC = 60.0
DOCS = ["models:docs"]


class Place:
    """A verifier, three versions of a draft model, the first deployed; the third is another kind
    of model, whose tokens are not the verifier's."""

    def __init__(self, home: Path, pair: TinyPair, store: Store) -> None:
        self.store = store
        self.verifier = str(pair.verifier)
        sizes = {"hidden": 32, "layers": 1, "heads": 4}
        tokens = inspect_model(self.verifier).vocab_size
        self.folders = [
            shutil.copytree(pair.draft, home / "first"),
            tiny_llama(home / "second", vocab_size=tokens, **sizes),
            tiny_llama(home / "other", vocab_size=111, **sizes),
        ]
        self.versions = [
            register(store, "docs", inspect_model(str(path)))[0] for path in self.folders
        ]
        self.promote(1)

    def promote(self, version: int, **scope: str) -> Deployment:
        fingerprint = self.versions[version - 1].fingerprint
        return self.store.promote(fingerprint, DeployScope(**scope), "better")

    def try_out(self, version: int) -> int:
        """Begin a rollout; its number."""
        fingerprint = self.versions[version - 1].fingerprint
        return self.store.begin_rollout(fingerprint, DeployScope(), (0.0, 1.0), "a trial").number

    def watch(self, refs: Sequence[str] = DOCS) -> ModelWatch:
        return ModelWatch(self.store, refs, self.verifier)

    def refs(self, *versions: int) -> list[str]:
        return [str(self.folders[version - 1].resolve()) for version in versions]


@pytest.fixture
def place(tmp_path: Path, tiny_pair: TinyPair) -> Iterator[Place]:
    migrated(tmp_path / "workspace" / "specbatch.db")
    with closing(make_store(Settings(workspace=str(tmp_path / "workspace")))) as store:
        yield Place(tmp_path, tiny_pair, store)


def test_a_model_that_a_worker_lacks_is_noticed_and_one_that_it_needs_no_more_is_no_change(
    place: Place,
) -> None:
    changes: list[tuple[Callable[[], object], list[str], bool]] = [
        (lambda: place.try_out(2), place.refs(1, 2), True),
        (lambda: place.store.stop_rollout(DeployScope(), "enough"), place.refs(1), False),
        (lambda: place.promote(2, tag="news"), place.refs(1, 2), True),
        (lambda: place.promote(2), place.refs(2), False),
        (lambda: place.store.roll_back(DeployScope(), "worse"), place.refs(1, 2), True),
    ]
    for change, found, lacks in changes:
        watch = place.watch()
        assert watch.changed(place.store) is None
        change()
        assert watch.changed(place.store) == (found if lacks else None)
        assert place.watch().loaded == found


def test_what_makes_no_difference_to_the_set_is_no_change(place: Place) -> None:
    watch, pinned = place.watch(), place.watch(["models:docs:1", place.verifier])
    place.promote(1)
    assert watch.changed(place.store) is None
    place.promote(1, tag="news")
    assert watch.changed(place.store) is None
    place.promote(2)
    assert pinned.changed(place.store) is None
    place.promote(1)
    assert watch.changed(place.store) is None


def vanished(place: Place) -> None:
    shutil.rmtree(place.folders[1])
    place.promote(2)


def altered(place: Place) -> None:
    shutil.copytree(place.folders[0], place.folders[1], dirs_exist_ok=True)
    place.promote(2)


def ended(place: Place) -> None:
    place.store.roll_back(DeployScope(), "it was the only one")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (vanished, "does not exist"),
        (altered, "have changed since they were registered"),
        (lambda place: place.promote(3), "must share one vocabulary"),
        (ended, "no version of docs is deployed"),
    ],
    ids=["vanished", "altered", "of other tokens", "none"],
)
def test_what_cannot_be_loaded_is_said_once_and_nothing_is_done(
    place: Place, caplog: pytest.LogCaptureFixture, change: Callable[[Place], object], said: str
) -> None:
    watch = place.watch()
    change(place)
    for _ in range(3):
        assert watch.changed(place.store) is None
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said in line.message
    assert f"this worker continues with {place.refs(1)[0]}" in line.message
    place.promote(1)
    assert watch.changed(place.store) is None


def test_a_candidate_that_cannot_be_loaded_keeps_nobody_from_what_is_promoted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    watch = place.watch()
    place.try_out(3)
    for _ in range(2):
        assert watch.changed(place.store) is None
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.message.startswith("docs:3 is left out")
    assert place.watch().loaded == place.refs(1)  # nor a worker from starting
    place.promote(2, tag="news")
    assert watch.changed(place.store) == place.refs(1, 2)


def test_a_model_that_was_mended_is_taken_up_when_it_is_promoted_again(place: Place) -> None:
    watch = place.watch()
    aside = place.folders[1].rename(place.folders[1].with_name("aside"))
    place.promote(2)
    assert watch.changed(place.store) is None
    aside.rename(place.folders[1])
    assert watch.changed(place.store) is None
    place.promote(2)
    assert watch.changed(place.store) == place.refs(2)


def test_no_file_is_read_while_the_store_says_the_same(place: Place) -> None:
    watch = place.watch()
    shutil.rmtree(place.folders[0])
    assert watch.changed(place.store) is None


def test_a_watch_tells_of_a_change_once_and_in_one_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told = threading.Semaphore(0)
    watch = place.watch()
    watch.start(place.store, 0.01, told.release)
    place.promote(2)
    assert told.acquire(timeout=WAIT_SEC)
    for thread in threading.enumerate():
        if thread.name == "model-watch":  # it ends by itself
            thread.join(WAIT_SEC)
    assert not told.acquire(blocking=False)
    (line,) = [one for one in caplog.records if "has changed" in one.message]
    assert line.levelno == logging.INFO
    assert place.refs(2)[0] in line.message


def test_a_store_that_does_not_answer_is_asked_again(
    place: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One of its tables is away for a while."""
    told, watch = threading.Event(), place.watch()
    database = tmp_path / "workspace" / "specbatch.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("ALTER TABLE rollouts RENAME TO aside")
        watch.start(place.store, 0.01, told.set)
        while "cannot read which draft models" not in caplog.text:
            assert not told.wait(0.01)
        connection.execute("ALTER TABLE aside RENAME TO rollouts")
    place.promote(2)
    assert told.wait(WAIT_SEC)


def test_workers_have_their_turns_at_different_moments() -> None:
    turns = [spread(f"worker-{i}:1") for i in range(100)]
    assert turns == [spread(f"worker-{i}:1") for i in range(100)]
    assert all(0.0 <= turn < 1.0 for turn in turns)
    assert all(sum(int(4 * turn) == part for turn in turns) > 15 for part in range(4))
    assert len(set(turns)) == 100
