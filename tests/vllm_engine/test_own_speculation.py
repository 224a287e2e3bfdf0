"""vLLM's own speculation, as `SPECBATCH_VLLM_OPTIONS` names it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.pipeline.bootstrap import with_proposer as settings_with
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.model_folder import inspect_folder
from specbatch.pipeline.engines.vllm import own_speculation as module
from specbatch.pipeline.engines.vllm.core import Core, CoreOptions, arguments_of
from specbatch.pipeline.engines.vllm.own_speculation import (
    check_needs,
    names_of,
    own_speculation,
    with_proposer,
)
from specbatch.schemas.errors import MissingExtraError, ModelError, UsageError
from specbatch.schemas.settings import Settings
from specbatch.schemas.vllm_proposer import KINDS, VllmProposer
from support.tree import ROOT

MODELS = ROOT / "jobs" / "demo" / "models"
VERIFIER = inspect_folder("demo", MODELS / "verifier")
EAGLE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}


def given(speculation: object) -> tuple[dict[str, Any], int]:
    return own_speculation({"speculative_config": speculation}, 8)


def test_its_depth_is_that_of_the_core() -> None:
    own, depth = given(EAGLE)
    assert (own, depth) == ({"method": "eagle3", "model": "head"}, 3)
    made = arguments_of(CoreOptions("m", "float32", 4, 64, depth, own_speculation=own))
    assert made["speculative_config"] == EAGLE


def test_without_a_depth_it_has_the_usual_one() -> None:
    assert given({"method": "suffix"}) == ({"method": "suffix"}, 8)


def test_without_it_the_core_has_a_proposer_that_never_drafts() -> None:
    assert own_speculation({"enforce_eager": True}, 8) == ({}, 8)
    made = arguments_of(CoreOptions("m", "float32", 4, 64, 8))
    assert made["speculative_config"]["method"] == "custom_class"
    assert "speculative_config" not in arguments_of(CoreOptions("m", "float32", 4, 64, 0))


def test_a_pipeline_of_devices_cannot_speculate() -> None:
    for more, depth in (({}, 8), ({"speculative_config": EAGLE}, 0)):
        with pytest.raises(UsageError, match="SPECBATCH_VLLM_MAX_DEPTH=0"):
            own_speculation({"pipeline_parallel_size": 2, **more}, depth)
    assert own_speculation({"pipeline_parallel_size": 2}, 0) == ({}, 0)


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        ("eagle3", "names no method"),
        ({"model": "head"}, "names no method"),
        ({"method": "dspark"}, "cannot have method dspark"),
        ({"method": "custom_class"}, "cannot have method custom_class"),
        (EAGLE | {"draft_sample_method": "probabilistic"}, "draft_sample_method probabilistic"),
        (EAGLE | {"rejection_sample_method": "synthetic"}, "rejection_sample_method synthetic"),
        (EAGLE | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        (EAGLE | {"num_speculative_tokens": "3"}, "num_speculative_tokens is '3'"),
    ],
)
def test_what_would_change_outputs_or_cannot_be_is_refused(speculation: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        given(speculation)


# --- as an object --------------------------------------------------------------------------------
def own(kind: str, model: str | None = None) -> VllmProposer:
    return VllmProposer.model_validate({"kind": kind, "model": model})


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_becomes_what_vllm_is_configured_with(kind: str) -> None:
    model = "owner/m" if kind in ("eagle3", "draft_model") else None
    options = with_proposer({"enforce_eager": True}, own(kind, model), 5)
    speculation, depth = own_speculation(options, 5)
    more = {name: value for name, value in options.items() if name != "speculative_config"}
    core = CoreOptions("m", "float32", 4, 64, depth, own_speculation=speculation, more=more)
    named = {"method": kind, "num_speculative_tokens": 5} | ({"model": model} if model else {})
    assert arguments_of(core)["speculative_config"] == named
    assert arguments_of(core)["enforce_eager"] is True


def test_an_object_that_the_options_have_too_keeps_what_they_say_of_it() -> None:
    options = {"speculative_config": EAGLE | {"model": "owner/head"}}
    assert with_proposer(options, own("eagle3", "owner/head"), 8) == options
    with pytest.raises(UsageError, match="the proposer is suffix, and SPECBATCH_VLLM_OPTIONS has"):
        with_proposer(options, own("suffix"), 8)


def test_an_object_needs_room_for_drafts() -> None:
    with pytest.raises(UsageError, match="set SPECBATCH_VLLM_MAX_DEPTH to 1 or more"):
        with_proposer({}, own("suffix"), 0)


def test_engine_exact_refuses_an_object_and_names_both() -> None:
    with pytest.raises(
        UsageError, match=r"proposer kind mtp is vLLM's own .* engine exact does not"
    ):
        settings_with(Settings(), own("mtp"))
    assert settings_with(Settings(), None) == Settings()
    made = settings_with(Settings(engine="vllm"), own("mtp"))
    assert made.vllm_options == {"speculative_config": {"method": "mtp"}}


def test_a_job_may_ask_by_its_object_for_what_the_options_name() -> None:
    assert names_of({"method": "eagle3", "model": "owner/head", "quantization": "fp8"}) == (
        "eagle3:owner/head",
    )
    assert names_of({"method": "suffix"}) == ("suffix",)
    assert names_of({"method": "medusa", "model": "m"}) == names_of({}) == ()


def test_suffixes_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="needs the package arctic-inference: `pip install"):
        check_needs({"method": "suffix"}, VERIFIER)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    check_needs({"method": "suffix"}, VERIFIER)


def with_config(folder: Path, **fields: object) -> ModelFolder:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 2048, **fields}))
    return replace(VERIFIER, path=folder)


@pytest.mark.parametrize("name", module.MTP_LAYERS)
def test_only_a_model_with_its_layers_can_draft_by_mtp(name: str, tmp_path: Path) -> None:
    check_needs({"method": "mtp"}, with_config(tmp_path / "a", **{name: 1}))
    check_needs({"method": "mtp"}, with_config(tmp_path / "b", text_config={name: 2}))
    check_needs({"method": "mtp"}, with_config(tmp_path / "c", model_type="longcat_flash"))
    check_needs({"method": "mtp", "model": "owner/layers"}, VERIFIER)
    for number, fields in enumerate(({}, {name: 0}, {name: None})):
        without = with_config(tmp_path / str(number), **fields)
        with pytest.raises(ModelError, match="kind mtp needs a verifier with layers for multi"):
            check_needs({"method": "mtp"}, without)


def test_a_model_that_is_not_there_or_speaks_otherwise_is_refused(tmp_path: Path) -> None:
    for kind in ("eagle3", "draft_model"):
        with pytest.raises(ModelError, match="does not exist"):
            check_needs({"method": kind, "model": str(tmp_path / "nowhere")}, VERIFIER)
        with pytest.raises(ModelError, match=f"kind {kind} needs a model"):
            check_needs({"method": kind}, VERIFIER)
    draft = {"method": "draft_model", "model": str(MODELS / "draft")}
    check_needs(draft, VERIFIER)
    shutil.copytree(MODELS / "draft", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    config["model"]["vocab"] = dict.fromkeys(config["model"]["vocab"], 0)
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="give different meanings to the same token ids"):
        check_needs({**draft, "model": str(tmp_path / "other")}, VERIFIER)


@pytest.mark.parametrize("name", ["Draft-Eagle3", "eagle-small", "dflash", "my-dspark"])
def test_a_draft_model_that_vllm_would_take_for_another_kind_is_refused(
    name: str, tmp_path: Path
) -> None:
    shutil.copytree(MODELS / "draft", tmp_path / name)
    with pytest.raises(ModelError, match="by the word in its name, and not for a draft model"):
        check_needs({"method": "draft_model", "model": str(tmp_path / name)}, VERIFIER)


def of_method(found: str, **own: str) -> tuple[Core, SimpleNamespace]:
    """A core that vLLM has configured with this method, before it is used."""
    ended = SimpleNamespace(calls=0)

    def shutdown() -> None:
        ended.calls += 1

    core = Core.__new__(Core)
    core.options = CoreOptions("m", "float32", 4, 64, 8, own_speculation=own)
    core._engine = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(method=found)),
        engine_core=SimpleNamespace(shutdown=shutdown),
    )
    return core, ended


def test_a_core_that_drafts_in_another_way_than_was_named_is_given_up() -> None:
    for found, named in (("eagle3", "eagle3"), ("mtp", "mtp"), ("mtp", "deepseek_mtp")):
        of_method(found, method=named)[0]._check_method()
    core, ended = of_method("dspark", method="draft_model", model="m")
    with pytest.raises(ModelError, match="takes `m` for dspark by its name, and it was named as"):
        core._check_method()
    assert ended.calls == 1
