"""The engine on Triton's kernels, as on a GPU: the torch path's outputs, in bits of its own.

Without a GPU the kernels run in Triton's interpreter, on the same models with fewer tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbatch.pipeline.engines.contract import Completion
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel, choose_kernels
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.schemas.errors import ModelError
from specbatch.schemas.records import SamplingParams
from support.architectures import VOCAB, WINDOW, tiny_model
from support.devices import TRITON_DEVICE
from support.engines import complete, decided, make_engine
from support.models import tiny_llama

pytestmark = pytest.mark.pipeline  # runs models

TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS)
SAMPLED = SamplingParams(max_tokens=TOKENS, temperature=0.8)
FILTERED = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
LENGTHS = (1, WINDOW + 2, 27)


def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(0)
    return [tuple(generator.randrange(1, VOCAB - 1) for _ in range(n)) for n in LENGTHS]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model; one with soft caps and windows."""
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@lru_cache(maxsize=4)
def by_triton(folder: Path, exactness: str = "bitwise", dtype: str = "float32") -> LoadedModel:
    return load_model(
        inspect_model(str(folder)), dtype, exactness, device=TRITON_DEVICE, kernels="triton"
    )


def engine(
    model: LoadedModel, max_sequences: int = 64, max_batch_tokens: int = 2048, drafts: bool = False
) -> Engine:
    model = replace(model, exactness="fast")  # made bitwise; the check of it has its own tests
    proposers: list[Proposer] = [BlockProposer()]
    if drafts:
        proposers.append(DraftModelProposer(ModelRunner(model, 16 << 20)))
    return Engine(ModelRunner(model, 16 << 20), tuple(proposers), max_sequences, max_batch_tokens)


@lru_cache(maxsize=2)
def alone(folder: Path) -> list[Completion]:
    """One sequence at a time, one token at a time."""
    return complete(engine(by_triton(folder), max_sequences=1), prompts(), SAMPLED, depth=0)


@pytest.mark.parametrize(
    ("exactness", "params"),
    [("bitwise", GREEDY), ("bitwise", FILTERED), ("fast", SAMPLED)],
    ids=["greedy", "filtered", "fast"],
)
def test_outputs_are_those_of_the_torch_path(
    folder: Path, exactness: str, params: SamplingParams
) -> None:
    expected = complete(make_engine(folder, native=False), prompts(), params, depth=0)
    got = complete(engine(by_triton(folder, exactness)), prompts(), params, depth=0)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert len({token for c in got for token in c.token_ids}) > TOKENS, "too little is said"
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("depth", "spoilt", "concurrent", "budget"),
    [
        pytest.param(0, False, 4, 2048, id="together"),
        pytest.param(4, False, 1, 2048, id="right-drafts-alone"),
        pytest.param(4, True, 4, 13, id="spoilt-drafts-in-short-passes"),
    ],
)
def test_bits_do_not_depend_on_drafts_company_or_passes(
    folder: Path, depth: int, spoilt: bool, concurrent: int, budget: int
) -> None:
    expected = alone(folder)
    drafts = [
        [7 if spoilt and at % 3 == 2 else token for at, token in enumerate(c.token_ids)]
        for c in expected
    ]
    got = complete(engine(by_triton(folder), concurrent, budget), prompts(), SAMPLED, depth, drafts)
    assert decided(got) == decided(expected)
    proposed, accepted = (sum(getattr(c, name) for c in got) for name in ("proposed", "accepted"))
    assert (accepted > 0) == (depth > 0)
    assert (accepted < proposed) == spoilt


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_a_draft_token_whose_value_overflows_spoils_no_row_before_it(
    by: Literal["torch", "triton"], tmp_path: Path
) -> None:
    """float16 ends at 65,504, and what a row may not see has a weight of 0: 0 · inf is NaN."""
    bad, device = 7, TRITON_DEVICE if by == "triton" else "cpu"
    at = overflowing(tiny_llama(tmp_path / "model"), bad)
    model = load_model(inspect_model(str(at)), "float16", "fast", device, False, by)
    asked = [(5, 9, 11), (20,) * 12]
    ends = replace(GREEDY, bad_token_ids=(bad,), ignore_eos=True)

    def written(depth: int, drafts: list[list[int]] | None = None) -> list[Completion]:
        made = Engine(ModelRunner(model, 4 << 20), (BlockProposer(),), 4, 2048)
        return complete(made, asked, ends, depth, drafts)

    expected = written(0)
    assert {c.error for c in expected} == {None}
    got = written(3, [[c.token_ids[0], bad, bad, bad] for c in expected])
    assert sum(c.proposed for c in got) > 0
    assert [(c.error, c.token_ids) for c in got] == [(None, c.token_ids) for c in expected]


def overflowing(folder: Path, token: int) -> Path:
    """The value of this token alone overflows: only its embedding has a part of dimension 0."""
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0], embedding[token], embedding[token, 0] = 0.0, 0.0, 1.0
    weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = 60_000.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral", "olmo2", "gpt2"])
def test_norms_of_heads_experts_and_other_forms(model_type: str, tmp_path: Path) -> None:
    """The model drafts for itself: what it proposes is right."""
    folder = tiny_model(model_type, tmp_path)
    expected = complete(make_engine(folder, native=False), prompts()[:2], SAMPLED, depth=0)
    drafting = engine(by_triton(folder), max_batch_tokens=13, drafts=True)
    got = complete(drafting, prompts()[:2], SAMPLED, depth=3)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert sum(c.accepted for c in got) == sum(c.proposed for c in got) > 0


def test_triton_is_never_taken_unasked() -> None:
    cpu = torch.device("cpu")
    assert choose_kernels("auto", cpu) == "torch"
    assert choose_kernels("auto", torch.device("cuda")) == "triton"
    assert choose_kernels("torch", torch.device("cuda")) == "torch"


def test_without_its_interpreter_triton_is_refused_on_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelError) as caught:
        choose_kernels("triton", torch.device("cpu"))
    assert str(caught.value) == (
        "Triton kernels do not run on device `cpu`: use a GPU, or the kernels of torch"
    )
