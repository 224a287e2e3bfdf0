"""Requests that have a form, for the tests on vLLM itself, and what their outputs are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.outputs.validation import problem_of
from specbatch.schemas.records import FinishReason, SamplingParams
from specbatch.schemas.response_format import canonical
from specbatch.schemas.tools import canonical_tools
from support import demo, schemas

VOCAB = schemas.VOCAB
MOST_TOKENS = 160
SCHEMAS, GENEROUS_TOKENS = 70, 400  # of a walk that ends where it may: most outputs are shorter
TOOLS = canonical_tools([
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }}}
    for name in ("get_weather", "get_climate")
])  # fmt: skip
LARK = 'start: greeting " " name\ngreeting: "hello" | "goodbye"\nname: /[A-Z][a-z]{2,6}/'
OTHER_FORMS = (
    {"response_format": canonical({"type": "regex", "regex": r"[0-9]{4}-[a-f]{3,8}!"})},
    {"response_format": canonical({"type": "choice", "choice": ["yes", "no", "perhaps"]})},
    {"response_format": canonical({"type": "lark", "lark": LARK})},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
)
PENALTY = 1.0  # or the model writes numbers without an end


@lru_cache(maxsize=1)
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(str(demo.VERIFIER))


@lru_cache(maxsize=1)
def prompts() -> list[tuple[int, ...]]:
    return [tuple(ids)[:40] for ids in demo.prompt_ids()]


def _requests() -> Iterator[Request]:
    """With a schema each, then one of each other form twice; one in five has no form."""
    forms: list[dict[str, object]] = []
    for case in schemas.cases(8 * SCHEMAS, seed=3):
        if len(forms) == SCHEMAS:
            break
        if case.most_tokens <= GENEROUS_TOKENS and _compiles(case):
            forms.append({"response_format": case.response_format})
    assert len(forms) == SCHEMAS
    for number, form in enumerate((*forms, *OTHER_FORMS, *OTHER_FORMS)):
        yield _request(f"form-{number}", number, form)
        if number % 4 == 0:
            yield _request(f"free-{number}", number, {})


def _compiles(case: schemas.Case) -> bool:
    try:
        tokenizer().grammar(case.response_format, VOCAB)
    except ValueError:
        return False
    return True


def _request(name: str, number: int, form: dict[str, object]) -> Request:
    limits = {"max_tokens": MOST_TOKENS, "frequency_penalty": PENALTY, "ignore_eos": True}
    params = SamplingParams(**limits, **form)  # type: ignore[arg-type]  # fields by name
    grammar = tokenizer().grammar(params.form, VOCAB) if params.form else None
    prompt = prompts()[number % len(prompts())]
    return Request(name, prompt, params, number, route=Cohort("job"), grammar=grammar)


@lru_cache(maxsize=1)
def requests() -> list[Request]:
    return list(_requests())


def problem_with(request: Request, tokens: tuple[int, ...], reason: FinishReason) -> str | None:
    """Why an output that ended does not have its form; None: it has, or it was cut."""
    if not request.params.form or reason is not FinishReason.STOP:
        return None
    return problem_of(request.params.form, tokenizer().decode(tokens), ended=True)
