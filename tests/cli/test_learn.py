"""`specbatch learn`: trains, tries and rolls out in one command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flags_of_a_job, run_in, undone, write
from safetensors.torch import load_file, save_file

from specbatch.jobs.cli.connect import load_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning import checkpoints, gate, nightly
from specbatch.pipeline.learning.nightly import LearnOrder
from specbatch.pipeline.learning.wiring import train
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.rollouts import Observed
from support.databases import migrated
from support.models import TinyPair, tiny_llama

pytestmark = pytest.mark.pipeline  # trains and runs models


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> Path:
    """A job of the tiny pair has ended, and its draft model is deployed."""
    return ended_and_deployed(tmp_path_factory.mktemp("few"), tiny_pair, rows=16, tokens=8)


def ended_and_deployed(folder: Path, pair: TinyPair, rows: int, tokens: int) -> Path:
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", [f"def f{i}(x, y={i}):" for i in range(rows)])
    flags = ("--name", "docs", "--max-tokens", tokens, "--top-logprobs", 4, "--temperature", 0)
    for command in (
        ("submit-job", "--local", *flags_of_a_job(pair), *flags, "--dtype", "float32"),
        ("models", "add", "small", pair.draft),
        ("models", "promote", "small", "--reason", "the first one"),
    ):
        done = run_in(folder, *command)
        assert done.code == 0, done.err
    return folder


@pytest.fixture
def folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with the ended job in it; what a test does there is undone."""
    monkeypatch.setenv("SPECBATCH_MAX_CONCURRENT_SEQUENCES", "4")
    with undone(site, tmp_path / "before", monkeypatch) as here:
        yield here


@pytest.fixture
def learning(folder: Path, tiny_pair: TinyPair) -> list[object]:
    """The command."""
    assert folder.is_dir()
    return [
        *("learn", "small", "--verifier", tiny_pair.verifier, "--job", "docs", "--steps", "50,100"),
        *("--held-out", 0.4, "--epochs", 20),
    ]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets the trials' verdict, as drafts of so small a pair hardly pay. They are short."""

    def decide(pays: bool) -> None:
        verdict = (pays, "drafts can pay: judged by hand" if pays else "drafts do not pay: by hand")
        monkeypatch.setattr(gate, "judged", lambda _measured: verdict)

    monkeypatch.setattr(gate, "TURNS", 1)
    monkeypatch.setattr(gate, "TOKENS", 8)
    decide(True)
    return decide


@pytest.fixture
def paying(
    tried: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], None]:
    """The same, and nothing is measured for it."""
    monkeypatch.setattr(gate, "_measured", lambda *_: iter(()))
    return tried


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tiny_pair: TinyPair) -> list[Callable[[], None]]:
    """Trainings take no time and are better; what is in the list happens during the next one."""
    meanwhile: list[Callable[[], None]] = []

    def quickly(_settings: Any, _store: Any, parent: str, out: Path, *_: Any) -> dict[str, Any]:
        shutil.copytree(tiny_pair.draft, out, dirs_exist_ok=True)
        weights = load_file(out / "model.safetensors")
        changed = float(len(weights) + sum(map(ord, out.name)))
        noisy = {name: values * (1 + changed / 1e6) for name, values in weights.items()}
        save_file(noisy, out / "model.safetensors", {"format": "pt"})
        interval = {"value": 0.5, "low": 0.4, "high": 0.6}
        digest = inspect_model(parent).fingerprint.digest
        record = {
            "about": {"parent": digest, "until": 0.0},
            "better": True,
            "parent": {"digest": digest},
            "held_out": {"accepted_length": {"difference": interval}},
        }
        (out / "training.json").write_text(json.dumps(record))
        while meanwhile:
            meanwhile.pop()()
        return record

    monkeypatch.setattr(nightly, "train", quickly)
    return meanwhile


def observe(number: int, candidate: int, present: int) -> None:
    with closing(make_store(load_settings())) as store:
        for i in range(60):
            seen = Observed(0.5, i % 2 == 0, candidate if i % 2 == 0 else present, 1.0)
            store.observe_rollout(number, "job", i, seen)


