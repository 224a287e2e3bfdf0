"""The verifier as judge: it answers a question about a completion with yes or no.

The question is decided like every output: greedily, with the bits of any worker, held to a grammar.
As the policy `judge` it chooses one of two answers. To score a completion it has to give each of
them, and what counts is which one it found likelier.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import orjson

from specbatch.pipeline.engines.contract import Completion
from specbatch.schemas.policies import ALLOWED, PolicyInput, PolicySpec, Verdict
from specbatch.schemas.records import CompletionRecord, FinishReason, SamplingParams

if TYPE_CHECKING:
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer

YES, NO = "yes", "no"
MOST_TOKENS = 16  # of an answer; one of bytes has four
Answer = Completion | CompletionRecord
_PLACE = re.compile(r"\{(text|prompt)\}")


def _answer_of(*texts: str) -> SamplingParams:
    form = orjson.dumps({"type": "choice", "choice": list(texts)}).decode()
    return SamplingParams(max_tokens=MOST_TOKENS, response_format=form)


ANSWER = _answer_of(YES, NO)
EACH_ANSWER = (_answer_of(YES), _answer_of(NO))


def question(prompt: str, given: PolicyInput, plain: Callable[[str], str]) -> str:
    """The judge's prompt with the completion in its places, made `plain`: without what the
    tokenizer would read as the end of a turn."""
    of = {"text": plain(given.text), "prompt": plain(given.prompt)}
    return _PLACE.sub(lambda place: of[place[1]], prompt)


def question_ids(
    prompt: str, given: Iterable[PolicyInput], tokenizer: TextTokenizer, today: float
) -> list[list[int]]:
    """The question about each completion as the model reads it, through its chat template if it has
    one, which may write the date of `today` (seconds since the epoch).

    Raises `RowError` if the template takes no such question.
    """
    asked = [question(prompt, one, tokenizer.without_special) for one in given]
    with_template = tokenizer.has_chat_template
    if with_template:
        chats = [[{"role": "user", "content": text}] for text in asked]
        asked = [tokenizer.render(chat, today=today) for chat in chats]
    return tokenizer.encode_batch(asked, special=not with_template)


def verdict_of(spec: PolicySpec, answer: str) -> Verdict:
    """What the verifier's answer means."""
    if answer == YES:
        return Verdict(spec.if_met, code="judged")
    return ALLOWED if answer == NO else spec.if_failed


def score_of(yes: Answer, no: Answer, end_ids: Collection[int]) -> float | None:
    """P(yes) ÷ (P(yes) + P(no)), from 0 to 1; None if there is none.

    P of an answer is the product of its tokens' probabilities, without the token that ends it.
    These are the model's own, before the grammar's mask, so they do not add up to 1: what else it
    might have said counts for neither answer.
    """
    if any(answer.finish_reason is not FinishReason.STOP for answer in (yes, no)):
        return None  # it failed, or had no room for the answer
    odds = _logprob(yes, end_ids) - _logprob(no, end_ids)
    if math.isnan(odds):  # it gives neither answer
        return None
    small = math.exp(-abs(odds))  # never too large for a float
    return (1.0 if odds >= 0 else small) / (1.0 + small)


def _logprob(answer: Answer, end_ids: Collection[int]) -> float:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return math.fsum(logprob for token, logprob in pairs if token not in end_ids)
