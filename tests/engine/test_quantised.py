"""Weights of eight bits: another model, whose tokens keep every promise of the torch path."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact import host as host_module
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.models.fingerprint import fingerprint_of
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.errors import MissingExtraError, ModelError
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec, Weights
from support.devices import TRITON_DEVICE
from support.engines import complete, decided, engine_of, make_engine
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # runs models

PROMPTS = [tuple(range(2, 2 + n)) for n in (1, 9, 33, 60)]
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9)


@lru_cache(maxsize=4)
def quantised(folder: Path, weights: Weights, dtype: str = "float32") -> LoadedModel:
    return load_model(inspect_model(str(folder)), dtype, weights=weights)


@pytest.fixture(params=["int8", "fp8"])
def weights(request: pytest.FixtureRequest) -> Weights:
    chosen: Weights = request.param
    return chosen


def test_logits_are_near_those_of_the_weights_as_they_are(
    tiny_pair: TinyPair, weights: Weights
) -> None:
    outputs = []
    for model in (
        quantised(tiny_pair.verifier, "as-is"),
        quantised(tiny_pair.verifier, weights),
    ):
        done = complete(engine_of(model), PROMPTS, replace(GREEDY, max_tokens=1), depth=0)
        outputs.append(torch.tensor([c.logprobs for c in done]))
    exact, near = outputs
    assert not torch.equal(exact, near), "nothing was quantised"
    torch.testing.assert_close(near, exact, rtol=0, atol=0.1 if weights == "int8" else 0.5)


def test_the_weights_of_linear_layers_take_half(tiny_pair: TinyPair, weights: Weights) -> None:
    as_is, smaller = (
        load_model(
            inspect_model(str(tiny_pair.verifier)), "bfloat16", "fast", native=False, weights=kind
        )
        for kind in ("as-is", weights)
    )
    module: Any = as_is.module
    linears = [m.weight for m in module.modules() if isinstance(m, torch.nn.Linear)]
    rows, values = sum(len(w) for w in linears), sum(w.numel() for w in linears)
    saved = TorchDecoder(as_is, 2).memory(1, 1, 1)[0] - TorchDecoder(smaller, 2).memory(1, 1, 1)[0]
    assert values - 8 * rows <= saved < values, "a byte per value, less a row's scale"


def test_a_quantised_model_takes_the_torch_path(tiny_pair: TinyPair, weights: Weights) -> None:
    assert quantised(tiny_pair.verifier, weights).native is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_drafts_or_company(
    tiny_pair: TinyPair, weights: Weights, dtype: str
) -> None:
    model = quantised(tiny_pair.verifier, weights, dtype)
    alone = complete(Engine(ModelRunner(model, 8 << 20), (), 1), PROMPTS, SAMPLED, depth=0)
    drafting = DraftModelProposer(ModelRunner(quantised(tiny_pair.draft, "int8", dtype), 8 << 20))
    engine = Engine(ModelRunner(model, 8 << 20), (drafting,), max_batch_tokens=40)
    together = complete(engine, PROMPTS, SAMPLED, depth=4)
    assert decided(together) == decided(alone)
    assert sum(c.proposed for c in together) > 0


def test_a_quantised_proposer_changes_no_output(tiny_pair: TinyPair, weights: Weights) -> None:
    """The verifier drafts for itself, quantised: nearly all it proposes is right."""
    expected = complete(make_engine(tiny_pair.verifier), PROMPTS, SAMPLED, depth=0)
    drafting = DraftModelProposer(ModelRunner(quantised(tiny_pair.verifier, weights), 8 << 20))
    verifier = load_model(inspect_model(str(tiny_pair.verifier)), "float32")
    engine = Engine(ModelRunner(verifier, 8 << 20), (drafting,))
    got = complete(engine, PROMPTS, SAMPLED, depth=4)
    assert decided(got) == decided(expected)
    assert sum(c.accepted for c in got) > sum(c.proposed for c in got) // 2


def test_verifier_and_proposer_are_quantised_each_as_asked(tiny_pair: TinyPair) -> None:
    folders = [inspect_model(str(path)) for path in (tiny_pair.verifier, tiny_pair.draft)]
    host = EngineHost(folders[0], folders[1], 4, 64, kv_cache_bytes=8 << 20)
    spec = EngineSpec(dtype="float32", verifier_weights="int8")
    engine = host.make_engine(spec)
    assert engine._runner._decoder.__class__.__name__ == "TorchDecoder"
    assert spec.of_proposer().verifier_weights == "as-is"
    assert EngineSpec(proposer_weights="fp8").of_proposer().verifier_weights == "fp8"


def test_a_draft_is_a_hint_and_needs_no_exactness(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [inspect_model(str(path)) for path in (tiny_pair.verifier, tiny_pair.draft)]
    exactness: dict[str, str] = {}

    def noted(folder: ModelFolder, dtype: str, asked: str, *where: str, **more: Any) -> LoadedModel:
        exactness[folder.ref] = asked
        return load_model(folder, dtype, asked, *where, **more)

    monkeypatch.setattr(host_module, "load_model", noted)
    EngineHost(*folders, 4, 64, kv_cache_bytes=8 << 20).make_engine(EngineSpec(dtype="float32"))
    assert exactness == {folders[0].ref: "bitwise", folders[1].ref: "fast"}


def test_another_model_has_another_fingerprint() -> None:
    kinds: tuple[Weights, ...] = ("as-is", "int8", "fp8")
    assert fingerprint_of("abc", "as-is") == "abc"
    assert len({fingerprint_of(own, kind) for own in ("abc", "abd") for kind in kinds}) == 6


def test_bitwise_on_a_gpu_refuses_them(tiny_pair: TinyPair, weights: Weights) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(
            inspect_model(str(tiny_pair.verifier)),
            "float32",
            device=TRITON_DEVICE,
            kernels="triton",
            weights=weights,
        )
    assert f"has no bitwise products of `{weights}` weights on a GPU" in str(caught.value)


def test_without_torchao_the_message_names_the_extra(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        "specbatch.pipeline.engines.exact.model.quantised.find_spec",
        lambda name: None if name == "torchao" else known(name),
    )
    folder = inspect_model(str(tiny_pair.verifier))
    host = EngineHost(folder, None, 4, 64, kv_cache_bytes=8 << 20)
    with pytest.raises(MissingExtraError) as caught:
        host.service(EngineSpec(verifier_weights="int8"))
    assert str(caught.value) == (
        "weights of `int8` need torchao, which is not installed here: "
        "`pip install 'specbatch[quant]'`"
    )
