"""Which sampling parameters vLLM takes, and which only without speculation."""

from __future__ import annotations

from specbatch.pipeline.engines.contract import Request
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec

MOST_TOP_LOGPROBS = 20  # `max_logprobs` of vLLM, unless it is configured otherwise


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
    unmet = [name for name in ("bad_words", "bad_token_ids") if getattr(params, name)]
    if unmet:
        return f"engine vllm cannot give {' and '.join(unmet)}: use engine exact"
    if params.top_logprobs > MOST_TOP_LOGPROBS:
        return f"engine vllm gives at most {MOST_TOP_LOGPROBS} top_logprobs: use engine exact"
    if request.decided_ids and _penalises_output(params):
        return "engine vllm cannot continue an output under penalties: use engine exact"
    return None


def needs_no_speculation(params: SamplingParams) -> bool:
    """vLLM refuses these wherever speculation is configured."""
    return params.min_p > 0 or bool(params.logit_bias)


def is_plainly_greedy(params: SamplingParams) -> bool:
    """The likeliest token of the unprocessed logits is the one that is decided."""
    return not (
        params.temperature
        or _penalises_output(params)
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.min_tokens
    )


def _penalises_output(params: SamplingParams) -> bool:
    """Tokens that exist already would be taken for the prompt's."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0
