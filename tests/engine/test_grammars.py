"""Outputs with a form: they have it, and nothing else about them depends on who drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from engine.bitwise import assert_same_bits, run
from engine.decoding import bench
from jsonschema import Draft202012Validator

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.proposers.grammar import GrammarProposer
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.state.sequence import Sequence as EngineSequence
from specbatch.pipeline.inputs.grammars import Grammars
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import EngineError
from specbatch.schemas.records import FinishReason, SamplingParams
from specbatch.schemas.response_format import canonical
from support import demo

pytestmark = pytest.mark.pipeline  # runs models

VOCAB, END = 2048, 0
CALLS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "arguments": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "maxLength": 12},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "details": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                },
                "required": required,
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for name in ("get_weather_forecast", "list_events")
    for required in (["location", "unit"], ["location", "unit", "days", "details"])
]


@lru_cache(maxsize=1)
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(str(demo.VERIFIER))


@lru_cache(maxsize=1)
def asked() -> list[Request]:
    """Two in three have a form; greedy and sampled, with and without log-probabilities."""
    requests = []
    for i, ids in enumerate(demo.prompt_ids()[:30]):
        schema = CALLS[i % len(CALLS)]
        form = canonical({"type": "json_schema", "schema": schema}) if i % 3 else ""
        params = SamplingParams(
            max_tokens=90,
            temperature=(0.0, 0.9)[i % 2],
            top_p=(1.0, 0.95)[i // 2 % 2],
            repetition_penalty=(1.0, 1.2)[i // 4 % 2],
            response_format=form,
        )
        grammar = tokenizer().grammar(form, VOCAB) if form else None
        requests.append(Request(str(i), tuple(ids)[:60], params, seed=i, grammar=grammar))
    return requests


@lru_cache(maxsize=1)
def truth() -> Mapping[str, Completion]:
    one = bench(demo.VERIFIER, max_sequences=1, share_prefixes=False)
    return run(one, [replace(request, depth=0) for request in asked()])[0]


def test_each_output_has_its_form_and_ends_there() -> None:
    for i, request in enumerate(asked()):
        done = truth()[request.request_id]
        if request.grammar is None:
            continue
        assert (done.finish_reason, done.error) == (FinishReason.STOP, None)
        assert done.token_ids[-1] == END
        found = json.loads(tokenizer().decode(done.token_ids))
        Draft202012Validator(CALLS[i % len(CALLS)]).validate(found)


RARELY = {(0, 1), (2, 64), (8, 7), (None, 7)}  # each depth and each company has other cases
CASES = [
    *(
        pytest.param(depth, among, True, marks=pytest.mark.long if (depth, among) in RARELY else ())
        for depth in (0, 2, 8, None)
        for among in (1, 7, 64)
    ),
    (8, 7, False),
    (None, 64, False),
]


@pytest.mark.parametrize(("depth", "concurrent", "forced"), CASES, ids=str)
def test_no_bit_depends_on_depth_company_or_who_drafts(
    depth: int | None, concurrent: int, forced: bool
) -> None:
    one = bench(
        demo.VERIFIER,
        demo.DRAFT,
        others=[GrammarProposer(), NgramProposer()] if forced else [NgramProposer()],
        max_sequences=concurrent,
        num_blocks={1: 16, 7: 40, 64: 256}[concurrent],
    )
    got, _ = run(one, [replace(r, depth=depth) for r in asked()], squeeze=concurrent > 1)
    assert_same_bits(got, dict(truth()))
    one.assert_all_blocks_are_free()
    by_grammar = sum("grammar" in done.provenance.sources for done in got.values())
    if depth is not None:  # else it is as the policy finds that it pays
        assert (by_grammar > 0) == (forced and depth > 0)


def test_what_a_draft_model_drafts_has_the_form_as_well() -> None:
    """So the verifier's token is the reason for every refusal, and never the form."""
    formed = [replace(request, depth=4) for request in asked() if request.grammar is not None]
    one = bench(demo.VERIFIER, demo.DRAFT)
    for request in formed:
        one.add(request)
    proposer = one.engine._speculator.proposers[-1]
    seen = 0
    propose = proposer.propose

    def checked(sequences: Any, depths: Sequence[int]) -> list[list[int]]:
        nonlocal seen
        drafts = propose(sequences, depths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            grammar = sequence.request.grammar
            state = grammar.begin()
            to_the_end = draft[: draft.index(END) + 1] if END in draft else draft
            for token in (*sequence.output, *to_the_end):
                state.append(token)  # raises where it does not fit
            seen += len(to_the_end)
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]  # watched, and otherwise the same
    one.run()
    assert seen > 100


