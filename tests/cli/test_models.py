"""`specbatch models`: add, promote, roll back and retire, and what a worker loads."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.worker import registered
from specbatch.schemas.errors import UsageError
from support.models import TinyPair


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_ACTOR", "alice@laptop")


@pytest.fixture
def added(cli: Any, tiny_pair: TinyPair) -> None:
    for folder in (tiny_pair.draft, tiny_pair.verifier):
        assert cli("models", "add", "docs", str(folder)).code == 0


def test_a_model_is_added_promoted_replaced_and_brought_back(cli: Any, tiny_pair: TinyPair) -> None:
    assert cli("models").out.startswith("no models: ")
    done = cli("models", "add", "docs", str(tiny_pair.draft))
    assert done.out.startswith("docs:1 is registered: fingerprint ")
    again = cli("models", "add", "other", str(tiny_pair.draft))
    assert again.out.startswith("docs:1 has these files already: ")
    cli("models", "add", "docs", str(tiny_pair.verifier))
    for model in ("docs:1", "docs"):
        done = cli("models", "promote", model, "--tag", "news", "--reason", "a trial")
        assert done.code == 0
    assert done.out.startswith("docs:2 drafts for tag news")
    first, second = cli("models", "list", "--json").json
    assert (first["deployments"], second["deployments"][0]["scope"]["tag"]) == ([], "news")
    done = cli("models", "rollback", "--tag", "news", "--reason", "it was worse")
    assert done.out == "docs:1 drafts for tag news again\n"
    assert "tag news" in cli("models", "list").out
    shown = cli("models", "show", "docs:1").out.splitlines()
    begun = [line.rsplit(": ", 1)[-1] for line in shown if "drafts for" in line]
    assert begun == ["a trial", "it was worse"]
    assert "by alice@laptop" in shown[-1]
    assert cli("models", "retire", "docs:2").out.startswith("docs:2 is retired")
    assert cli("models", "promote", "docs:2", "--reason", "x").code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "docs"], "needs a name, and the model's folder or hub id"),
        (["add"], "needs a name, and the model's folder"),
        (["show"], "needs a model"),
        (["add", "a/b", "."], "cannot be a model's name"),
        (["list", "docs"], "takes no model"),
        (["show", "docs", "folder"], "leave out 'folder'"),
        (["show", "docs"], "no registered model has the name or fingerprint 'docs'"),
        (["promote", "docs"], "needs --reason"),
        (["retire", "docs", "--tag", "x"], "takes no --tag\n"),
        (["retire", "docs", "--reason", "x"], "takes no --reason\n"),
        (["retire", "docs"], "no registered model has"),
        (["rollback", "--reason", "bad"], "no model is deployed for everything"),
        (["rollback", "--reason", "bad", "--json"], "has no --json"),
    ],
)
def test_what_an_action_would_ignore_or_cannot_do_is_refused(
    cli: Any,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(copytree(tiny_pair.draft, tmp_path / "draft"))
    done = cli("models", *arguments)
    assert done.code == 2
    assert said in done.err


@pytest.mark.usefixtures("added")
def test_a_worker_loads_what_is_promoted(cli: Any, tiny_pair: TinyPair) -> None:
    settings = load_settings()
    draft, verifier = (str(path.resolve()) for path in (tiny_pair.draft, tiny_pair.verifier))
    assert registered(settings, ["models:docs:1", "."]).loaded == [draft, "."]
    with pytest.raises(UsageError, match="no version of docs is deployed"):
        registered(settings, ["models:docs"])
    cli("models", "promote", "docs:2", "--reason", "better")
    assert registered(settings, ["models:docs"]).loaded == [verifier]
    cli("models", "promote", "docs:1", "--job", "nightly", "--reason", "newer")
    assert registered(settings, ["models:docs"]).loaded == [verifier, draft]
    first = cli("models", "list", "--json").json[0]["fingerprint"]
    assert registered(settings, [f"models:{first}"]).loaded == [draft]
    done = cli("worker", "propose", "--proposer", "models:docs")
    assert "is for `specbatch worker verify`" in done.err
    with pytest.raises(UsageError, match="no registered model has the name or fingerprint 'code'"):
        registered(settings, ["models:code"])


def test_a_version_whose_files_change_is_not_loaded_and_no_version_takes_its_folder(
    cli: Any, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    folder = copytree(tiny_pair.draft, tmp_path / "trained")
    cli("models", "add", "docs", str(folder))
    assert "say which version" in cli("models", "retire", "docs").err
    copytree(tiny_pair.verifier, folder, dirs_exist_ok=True)
    with pytest.raises(UsageError, match=r"the files of docs:1 in .* have changed"):
        registered(load_settings(), ["models:docs:1"])
    done = cli("models", "add", "docs", str(folder))
    assert done.code == 2
    assert "give each version a folder of its own" in done.err


def test_a_damaged_training_file_is_named(cli: Any, tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = copytree(tiny_pair.draft, tmp_path / "trained")
    (folder / "training.json").write_text("{")
    done = cli("models", "add", "docs", str(folder))
    assert done.code == 2
    assert "training.json cannot be read" in done.err


def test_what_a_training_says_of_its_model_is_kept_and_told(
    cli: Any, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    cli("models", "add", "docs", str(tiny_pair.verifier))
    (first,) = cli("models", "list", "--json").json
    folder = copytree(tiny_pair.draft, tmp_path / "trained")
    record = {"better": False, "parent": {"digest": first["fingerprint"]}}
    (folder / "training.json").write_text(json.dumps(record))
    cli("models", "add", "docs", str(folder))
    assert "parent  docs:1" in cli("models", "show", "docs:2").out
    origin = cli("models", "show", "docs:2", "--json").json["origin"]
    assert len(origin.pop("config_digest")) == 32
    assert origin == record
    done = cli("models", "promote", "docs:2", "--reason", "to see what it does")
    assert done.code == 0
    assert "did not show that it is better" in done.err
