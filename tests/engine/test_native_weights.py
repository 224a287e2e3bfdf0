"""Weights that are read without transformers' modules are those that its modules get."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from specbatch.kernels.decoder.contract import DecoderWeights
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.native_model import (
    NotNativeError,
    config_of,
    lower,
    rotary_tables,
    shape_of,
)
from specbatch.pipeline.engines.exact.model.native_weights import read_native
from specbatch.pipeline.engines.models.model_folder import NATIVE_MODEL_TYPES, inspect_model
from specbatch.schemas.errors import BrokenModelError

pytestmark = pytest.mark.pipeline  # loads models

BODY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 198,
}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def made(model_type: str, path: Path, size: str = "1GB", **more: Any) -> Path:
    """A model whose parameters are all different."""
    config = AutoConfig.for_model(model_type, **(BODY | more))
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path, max_shard_size=size)
    return path


def tensors(weights: DecoderWeights) -> list[tuple[str, Tensor | None]]:
    whole = [(f.name, getattr(weights, f.name)) for f in dataclasses.fields(weights)]
    of_layers = [
        (f"{number}.{f.name}", getattr(layer, f.name))
        for number, layer in enumerate(weights.layers)
        for f in dataclasses.fields(layer)
    ]
    return [(name, value) for name, value in whole if name != "layers"] + of_layers


def check_against_transformers(folder: Path, dtype: torch.dtype) -> None:
    model = inspect_model(str(folder))
    ours = read_native(model, dtype)
    assert ours is not None
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    shape, weights = lower(theirs, model.context_tokens)
    assert ours.shape == shape
    for (name, got), (_, wanted) in zip(tensors(ours.weights), tensors(weights), strict=True):
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            assert got.dtype == wanted.dtype, name
            assert torch.equal(got, wanted), name
    eos = theirs.generation_config.eos_token_id
    eos = theirs.config.eos_token_id if eos is None else eos
    assert ours.eos_ids == frozenset([eos] if isinstance(eos, int) else eos or [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", NATIVE_MODEL_TYPES)
def test_they_are_those_of_transformers(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    check_against_transformers(made(model_type, tmp_path / "m"), dtype)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        pytest.param("llama", {"tie_word_embeddings": True}, id="tied"),
        pytest.param("llama", {"attention_bias": True}, id="biased"),
        pytest.param("qwen3", {"attention_bias": True}, id="biased-with-norms"),
        pytest.param("llama", {"size": "40KB"}, id="in-several-files"),
        pytest.param("qwen2", {"tie_word_embeddings": True, "size": "40KB"}, id="tied-in-several"),
        pytest.param("llama", {"eos_token_id": [3, 198]}, id="several-ends"),
        pytest.param("llama", {"eos_token_id": None}, id="no-end"),
        pytest.param("llama", {"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param("mistral", {"sliding_window": 16}, id="windows"),
        pytest.param("mistral", {"sliding_window": None}, id="no-windows"),
        pytest.param("llama", {"rope_parameters": LLAMA3}, id="llama3"),
        pytest.param("llama", {"rope_parameters": YARN}, id="yarn"),
    ],
)
def test_so_they_are_however_it_was_saved(
    model_type: str, more: dict[str, Any], tmp_path: Path
) -> None:
    check_against_transformers(made(model_type, tmp_path / "m", **more), torch.float32)


def test_ends_are_the_generation_configs(tmp_path: Path) -> None:
    folder = made("llama", tmp_path / "m")
    path = folder / "generation_config.json"
    for value in ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {"temperature": 0.5}):
        path.write_text(json.dumps(value))
        check_against_transformers(folder, torch.float32)
    path.unlink()
    check_against_transformers(folder, torch.float32)


OLD = {"rope_theta": 5e5, "rope_scaling": None}  # as transformers 4 wrote it


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ((), {}),
        (("rope_parameters",), OLD),
        (("rope_parameters",), {"rope_theta": 2e4}),
        (("rope_parameters",), OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (("rope_parameters",), OLD | {"rope_scaling": LLAMA3 | {"rope_theta": 1.0}}),
        (("rope_parameters",), {}),
        (("head_dim",), {"num_attention_heads": 2, "num_key_value_heads": 2}),
        (("tie_word_embeddings", "rms_norm_eps"), {}),
        (("hidden_act", "eos_token_id"), {}),
        (("max_position_embeddings",), {}),
        (("attention_bias", "mlp_bias", "dtype"), {"torch_dtype": "float32"}),
        ((), {"sliding_window": 8, "use_sliding_window": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", NATIVE_MODEL_TYPES)
def test_a_config_is_read_as_transformers_reads_it(
    model_type: str, left_out: tuple[str, ...], said: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **BODY).to_dict()
    values = {name: value for name, value in config.items() if name not in left_out} | said
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs, ours = AutoConfig.from_pretrained(str(tmp_path)), config_of(tmp_path)
    assert as_used(ours) == as_used(theirs)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_type": [], "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": [1]},
        {"rope_parameters": None, "rope_theta": "much", "rope_scaling": None},
        {"rms_norm_eps": "1e-5"},
        {"model_type": ["llama"]},
    ],
    ids=str,
)
def test_a_config_of_nonsense_is_left_to_transformers(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = AutoConfig.for_model("llama", **BODY).to_dict() | said
    (tmp_path / "config.json").write_text(json.dumps(values))
    asked: list[str] = []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path, **_: asked.append(path))
    config_of(tmp_path)
    assert asked == [str(tmp_path)]


def test_a_whole_config_needs_no_class_of_transformers(tmp_path: Path) -> None:
    for model_type in NATIVE_MODEL_TYPES:
        folder = made(model_type, tmp_path / model_type)
        assert not isinstance(config_of(folder), PreTrainedConfig)


def as_used(config: Any) -> list[Any]:
    """What is read of it."""
    try:
        shape: Any = shape_of(config, torch.float32)
    except NotNativeError as reason:
        return [str(reason)]
    tables = [table.tolist() for table in rotary_tables(config, shape, 40)]
    names = ("eos_token_id", "tie_word_embeddings", "attention_bias", "quantization_config")
    return [shape, tables, *(getattr(config, name, None) or None for name in names)]


def altered(folder: Path, alter: Any) -> None:
    path = folder / "model.safetensors"
    save_file(alter(load_file(path)), path, metadata={"format": "pt"})


def test_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    """As a base model is saved: without its head, and without the prefix."""
    folder = made("llama", tmp_path / "m", tie_word_embeddings=True)
    altered(folder, lambda all_: {k.removeprefix("model."): v for k, v in all_.items()})
    assert read_native(inspect_model(str(folder)), torch.float32) is None
    assert load_model(inspect_model(str(folder)), "float32").native is not None


def test_a_head_beside_the_embedding_that_it_should_be_is_left_to_transformers(
    tmp_path: Path,
) -> None:
    folder = made("llama", tmp_path / "m", tie_word_embeddings=True)
    head = torch.ones(BODY["vocab_size"], BODY["hidden_size"])
    altered(folder, lambda all_: all_ | {"lm_head.weight": head})
    assert read_native(inspect_model(str(folder)), torch.float32) is None


def test_what_is_missing_is_named_as_before(tmp_path: Path) -> None:
    folder = made("llama", tmp_path / "m")
    model = inspect_model(str(folder))
    altered(folder, lambda all_: {k: v for k, v in all_.items() if "q_proj" not in k})
    with pytest.raises(BrokenModelError, match="q_proj"):
        load_model(model, "float32")


def test_no_module_of_transformers_is_imported(tmp_path: Path) -> None:
    """They take longer to import than most models to read."""
    folder = made("llama", tmp_path / "m")
    code = (
        "import sys\n"
        "from specbatch.pipeline.engines.exact.host import EngineHost\n"
        "from specbatch.pipeline.engines.contract import EngineSpec\n"
        "from specbatch.pipeline.engines.models.model_folder import inspect_model\n"
        "host = EngineHost(inspect_model(sys.argv[1]), None, 4, 64, 1 << 20)\n"
        "host.make_engine(EngineSpec(dtype='float32'))\n"
        "wrong = ('transformers', 'torch._dynamo', 'torchao')\n"
        "print([name for name in wrong if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
