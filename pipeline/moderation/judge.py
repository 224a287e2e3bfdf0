"""The built-in policy `judge`: the verifier itself answers a question about a completion.

The question is decided like every output: greedily, with the bits of any worker, held to the
grammar of its two answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from specbatch.schemas.policies import ALLOWED, PolicyInput, PolicySpec, Verdict
from specbatch.schemas.records import SamplingParams

YES, NO = "yes", "no"
MOST_TOKENS = 16  # of an answer; one of bytes has four
_FORM = orjson.dumps({"type": "choice", "choice": [YES, NO]}).decode()
ANSWER = SamplingParams(max_tokens=MOST_TOKENS, response_format=_FORM)
_PLACE = re.compile(r"\{(text|prompt)\}")


def question(spec: PolicySpec, given: PolicyInput, plain: Callable[[str], str]) -> str:
    """The judge's prompt with the completion in its places, made `plain`: without what the
    tokenizer would read as the end of a turn."""
    assert spec.prompt is not None, "a judge has one"
    of = {"text": plain(given.text), "prompt": plain(given.prompt)}
    return _PLACE.sub(lambda place: of[place[1]], spec.prompt)


def verdict_of(spec: PolicySpec, answer: str) -> Verdict:
    """What the verifier's answer means."""
    if answer == YES:
        return Verdict(spec.if_met, code="judged")
    return ALLOWED if answer == NO else spec.if_failed
