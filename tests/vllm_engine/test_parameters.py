"""Each refusal names the thing, and what to do instead where there is something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.vllm.parameters import MOST_TOP_LOGPROBS, refused
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.tools import canonical_tools
from support.thirds import Thirds

VOCABULARY = 100
PLAIN = SamplingParams()
TOOLS = canonical_tools([{"type": "function", "function": {"name": "now"}}])
FITTING = Request("r", (5, 6), PLAIN, 0)


def of(**changes: object) -> Request:
    return replace(FITTING, params=replace(PLAIN, **changes))  # type: ignore[arg-type]  # fields by name


def watching() -> object:
    return lambda _: False


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (replace(FITTING, prompt_ids=()), ["prompt of 0 tokens"]),
        (replace(FITTING, prompt_ids=(5, 100)), ["outside the vocabulary of 100"]),
        (replace(FITTING, prompt_ids=(-1,)), ["outside the vocabulary of 100"]),
        (replace(FITTING, decided_ids=(100,)), ["outside the vocabulary of 100"]),
        (of(stop=("x",)), ["stop strings need a detokenizer"]),
        (of(bad_words=((5,),)), ["bad_words", "use engine exact"]),
        (of(bad_token_ids=(5,)), ["bad_token_ids", "use engine exact"]),
        (
            of(bad_words=((5,),), bad_token_ids=(6,)),
            ["bad_words and bad_token_ids", "use engine exact"],
        ),
        (
            replace(FITTING, grammar=Thirds(VOCABULARY + 64)),
            ["grammar is for a vocabulary of 164, the model's has 100"],
        ),
        (of(top_logprobs=21), ["at most 20 top_logprobs", "use engine exact"]),
        (
            replace(of(presence_penalty=0.1), decided_ids=(5,)),
            ["under penalties", "use engine exact"],
        ),
        (
            replace(of(frequency_penalty=-0.1), decided_ids=(5,)),
            ["under penalties", "use engine exact"],
        ),
    ],
)
def test_what_is_refused_is_named(request_: Request, said: list[str]) -> None:
    found = refused(request_, VOCABULARY)
    assert found is not None
    for words in said:
        assert words in found


@pytest.mark.parametrize(
    "request_",
    [
        FITTING,
        replace(FITTING, prompt_ids=(0, 99)),
        replace(FITTING, decided_ids=(5,)),
        replace(of(stop=("x",)), watch_text=watching),
        of(top_logprobs=MOST_TOP_LOGPROBS),
        of(presence_penalty=0.1, frequency_penalty=0.1),
        replace(of(repetition_penalty=1.2), decided_ids=(5,)),
        of(min_p=0.1, logit_bias=((5, 1.0),)),
        of(tools=TOOLS, tool_choice="none"),
        replace(of(tools=TOOLS), grammar=Thirds(VOCABULARY)),
        replace(of(response_format='{"type":"json_object"}'), grammar=Thirds(VOCABULARY)),
    ],
)
def test_what_can_run_is_not_refused(request_: Request) -> None:
    assert refused(request_, VOCABULARY) is None
