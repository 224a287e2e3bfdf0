"""The demo pair's outputs: the verifier's own, however they are made."""

from __future__ import annotations

from pathlib import Path
from statistics import mode

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbatch.schemas.records import SamplingParams
from support import demo
from support.engines import complete, decided, make_engine
from support.models import tiny_llama

EOS = 0  # of the demo's tokenizer
GREEDY = SamplingParams(max_tokens=48)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def transformers_own() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo.VERIFIER, dtype=torch.float32).eval()


def greedy(native: bool) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """All demo prompts, and what we write after each."""
    prompts = demo.prompt_ids()
    assert len(prompts) == 256
    engine = make_engine(demo.VERIFIER, demo.DRAFT, native=native)
    return prompts, [c.token_ids for c in complete(engine, prompts, GREEDY, depth=4)]


def test_greedy_outputs_are_the_likeliest_tokens_in_float32_on_every_demo_prompt(
    transformers_own: torch.nn.Module,
) -> None:
    """Each token after those before it, by transformers: what `generate` writes. It writes the
    outputs of one length of prompts here, and all of them in the tier `long`."""
    prompts, ours = greedy(native=True)
    for start in range(0, len(prompts), 64):
        some = slice(start, start + 64)
        assert _likeliest(transformers_own, prompts[some], ours[some]) == ours[some]
    for output in ours:
        assert EOS not in output[:-1]
        assert output[-1] == EOS or len(output) == GREEDY.max_tokens
    usual = mode(map(len, prompts))
    alike = [i for i, prompt in enumerate(prompts) if len(prompt) == usual]
    generated = _generate(transformers_own, [prompts[i] for i in alike])
    assert [ours[i] for i in alike] == generated


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_greedy_outputs_equal_generate_in_float32_on_every_demo_prompt(
    transformers_own: torch.nn.Module, native: bool
) -> None:
    """Prompts of one length go together: nothing is padded."""
    prompts, ours = greedy(native)
    for length in {len(prompt) for prompt in prompts}:
        alike = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        generated = _generate(transformers_own, [prompts[i] for i in alike])
        assert [ours[i] for i in alike] == generated


# What tests/engine/test_bitwise_suite.py has in every combination, on a small model.
WAYS = (("none", 0), ("demo", 1), ("demo", 8))


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft model with the demo's vocabulary: nearly always wrong."""
    return tiny_llama(tmp_path_factory.mktemp("random"), vocab_size=2048, layers=1)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(request: pytest.FixtureRequest) -> tuple[str, list[object]]:
    """One sequence at a time, nothing drafted."""
    engine = make_engine(demo.VERIFIER, dtype=request.param, max_sequences=1)
    return request.param, list(decided(complete(engine, demo.prompt_ids()[:64], SAMPLED, depth=0)))


@pytest.mark.parametrize(
    "concurrent", [pytest.param(1, marks=pytest.mark.long), 64], ids=["alone", "64-at-once"]
)
@pytest.mark.parametrize(
    ("proposer", "depth"),
    [
        ("demo", 4),
        ("demo", None),
        ("random", 4),
        *(pytest.param(*way, marks=pytest.mark.long) for way in WAYS),
    ],
)
def test_sampled_outputs_do_not_depend_on_depth_batch_or_proposer(
    reference: tuple[str, list[object]],
    random_draft: Path,
    proposer: str,
    depth: int | None,
    concurrent: int,
) -> None:
    dtype, expected = reference
    count = 64 if concurrent > 1 else 12
    draft = {"none": None, "demo": demo.DRAFT, "random": random_draft}[proposer]
    engine = make_engine(demo.VERIFIER, draft, dtype=dtype, max_sequences=concurrent)
    done = complete(engine, demo.prompt_ids()[:count], SAMPLED, depth=depth)
    assert decided(done) == expected[:count]
    if proposer == "demo" and depth:
        assert sum(c.accepted for c in done) > 0, "the drafts must have been used"


@torch.inference_mode()
def _likeliest(
    model: torch.nn.Module, prompts: list[list[int]], outputs: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The likeliest token at each place of the outputs, after the prompt and the output so far."""
    rows = [torch.tensor([*p, *o]) for p, o in zip(prompts, outputs, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind what is looked at
    best = model(padded, use_cache=False).logits.argmax(-1).tolist()
    return [
        tuple(places[len(prompt) - 1 :][: len(output)])
        for places, prompt, output in zip(best, prompts, outputs, strict=True)
    ]


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    out = model.generate(  # type: ignore[operator] # transformers adds it to the class
        torch.tensor(prompts), max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=EOS
    )
    return [_to_its_end(row) for row in out[:, len(prompts[0]) :].tolist()]


def _to_its_end(row: list[int]) -> tuple[int, ...]:
    """A row that ended before the others of its batch is filled up behind its end."""
    return tuple(row[: row.index(EOS) + 1] if EOS in row else row)
