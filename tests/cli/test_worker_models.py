"""`specbatch worker` with several draft models, and jobs that pin their tags to one of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specbatch.pipeline.bootstrap import make_client, make_worker
from specbatch.schemas.errors import ModelError, SpecError, UsageError
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded
from support.models import TinyPair, tiny_llama

pytestmark = pytest.mark.pipeline  # starts processes

SPEC: dict[str, Any] = {
    "input": {"uri": "prompts.parquet"},
    "output": {"uri": "out"},
    "verifier": "v",
    "proposer": "p",
}
Called = list[tuple[Any, ...]]


def spec_of(**speculation: object) -> JobSpec:
    return load_spec(SPEC | {"speculation": speculation})


@pytest.fixture
def given() -> list[Settings]:
    """The settings that `run_worker` is called with."""
    return []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, redis_url: str, given: list[Settings]) -> Called:
    """What `run_worker` is called with, instead of running; no process is started beside it."""
    monkeypatch.setenv("SPECBATCH_BROKER_URL", redis_url)
    calls: Called = []

    def run(settings: Settings, *rest: Any, **_: Any) -> None:
        given.append(settings)
        calls.append(rest)

    monkeypatch.setattr("specbatch.workers.lifecycle.run_worker", run)
    monkeypatch.setattr("specbatch.jobs.cli.worker.SecondProcess", lambda *_: Mock())
    return calls


def test_the_proposer_may_be_named_several_times(cli: Any, started: Called, folder: Path) -> None:
    (folder / "a").mkdir()
    flags = ["--verifier", "org/v", "--proposer", "a", "--proposer", "org/b"]
    assert cli("worker", "verify", *flags).code == 0
    assert cli("worker", "all", *flags).code == 0
    (verify, everything) = started
    assert verify == (("verify",), "org/v", (str(folder / "a"), "org/b"), 16)
    assert everything[0] == ("propose", "verify"), "the other kinds are beside it"


@pytest.mark.parametrize("kind", ["verify", "all"])
def test_a_worker_on_vllm_may_draft_with_its_own_speculation(
    cli: Any, started: Called, given: list[Settings], folder: Path, kind: str
) -> None:
    (folder / "head").mkdir()
    own = ["--proposer", '{"kind": "eagle3", "model": "head"}']
    flags = ["--verifier", "org/v", *own, "--engine", "vllm"]
    assert cli("worker", kind, *flags).code == 0
    assert started[0][2] == (), "no draft model is loaded by us"
    named = {"method": "eagle3", "model": str(folder / "head")}
    assert given[0].vllm_options == {"speculative_config": named}


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("verify", [], "kind suffix is vLLM's own speculation, which engine exact does not have"),
        ("propose", ["--engine", "vllm"], "it is for `specbatch worker verify`"),
        ("verify", ["--engine", "vllm", "--proposer", "a"], "leave other --proposer out"),
    ],
)
def test_own_speculation_of_vllm_stands_alone_beside_a_verifier_on_vllm(
    cli: Any, started: Called, kind: str, flags: list[str], words: str
) -> None:
    proposer = ["--proposer", '{"kind": "suffix"}']
    done = cli("worker", kind, "--verifier", "org/v", *proposer, *flags)
    assert done.code == 2
    assert words in done.err
    assert not started


@pytest.mark.parametrize("flags", [[], ["--proposer", "none"]])
def test_no_proposer_is_none(cli: Any, started: Called, flags: list[str]) -> None:
    assert cli("worker", "verify", "--verifier", "org/v", *flags).code == 0
    assert started[0][2] == ()


@pytest.mark.parametrize(
    ("kind", "proposers", "words"),
    [
        ("propose", ["a", "b"], "`specbatch worker propose` serves one --proposer"),
        ("verify", ["a", "none"], "--proposer none and --proposer a exclude each other"),
        ("propose", ["none"], "needs --proposer"),
    ],
)
def test_what_a_kind_cannot_serve_is_refused(
    cli: Any, started: Called, kind: str, proposers: list[str], words: str
) -> None:
    flags = [word for name in proposers for word in ("--proposer", name)]
    refused = cli("worker", kind, "--verifier", "v", *flags)
    assert refused.code == 2
    assert words in refused.complaint
    assert started == []


def test_every_draft_model_must_suit_the_verifier_and_have_a_name_of_its_own(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    settings = Settings(workspace=str(tmp_path / "workspace"))
    verifier, draft = str(tiny_pair.verifier), str(tiny_pair.draft)

    def start(*further: str) -> None:
        make_worker(
            settings, ("verify",), lambda _: None, verifier, draft, extra_draft_models=further
        )

    with pytest.raises(ModelError, match="vocabulary"):
        start(str(tiny_llama(tmp_path / "other", vocab_size=111)))
    copy = shutil.copytree(tiny_pair.draft, tmp_path / tiny_pair.draft.name)
    with pytest.raises(UsageError, match="two draft models are called `draft`"):
        start(str(copy))


# --- routes -----------------------------------------------------------------------------------
def test_routes_are_a_mapping_or_pairs() -> None:
    pairs = (("de", "german"), ("x", "none"))
    assert spec_of(routes={"de": "german", "x": "none"}).speculation.routes == pairs
    assert spec_of(routes=pairs).speculation.routes == pairs


def test_routes_that_contradict_the_spec_are_refused() -> None:
    with pytest.raises(SpecError, match="a tag occurs twice"):
        spec_of(routes=[("de", "a"), ("de", "b")])
    with pytest.raises(SpecError, match=r"routes send rows to `a`.*add draft-model"):
        spec_of(routes={"de": "a"}, sources=["ngram"])
    assert spec_of(routes={"de": "none"}, sources=["ngram"]).speculation.routes


def test_a_route_to_a_model_that_is_not_there_fails_the_job_with_the_names_there_are(
    folder: Path, tiny_pair: TinyPair
) -> None:
    settings = Settings(workspace=str(folder / "workspace"), max_attempts=1)
    models = {"verifier": str(tiny_pair.verifier), "proposer": str(tiny_pair.draft)}
    values = SPEC | models | {"speculation": {"routes": {"de": "german"}, "pregenerate": False}}
    with embedded(settings, models["verifier"], models["proposer"]) as (app, worker):
        client = make_client(settings, make_enqueue(app), worker.store)
        submitted, _ = client.submit(load_spec(values).resolved(folder))
        for _ in client.follow(submitted.job_id, 0.1, 120):
            pass
        (error,) = [error for *_, error in worker.store.failed_groups(submitted.job_id)]
    assert "sends tag `de` to `german`" in str(error)
    assert "this verify worker has the draft models `draft`" in str(error)