@pytest.fixture
def enough(tmp_path: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a job that is long enough for a training that is surely better."""
    (tmp_path / "enough").mkdir()
    here = ended_and_deployed(tmp_path / "enough", tiny_pair, rows=60, tokens=24)
    monkeypatch.chdir(here)
    return here


@pytest.mark.usefixtures("tried")
def test_a_night_trains_tries_and_rolls_out_and_the_next_one_promotes(
    cli: Any, learning: list[object], enough: Path
) -> None:
    first = cli(*learning, "--night", "1", "--json")
    assert first.code == 0, first.err
    learned = first.json
    assert learned["record"]["better"]
    assert "accepted draft tokens per pass" in first.err, "it shows progress"
    candidate = learned["candidate"]["fingerprint"]
    assert learned["trial"]["proposer"] == learned["rollout"]["fingerprint"] == candidate
    assert "begins rollout 1" in learned["summary"]
    (made,) = (enough / "trained").glob("small-docs-1-*")
    assert (made / "training.json").is_file()
    again = cli(*learning, "--night", "1", "--json")
    assert (again.code, again.json["record"]) == (0, learned["record"])
    assert again.json["summary"] == "small:2 had rollout 1: drafts for 50% of groups"
    short = ("--epochs", 1, "--json")  # whatever comes of them
    second = cli(*learning, "--night", "2", *short).json
    assert second["record"]["parent"]["digest"] == candidate, "it is trained further"
    (goes_on,) = cli("rollout", "list", "--json").json
    candidate = goes_on["fingerprint"]
    observe(goes_on["number"], 1000, 10)
    third = cli(*learning, "--night", "3", *short)
    assert third.code == 0, third.err
    assert third.json["record"]["parent"]["digest"] == candidate
    found = {one["fingerprint"]: one["deployments"] for one in cli("models", "list", "--json").json}
    (deployment,) = found[candidate]
    assert deployment["reason"].startswith(f"rollout {goes_on['number']}: better")


@pytest.mark.usefixtures("trained")
def test_where_no_drafts_pay_a_better_one_of_the_same_cost_is_rolled_out_all_the_same(
    cli: Any, learning: list[object], tried: Callable[[bool], None]
) -> None:
    tried(False)
    learned = cli(*learning, "--night", "1", "--json").json
    assert learned["trial"]["pays"]
    assert learned["summary"].endswith(
        "drafts do not pay: by hand; its parent drafts at the same cost and is accepted less"
    )
    (begun,) = cli("rollout", "list", "--json").json
    assert begun["fingerprint"] == learned["candidate"]["fingerprint"]


@pytest.mark.parametrize("parent", ["is off", "costs something else"])
def test_a_candidate_that_cannot_pay_is_retired(
    cli: Any,
    tiny_pair: TinyPair,
    learning: list[object],
    trained: list[Callable[[], None]],
    paying: Callable[[bool], None],
    parent: str,
) -> None:
    paying(False)
    if parent == "is off":
        cli("models", "try", "small", "--verifier", tiny_pair.verifier)
    else:
        trained.append(change_config)
    learned = cli(*learning, "--night", "1", "--json").json
    assert learned["rollout"] is None
    assert "but drafts do not pay" in learned["summary"]
    assert cli("rollout", "list").out.startswith("no rollouts")
    assert cli("models", "promote", "small:2", "--reason", "x").code == 2
    assert cli(*learning, "--night", "1").out == "small:2 is retired\n"


@pytest.mark.usefixtures("trained", "paying")
def test_a_candidate_that_cannot_be_tried_is_tried_again_by_the_same_night(
    cli: Any, learning: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(gate, "TOKENS", 10_000)
        failed = cli(*learning, "--night", "1")
    assert failed.code == 2
    assert failed.complaint.startswith("small:2 is trained, but cannot be tried: of ")
    assert failed.complaint.endswith("then `specbatch learn` with --night 1 tries it again")
    assert "begins rollout 1" in cli(*learning, "--night", "1").out


@pytest.mark.usefixtures("paying")
@pytest.mark.parametrize("end", ["better", "worse", "stopped"])
def test_what_a_rollout_decided_during_the_training_counts(
    cli: Any, learning: list[object], trained: list[Callable[[], None]], end: str
) -> None:
    first = cli(*learning, "--night", "1", "--json").json["rollout"]

    def stop() -> None:
        with closing(make_store(load_settings())) as store:
            store.stop_rollout(DeployScope("default", "docs"), "a fault")

    figures = (1000, 10) if end == "better" else (10, 1000)
    trained.append(stop if end == "stopped" else partial(observe, first["number"], *figures))
    second = cli(*learning, "--night", "2", "--json")
    assert second.code == 0, second.err
    ended, begun = cli("rollout", "list", "--history", "--json").json
    assert ended["outcome"] == end
    with closing(make_store(load_settings())) as store:
        deployed = {one.fingerprint for one in store.deployments()}
    assert (first["fingerprint"] in deployed) == (end == "better")
    assert begun["fingerprint"] == second.json["candidate"]["fingerprint"]


@pytest.mark.usefixtures("paying", "trained")
def test_another_rollout_that_began_meanwhile_is_left_alone(
    cli: Any, tiny_pair: TinyPair, learning: list[object], trained: list[Callable[[], None]]
) -> None:
    def begin() -> None:
        with closing(make_store(load_settings())) as store:
            cli("models", "add", "small", tiny_pair.verifier)
            other = inspect_model(str(tiny_pair.verifier)).fingerprint.digest
            store.begin_rollout(other, DeployScope("default", "docs"), (0.5, 1.0), "by hand")

    trained.append(begin)
    learned = cli(*learning, "--night", "1", "--json").json
    assert "is not rolled out: rollout 1 continues, of another model" in learned["summary"]
    (goes_on,) = cli("rollout", "list", "--json").json
    assert goes_on["reason"] == "by hand"


@pytest.mark.usefixtures("paying")
def test_a_night_that_was_killed_behind_its_training_begins_its_rollout(
    cli: Any,
    learning: list[object],
    trained: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(nightly, "register", interrupted)
        assert cli(*learning, "--night", "1").code != 0
    trained.append(pytest.fail)  # nothing is trained again
    assert "begins rollout 1" in cli(*learning, "--night", "1").out


def test_a_training_that_is_resumed_keeps_its_parent(
    cli: Any, tiny_pair: TinyPair, learning: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has been deployed, or is in a rollout, since."""
    with monkeypatch.context() as killed:
        killed.setattr(nightly, "train", partial(stopped_training, at=2))
        assert cli(*learning, "--night", "1").code != 0
    cli("models", "add", "small", tiny_pair.verifier)
    begun = ("--tenant", "default", "--job", "docs", "--reason", "by hand")
    assert cli("rollout", "start", "small:2", *begun).code == 0
    done = cli(*learning, "--night", "1", "--json")
    assert done.code == 0, done.err
    parent = inspect_model(str(tiny_pair.draft)).fingerprint.digest
    assert done.json["record"]["parent"]["digest"] == parent


def test_two_at_once_for_one_night(cli: Any, learning: list[object]) -> None:
    folder = Path("trained") / order("small", job="docs").folder_name("1")
    with checkpoints.locked(folder / f"{checkpoints.LOCK}-night", "another --night"):
        done = cli(*learning, "--night", "1")
    assert done.code == 2
    assert done.complaint == (
        f"another training writes to {folder}: wait for it, or name another --night"
    )


def test_what_a_night_cannot_begin_with_is_said_before_it_trains(
    cli: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    for name, files, more in (
        ("small", tiny_pair.draft, []),
        ("large", tiny_pair.verifier, ["--tenant", "default", "--job", "docs"]),
    ):
        cli("models", "add", name, files)
        assert cli("models", "promote", name, "--reason", "the first one", *more).code == 0
    other = tiny_llama(folder / "other", vocab_size=310, layers=1)
    for verifier, said in ((other, "must share one vocabulary"), ("NOSUCH", "NOSUCH")):
        done = cli("learn", "small", "--verifier", verifier)
        assert (done.code, said in done.complaint) == (2, True), done.complaint
    done = cli("learn", "small", "--verifier", tiny_pair.verifier, "--job", "docs")
    assert done.complaint == (
        "no version of small is deployed for tenant default, job docs, where large:1 drafts: begin "
        "with `specbatch models add small FOLDER` and `specbatch models promote small "
        "--tenant default --job docs --reason WHY`"
    )


def change_config() -> None:
    """Of the model that is being trained."""
    (path,) = Path("trained").glob("small-docs-1-*/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "by": "hand"}))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def stopped_training(*args: Any, at: int) -> dict[str, Any]:
    """Until a step."""
    *rest, watcher = args
    steps: list[int] = []
    stopping = replace(
        watcher,
        on_step=lambda step, _of: steps.append(step),
        is_stopped=lambda: bool(steps) and steps[-1] >= at,
    )
    return train(*rest, stopping)


def order(name: str, **more: Any) -> LearnOrder:
    return LearnOrder(name, "verifier", Path("trained"), **more)


def test_every_order_has_a_folder_of_its_own() -> None:
    """One process may load the models of several, by their folders' names."""
    orders = [
        *(order("a"), order("a", tenant="x"), order("a", job="x"), order("a-x"), order("a b")),
        *(order("a_b"), order("a", tenant="x", job="y"), order("a", job="x-y")),
    ]
    assert len({one.folder_name("1") for one in orders}) == len(orders)


def test_without_a_model_to_begin_with_nothing_is_learned(cli: Any, learning: list[object]) -> None:
    unknown = [word if word != "small" else "other" for word in learning]
    done = cli(*unknown)
    assert done.code == 2
    said = "no version of other is deployed for tenant default, job docs, where small:1 drafts: "
    assert said in done.err
