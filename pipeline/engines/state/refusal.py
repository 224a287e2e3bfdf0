"""Why a request cannot run here, found before it takes part in a step."""

from __future__ import annotations

import logging
from dataclasses import replace

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.state.recovery import with_type
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams

log = logging.getLogger(__name__)


def sequence_of(request: Request, stop_ids: frozenset[int], max_length: int) -> Sequence:
    """The sequence of a request. Where its grammar or its check for stop strings does not take what
    was decided before, it has the error, and the others in the engine continue."""
    try:
        return Sequence(request, stop_ids, max_length)
    except Exception as error:
        log.warning("request %s cannot begin", request.request_id, exc_info=error)
        bare = replace(request, grammar=None, watch_text=None)
        sequence = Sequence(bare, stop_ids, max_length)
        sequence.request = request
        sequence.error = f"its output cannot be continued: {with_type(error)}"
        return sequence


def refusal(
    sequence: Sequence, limit: int, vocab_size: int, shortage: str | None = None
) -> str | None:
    """Why a sequence cannot run in a context of `limit` tokens; None: it can.

    `shortage`: why the KV cache has no room for the model's own context, which is longer.
    """
    request = sequence.request
    if shortage is not None and len(request.prompt_ids) >= limit:
        return (
            f"prompt of {len(request.prompt_ids)} tokens does not fit this worker's KV cache of "
            f"{limit}: {shortage}"
        )
    if len(request.prompt_ids) >= limit or not request.prompt_ids:
        return f"prompt of {len(request.prompt_ids)} tokens does not fit the context of {limit}"
    if sequence.remaining <= 0:
        return f"{len(request.decided_ids)} tokens of output leave no room for more"
    if not all_within(request.prompt_ids + request.decided_ids, vocab_size):
        return f"prompt has a token outside the vocabulary of {vocab_size}"
    if request.params.stop and request.watch_text is None:
        return "stop strings need a detokenizer"
    if request.grammar is not None and request.grammar.vocab_size != vocab_size:
        return (
            f"its grammar is for a vocabulary of {request.grammar.vocab_size}, "
            f"the model's has {vocab_size}"
        )
    return _sampling_problem(request.params, sequence.stop_ids, vocab_size) or sequence.error


def all_within(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def _sampling_problem(
    params: SamplingParams, stop_ids: frozenset[int], vocab_size: int
) -> str | None:
    """Why these sampling parameters do not fit the vocabulary; None: they do."""
    ends = {word[-1] for word in params.bad_words}
    named = {token for token, _ in params.logit_bias} | {*params.bad_token_ids, *ends}
    named |= {token for word in params.bad_words for token in word}
    if named and not (min(named) >= 0 and max(named) < vocab_size):
        return f"sampling names a token outside the vocabulary of {vocab_size}"
    if len({*params.bad_token_ids, *ends, *(stop_ids if params.min_tokens else ())}) >= vocab_size:
        return "sampling forbids every token of the vocabulary"
    return None
