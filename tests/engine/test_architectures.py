"""Every supported architecture writes what `generate` writes, and keeps its bits in any company."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.pipeline.engines.contract import Completion
from specbatch.pipeline.engines.exact.model.batch_invariant.torch_modules import (
    make_batch_invariant,
)
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models.model_folder import SUPPORTED_MODEL_TYPES, inspect_model
from specbatch.schemas.errors import ModelError
from specbatch.schemas.records import SamplingParams
from support.architectures import CONFIGS, VOCAB, WINDOW, tiny_model
from support.engines import complete, decided, engine_of, make_engine

pytestmark = pytest.mark.pipeline  # runs models

TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS)
SAMPLED = SamplingParams(max_tokens=TOKENS, temperature=0.8)
LENGTHS = (1, 5, WINDOW, 23, 60)


def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(0)
    return [tuple(generator.randrange(1, VOCAB - 1) for _ in range(n)) for n in LENGTHS]


@pytest.fixture(scope="module", params=SUPPORTED_MODEL_TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@lru_cache(maxsize=2)
def generated(folder: Path) -> list[tuple[int, ...]]:
    """What transformers writes, one prompt at a time, with its own attention and experts."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    written = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        written.append(tuple(out[0, len(prompt) :].tolist()))
    return written


@lru_cache(maxsize=4)
def alone(folder: Path, dtype: str) -> list[Completion]:
    """One sequence at a time, one token at a time."""
    engine = make_engine(folder, dtype=dtype, native=False, max_sequences=1)
    return complete(engine, prompts(), SAMPLED, depth=0)


def test_every_supported_architecture_is_tested() -> None:
    assert sorted(CONFIGS) == sorted(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("exactness", ["bitwise", "fast"])
def test_greedy_outputs_are_those_of_generate(folder: Path, exactness: str) -> None:
    model = load_model(inspect_model(str(folder)), "float32", exactness, native=False)
    written = generated(folder)
    assert len(set().union(*written)) > TOKENS, "the model says too little to tell"
    got = complete(engine_of(model), prompts(), GREEDY, depth=0)
    assert [c.token_ids for c in got] == written


# The last way has in it all that the others have one by one.
@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"], ids=str
)
@pytest.mark.parametrize(
    ("depth", "spoilt", "concurrent", "budget"),
    [
        pytest.param(0, False, 5, 2048, id="together", marks=pytest.mark.long),
        pytest.param(4, False, 1, 2048, id="right-drafts-alone", marks=pytest.mark.long),
        pytest.param(4, True, 5, 2048, id="spoilt-drafts-together", marks=pytest.mark.long),
        pytest.param(4, True, 5, 13, id="spoilt-drafts-in-short-passes"),
    ],
)
def test_bits_do_not_depend_on_drafts_company_or_passes(
    folder: Path, dtype: str, depth: int, spoilt: bool, concurrent: int, budget: int
) -> None:
    expected = alone(folder, dtype)
    drafts = [
        [7 if spoilt and at % 5 == 3 else token for at, token in enumerate(c.token_ids)]
        for c in expected
    ]
    engine = make_engine(
        folder, dtype=dtype, native=False, max_sequences=concurrent, max_batch_tokens=budget
    )
    got = complete(engine, prompts(), SAMPLED, depth, drafts)
    assert decided(got) == decided(expected)
    proposed, accepted = (sum(getattr(c, name) for c in got) for name in ("proposed", "accepted"))
    assert (accepted > 0) == (depth > 0)
    assert (accepted < proposed) == spoilt


@pytest.mark.parametrize(
    ("inner", "name"),
    [(torch.nn.Bilinear(8, 8, 8), "Bilinear"), (torch.nn.Hardswish(), "Hardswish")],
    ids=["product", "activation"],
)
def test_a_part_that_cannot_be_made_bitwise_is_refused(inner: torch.nn.Module, name: str) -> None:
    odd = torch.nn.Sequential(torch.nn.Linear(8, 8), inner)
    with pytest.raises(ModelError) as caught:
        make_batch_invariant(odd, "odd")
    assert str(caught.value) == (
        f"model `odd` computes `1` ({name}) in a way whose bits may depend on the batch: "
        "use `exactness: fast`"
    )
