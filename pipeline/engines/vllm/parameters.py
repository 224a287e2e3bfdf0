"""Which engine options and sampling parameters vLLM takes, and which only without speculation."""

from __future__ import annotations

from specbatch.pipeline.engines.contract import Request
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec

MOST_TOP_LOGPROBS = 20  # `max_logprobs` of vLLM, unless it is configured otherwise
COLDEST, HOTTEST = 0.01, 2.0  # it would take another temperature below, and refuses those above


def check_given(spec: EngineSpec) -> None:
    """Raise `UsageError` for engine options that vLLM cannot give."""
    if spec.exactness == "bitwise":
        raise UsageError(
            "engine vllm cannot give `exactness: bitwise`, as its bits depend on the batch: set "
            "`engine.exactness: fast`, or use engine exact"
        )
    if spec.verifier_weights != "as-is":
        raise UsageError(
            f"engine vllm does not quantise to `verifier_weights: {spec.verifier_weights}`: serve "
            "a model that is quantised, or use engine exact"
        )


def refused(request: Request, vocab_size: int) -> str | None:
    """Why the engine cannot run a request; None: it can."""
    params = request.params
    tokens = (*request.prompt_ids, *request.decided_ids)
    if not request.prompt_ids:
        return "prompt of 0 tokens cannot be completed"
    if not (min(tokens) >= 0 and max(tokens) < vocab_size):
        return f"prompt has a token outside the vocabulary of {vocab_size}"
    if params.stop and request.watch_text is None:
        return "stop strings need a detokenizer"
    if unmet := [name for name in ("bad_words", "bad_token_ids") if getattr(params, name)]:
        return f"engine vllm cannot give {' and '.join(unmet)}: use engine exact"
    if params.temperature and not COLDEST <= params.temperature <= HOTTEST:
        return (
            f"engine vllm samples at temperatures from {COLDEST} to {HOTTEST}, not at "
            f"{params.temperature}: use engine exact"
        )
    if params.top_logprobs > MOST_TOP_LOGPROBS:
        return f"engine vllm gives at most {MOST_TOP_LOGPROBS} top_logprobs: use engine exact"
    if request.grammar is not None and request.grammar.vocab_size != vocab_size:
        return (
            f"its grammar is for a vocabulary of {request.grammar.vocab_size}, "
            f"the model's has {vocab_size}"
        )
    if request.decided_ids and _penalises_output(params):
        return "engine vllm cannot continue an output under penalties: use engine exact"
    return None


def needs_no_speculation(params: SamplingParams) -> bool:
    """vLLM refuses these wherever speculation is configured."""
    return params.min_p > 0 or bool(params.logit_bias)


def is_plainly_greedy(request: Request) -> bool:
    """The likeliest token of the unprocessed logits is the one that is decided."""
    params = request.params
    return not (
        params.temperature
        or request.grammar is not None
        or _penalises_output(params)
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.min_tokens
    )


def _penalises_output(params: SamplingParams) -> bool:
    """Tokens that exist already would be taken for the prompt's."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0
