"""What vLLM's scheduler is answered when it asks for masks. No vLLM is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specbatch.pipeline.engines.vllm.masks import HeldGrammar, Masks
from specbatch.schemas.errors import EngineError
from support.thirds import Thirds

VOCABULARY, END = 70, 69


def allowed_by(mask: NDArray[np.int32]) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


EVERY = set(range(96))  # bits behind the vocabulary mean nothing


def third(number: int) -> set[int]:
    return set(range(number, VOCABULARY, 3))


class Bed:
    """A scheduler's requests, with their grammars."""

    def __init__(self, *names: str) -> None:
        self.masks = Masks(VOCABULARY)
        self.requests: dict[str, Any] = {}
        for name in names:
            self.masks.expect(name, HeldGrammar(Thirds(VOCABULARY).begin(), {END}))
            made = SimpleNamespace(request_id=name, structured_output_request=SimpleNamespace())
            self.masks.grammar_init(made)
            self.requests[name] = made

    def ask(self, **drafts: list[int]) -> list[set[int]]:
        found = self.masks.grammar_bitmask(self.requests, list(self.requests), drafts)
        assert found is not None
        assert found.shape[1] == 3
        assert found.dtype == np.int32
        return [allowed_by(row) for row in found]

    def decided(self, name: str, *tokens: int) -> bool:
        return bool(self.requests[name].structured_output_request.grammar.accept_tokens("", tokens))


def test_rows_of_requests_follow_one_another_each_with_its_draft() -> None:
    bed = Bed("a", "b", "c")
    assert bed.decided("b", 3)
    assert bed.ask(b=[1, 3]) == [third(0), third(1), third(0), third(0), third(0)]


def test_behind_a_draft_token_that_does_not_fit_nothing_is_masked() -> None:
    bed = Bed("a")
    assert bed.ask(a=[3, 2, 4]) == [third(0), third(1), EVERY, EVERY]


def test_masks_are_asked_for_without_going_ahead() -> None:
    bed = Bed("a")
    assert bed.ask(a=[3, 1]) == bed.ask(a=[3, 1])
    assert bed.decided("a", 3)
    assert bed.ask()[0] == third(1)


def test_padding_has_a_row_of_which_nothing_is_asked() -> None:
    bed = Bed("a", "b")
    assert bed.ask(a=[3, -1, -1]) == [third(0), third(1), EVERY, EVERY, third(0)]


def test_the_end_is_accepted_and_nothing_is_masked_behind_it() -> None:
    bed = Bed("a")
    assert bed.decided("a", 3, END, 5)
    assert bed.ask(a=[7]) == [EVERY, EVERY]


def test_no_request_has_no_masks() -> None:
    assert Masks(VOCABULARY).grammar_bitmask({}, [], {}) is None


def test_a_request_that_was_not_announced_keeps_what_it_has() -> None:
    made = SimpleNamespace(request_id="x", structured_output_request=None)
    Masks(VOCABULARY).grammar_init(made)
    assert made.structured_output_request is None


class Lost:
    """A grammar that gave up, by raising or by allowing nothing."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def append(self, token: int) -> None:  # noqa: ARG002 - the contract's
        raise EngineError("it is too complex")

    def masks(self, allowed: NDArray[np.int32], draft: object, first: int) -> None:  # noqa: ARG002 - the contract's
        if self._raises:
            raise EngineError("it is too complex")
        allowed[:] = 0

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize("raises", [False, True])
def test_where_nothing_may_follow_one_token_may_so_that_scores_stay_finite(raises: bool) -> None:
    held = HeldGrammar(Lost(raises), {END})
    rows = np.full((2, 3), -1, np.int32)
    held.fill(rows, [5])
    assert [allowed_by(row) for row in rows] == [{0}, {0}]
    assert not held.accept_tokens("", [0])
