"""Holds outputs to their grammars inside vLLM's core, with the masks that engine exact takes.

vLLM's scheduler asks one object for the masks of a step, and tells each request's grammar which
tokens were decided. Both are here instead of vLLM's own, which would compile a form anew, with
other spaces, another reading of added tokens and one end token, and need a tokenizer in the core.

A row of a mask is for one token that a step decides: for each draft token of a request the row in
front of it, and one more behind the last. No vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.engines.contract import GrammarState
from specbatch.schemas.errors import EngineError

ALL = np.int32(-1)  # of set bits: every token may come


class HeldGrammar:
    """What vLLM's scheduler keeps of a request's grammar.

    What only vLLM's own masks need is missing: to go ahead and back.
    """

    def __init__(self, state: GrammarState, end_ids: Collection[int]) -> None:
        """`end_ids`: tokens that end the output. Nothing is masked behind one."""
        self._state = state
        self._end_ids = end_ids
        self._ended = False

    def accept_tokens(self, request_id: str, tokens: Seq[int]) -> bool:  # noqa: ARG002 - vLLM's call
        """The output has these tokens more; False: they do not fit, and vLLM ends the request."""
        try:
            for token in tokens:
                if self._ended or token in self._end_ids:
                    self._ended = True
                    break
                self._state.append(token)
        except EngineError:
            return False
        return True

    def validate_tokens(self, tokens: Seq[int]) -> Seq[int]:
        """The part of a draft that is to be verified: all of it. Where it does not fit, its mask
        lets another token come, as in engine exact."""
        return tokens

    def fill(self, allowed: NDArray[np.int32], draft: Seq[int]) -> None:
        """The masks of a step, int32 [1 + draft tokens, words], of which all bits are set."""
        if self._ended:
            return
        try:
            self._state.masks(allowed, draft, 0)
        except EngineError:
            allowed[:] = 0
        # A row without a token has NaN for scores, which looks like a broken model. Token 0 does
        # not fit there either, so the engine's own grammar ends the request with its reason.
        allowed[~allowed.any(axis=1), 0] = 1


class Masks:
    """What vLLM's scheduler asks for the masks of a step. Used by the core's thread alone."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: tokens that have logits."""
        self._words = -(-vocab_size // 32)
        self._begun: dict[str, HeldGrammar] = {}  # by vLLM's id, until it has made the request

    def expect(self, inner: str, grammar: HeldGrammar) -> None:
        """A request by this id of vLLM's is about to be added."""
        self._begun[inner] = grammar

    def forget(self, inner: str) -> None:
        """The request was added, or refused."""
        self._begun.pop(inner, None)

    # --- instead of vLLM's `StructuredOutputManager` ---------------------------------------------
    def grammar_init(self, request: Any) -> None:
        """Called for each request as it is added."""
        grammar = self._begun.pop(request.request_id, None)
        if grammar is not None:
            request.structured_output_request.grammar = grammar

    def grammar_bitmask(
        self,
        requests: Mapping[str, Any],
        structured_output_request_ids: Seq[str],
        scheduled_spec_decode_tokens: Mapping[str, Seq[int]],
    ) -> NDArray[np.int32] | None:
        """int32 [rows, words]: those of each request behind those of the one before."""
        drafts = [scheduled_spec_decode_tokens.get(i, ()) for i in structured_output_request_ids]
        if not drafts:
            return None
        allowed = np.full((len(drafts) + sum(map(len, drafts)), self._words), ALL)
        row = 0
        for request_id, draft in zip(structured_output_request_ids, drafts, strict=True):
            real = _without_padding(draft)
            grammar = requests[request_id].structured_output_request.grammar
            grammar.fill(allowed[row : row + 1 + len(real)], real)
            row += 1 + len(draft)
        return allowed


def _without_padding(draft: Seq[int]) -> Seq[int]:
    """vLLM writes -1 where a draft is shorter than its place."""
    return next((draft[:at] for at, token in enumerate(draft) if token < 0), draft)
