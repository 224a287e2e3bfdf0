"""A completion replayed: clean where it was written so, else each token with its place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine.decoding import prompts

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.exact.replayer import NEAR_TIE, Replayer, wrong_end
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.records import FinishReason, SamplingParams, Verification
from specbatch.schemas.spec import EngineSpec
from support.engines import make_engine
from support.models import TinyPair

PARAMS = SamplingParams(
    max_tokens=40, temperature=0.9, top_p=0.9, min_tokens=5, repetition_penalty=1.3,
    logit_bias=((7, 2.0),), bad_words=((3, 4), (9,)),
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def replayer(tiny_pair: TinyPair) -> Replayer:
    spec = EngineSpec.model_validate({"dtype": "float32"})
    return Replayer(inspect_model(str(tiny_pair.verifier)), spec, DeviceOptions(), 4 << 20)


@pytest.fixture(scope="module", params=[PARAMS, GREEDY], ids=["shaped", "greedy"])
def written(
    request: pytest.FixtureRequest, tiny_pair: TinyPair
) -> list[tuple[Request, Completion]]:
    """What a drafting engine wrote in one batch."""
    engine = make_engine(tiny_pair.verifier, tiny_pair.draft)
    asked = [
        Request(str(i), tuple(prompt), request.param, seed=i, depth=3)
        for i, prompt in enumerate(prompts(5, longest=300))
    ]
    for one in asked:
        engine.add(one)
    done: dict[str, Completion] = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    return [(one, done[one.request_id]) for one in asked]


def test_what_the_verifier_wrote_in_any_batch_is_its_own_choice(
    replayer: Replayer, written: list[tuple[Request, Completion]]
) -> None:
    for request, done in written:
        found = replayer.replay(request, done.token_ids, done.finish_reason)
        assert found is not None
        assert (list(found.differences), found.ending) == ([], None)


def test_written_again_from_nothing_it_has_the_same_bits(
    replayer: Replayer, written: list[tuple[Request, Completion]]
) -> None:
    for request, done in written:
        again = replayer.again(request)
        assert (again.token_ids, again.logprobs) == (done.token_ids, done.logprobs)
        assert again.finish_reason == done.finish_reason


def test_a_wrong_token_is_found_at_its_place(
    replayer: Replayer, written: list[tuple[Request, Completion]]
) -> None:
    request, done = written[2]
    for place in (0, 3, len(done.token_ids) - 1):
        tokens = list(done.token_ids)
        tokens[place] = 9 if tokens[place] != 9 else 11
        found = replayer.replay(request, tokens, done.finish_reason)
        assert found is not None
        first = found.differences[0]
        assert (first.position, first.written) == (place, tokens[place])
        assert first.decided == done.token_ids[place]
        assert not replayer.near_tie(first.margin)
        if request.params is PARAMS:
            assert first.margin == math.inf  # 9 is a bad word: no number of logits is enough


def test_what_a_ratio_test_decided_cannot_be_told(replayer: Replayer) -> None:
    sampled = Request("r", (1, 2), PARAMS, seed=0, verification=Verification.REJECTION)
    assert replayer.replay(sampled, (5, 6), FinishReason.STOP) is None
    greedy = replace(sampled, params=SamplingParams(max_tokens=2))
    assert replayer.replay(greedy, (5, 6), FinishReason.LENGTH) is not None


def test_what_does_not_fit_cannot_be_told(tiny_pair: TinyPair) -> None:
    spec = EngineSpec.model_validate({"dtype": "float32"})
    small = Replayer(inspect_model(str(tiny_pair.verifier)), spec, DeviceOptions(), 1)
    request = Request("r", tuple(range(1, 60)), GREEDY, seed=0)
    assert small.replay(request, (5,) * 60, FinishReason.LENGTH) is None


def test_a_token_that_no_model_has_is_told(replayer: Replayer) -> None:
    found = replayer.replay(Request("r", (1,), GREEDY, seed=0), (5, 9999), FinishReason.LENGTH)
    assert found is not None
    assert found.ending == "has token 9999, which is not in the model's vocabulary"


def test_finer_arithmetic_has_nearer_ties() -> None:
    assert NEAR_TIE["float32"] < NEAR_TIE["float16"] < NEAR_TIE["bfloat16"]


STOPS = frozenset({2})


@pytest.mark.parametrize(
    ("tokens", "reason", "wrong"),
    [
        ((5, 6, 2), FinishReason.STOP, None),
        ((5, 6, 7, 8), FinishReason.LENGTH, None),
        ((5, 6, 7, 2), FinishReason.LENGTH, "ended by a stop, not by length"),
        ((5, 2, 6), FinishReason.STOP, "continues after token 1, which ends it"),
        ((5, 6), FinishReason.STOP, "claims to have stopped, but its last token is no stop"),
        ((5, 6, 7), FinishReason.LENGTH, "ends by length after 3 tokens, though 4 were possible"),
        ((5, 6, 7, 8, 9), FinishReason.LENGTH, "has 5 tokens, more than the 4 asked for"),
    ],
)
def test_a_wrong_end_is_told(
    tokens: tuple[int, ...], reason: FinishReason, wrong: str | None
) -> None:
    request = Request("r", (1, 1), SamplingParams(max_tokens=4), seed=0)
    told = wrong_end(request, tokens, reason, STOPS, limit=6)
    assert told is wrong is None or (told is not None and told.startswith(str(wrong)))


def test_the_end_of_a_stop_string_ends_a_text() -> None:
    request = Request(
        "r", (1,), SamplingParams(max_tokens=9), seed=0, watch_text=lambda: lambda token: token == 7
    )
    assert wrong_end(request, (5, 7), FinishReason.STOP, STOPS, limit=10) is None
    told = wrong_end(request, (7, 5), FinishReason.STOP, STOPS, limit=10)
    assert told == "continues after token 0, which ends it"
