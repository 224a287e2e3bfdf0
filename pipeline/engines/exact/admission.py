"""Which requests an engine can run at all, and what it says of the others."""

from __future__ import annotations

from specbatch.pipeline.engines.exact.state.adjusting import problem_of
from specbatch.pipeline.engines.exact.state.sequence import Sequence


def refusal(
    sequence: Sequence, limit: int, vocab_size: int, shortage: str | None = None
) -> str | None:
    """Why a sequence cannot be run in a context of `limit` tokens; None: it can.

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
        return "stop strings need something that makes text of tokens"
    return problem_of(request.params, sequence.stop_ids, vocab_size)


def all_within(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
