"""Which store a command looks into when nobody has named one, and that it says which."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.test_results import in_store
from ledger.builders import JOB, new_job

from specbatch.jobs.cli.completing import jobs_beginning
from specbatch.jobs.cli.stores import DEMO, other_store
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.settings import Settings
from support.databases import migrated


@pytest.fixture
def demo_folder(folder: Path) -> Path:
    """A folder as the demo makes it, beside no other store."""
    in_store(folder)
    made = folder / "demo-run"
    made.mkdir()
    (made / DEMO).touch()
    (folder / "specbatch-data" / "specbatch.db").rename(made / "specbatch.db")
    shutil.rmtree(folder / "specbatch-data")
    return made


def told(text: str) -> str:
    return text.replace("\n", "")


def test_jobs_says_which_store_it_reads_unless_it_was_named(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder / "specbatch-data" / "specbatch.db"
    assert told(cli("jobs").err) == f"store: {store}"
    assert cli("jobs", "--json").json == []
    monkeypatch.setenv("SPECBATCH_WORKSPACE", str(folder / "specbatch-data"))
    assert cli("jobs").err == ""
    monkeypatch.delenv("SPECBATCH_WORKSPACE")
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", f"sqlite:///{store}")
    assert cli("jobs").err == ""
    monkeypatch.delenv("SPECBATCH_DATABASE_URL")
    (folder / "settings.toml").write_text(f'workspace = "{folder / "specbatch-data"}"')
    monkeypatch.setenv("SPECBATCH_SETTINGS", str(folder / "settings.toml"))
    assert cli("jobs").err == ""


@pytest.mark.parametrize("name", ["a?b", "a?b=c", "a%41", "100% new", "a#b", "a b", "ä", "a;b&c@d"])
def test_a_store_lies_in_its_workspace_whatever_that_is_called(
    name: str, cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "specbatch-data")
    before = set(folder.iterdir())
    settings = Settings(workspace=str(folder / name))
    with closing(make_store(settings)) as store:
        assert store.create_job(new_job())
    assert (folder / name / "specbatch.db").is_file()
    assert set(folder.iterdir()) == {*before, folder / name}
    monkeypatch.setenv("SPECBATCH_WORKSPACE", str(folder / name))
    assert [row["job"] for row in cli("jobs", "--json").json] == [JOB]
    assert jobs_beginning(JOB) == [(JOB, "nightly, queued")]


def test_the_demos_jobs_are_found_from_beside_it_and_from_within(
    cli: Any, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (demo_folder.parent, demo_folder):
        monkeypatch.chdir(where)
        for command in (("jobs",), ("show", JOB), ("results", JOB), ("cost",), ("logs", JOB)):
            done = cli(*command)
            assert done.code == 0
            assert f"store: {demo_folder / 'specbatch.db'}" in told(done.err)
        assert [row["job"] for row in cli("jobs", "--json").json] == [JOB]
        assert not Path("specbatch-data").exists(), "looking makes no store"


def test_the_folders_own_store_comes_first_and_only_jobs_names_it(
    cli: Any, demo_folder: Path
) -> None:
    store = migrated(demo_folder.parent / "specbatch-data" / "specbatch.db")
    assert store
    assert cli("jobs", "--json").json == []
    assert "specbatch-data" in told(cli("jobs").err)
    assert cli("show", JOB).code == 2
    assert "store:" not in cli("show", JOB).err


def test_what_deletes_takes_no_store_that_was_only_found(cli: Any, demo_folder: Path) -> None:
    refused = cli("purge", "--job", JOB)
    assert refused.code == 2
    assert (demo_folder / "specbatch.db").is_file()


def test_the_newest_demo_is_taken_and_a_folder_without_its_mark_is_not(tmp_path: Path) -> None:
    assert other_store(tmp_path) is None
    for number, name in enumerate(("second", "first", "no demo")):
        (tmp_path / name).mkdir()
        store = tmp_path / name / "specbatch.db"
        store.touch()
        os.utime(store, (1e9 - number,) * 2)
        if name != "no demo":
            (tmp_path / name / DEMO).touch()
    second = tmp_path / "second"
    assert other_store(tmp_path) == (second / "specbatch.db", second / "work")
    (tmp_path / "specbatch.db").touch()
    assert other_store(tmp_path) == (tmp_path / "specbatch.db", tmp_path)