def test_forced_tokens_are_all_accepted_and_named_in_the_ledger() -> None:
    one = bench(demo.VERIFIER, others=[GrammarProposer()])
    formed = [replace(request, depth=8) for request in asked() if request.grammar is not None]
    done = one.add(*formed).run()
    stats = one.engine.stats
    assert stats.accepted == stats.proposed > len(formed) * 20
    assert all(completion.provenance.sources == ("grammar",) for completion in done.values())


def test_a_request_of_another_vocabulary_is_refused_alone() -> None:
    other = replace(asked()[1], grammar=tokenizer().grammar('{"type":"json_object"}', VOCAB + 64))
    done = bench(demo.VERIFIER).add(other, asked()[0]).run()
    assert done["1"].error == "its grammar is for a vocabulary of 2112, the model's has 2048"
    assert done["0"].error is None


def test_a_form_of_which_nothing_is_left_ends_one_request_with_the_reason() -> None:
    form = canonical({"type": "choice", "choice": ["yes"]})
    params = SamplingParams(max_tokens=9, bad_token_ids=tuple(range(1, VOCAB)))
    grammar = tokenizer().grammar(form, VOCAB)
    doomed = Request("doomed", asked()[0].prompt_ids, params, seed=0, grammar=grammar)
    done = bench(demo.VERIFIER).add(doomed, asked()[0]).run()
    assert done["doomed"].error == "nothing that its response format allows is left at token 0"
    assert done["0"].error is None


def test_the_ends_of_a_form_end_the_output_whichever_the_model_has() -> None:
    text = (demo.VERIFIER / "tokenizer.json").read_text()
    grammar = Grammars(text, VOCAB, [300]).of(canonical({"type": "choice", "choice": ["yes"]}))
    params = SamplingParams(max_tokens=9)
    request = Request("0", asked()[0].prompt_ids, params, seed=0, grammar=grammar)
    done = bench(demo.VERIFIER).add(request).run()["0"]
    assert (done.token_ids[-1], done.finish_reason) == (300, FinishReason.STOP)
    assert tokenizer().decode(done.token_ids[:-1]) == "yes"


class _Refusing:
    """A grammar that allows a number of tokens, and then refuses one that its mask allowed."""

    end_ids = ()

    def __init__(self, allowed: int) -> None:
        self.left = allowed

    def begin(self) -> _Refusing:
        return _Refusing(self.left)

    def append(self, token: int) -> None:
        if not self.left:
            raise EngineError(f"token {token} is refused")
        self.left -= 1


@pytest.mark.parametrize("draft", [[], [5, 6]])
def test_a_pass_whose_first_token_is_refused_is_none(draft: list[int]) -> None:
    """Else there would be a step that decided no token, and `export` of tokens would fail."""
    params = SamplingParams(max_tokens=9)
    grammar: Any = _Refusing(allowed=1)
    row = EngineSequence(Request("r", (1,), params, seed=0, grammar=grammar), frozenset(), 10)
    row.accept([], [4], [0.0])
    with pytest.raises(EngineError):
        row.accept(draft, [*draft, 7], [0.0] * (len(draft) + 1), proposer="ngram")
    assert (row.output, row.passes, row.drafted, row.proposed) == ([4], 1, [], 0)
