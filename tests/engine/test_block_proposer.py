"""A pre-generated block is followed while it fits, and found again when it does not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from specbatch.pipeline.engine.block_proposer import BlockProposer
from specbatch.pipeline.engine.sequence import Request, Sequence
from specbatch.schemas.records import SamplingParams

DEPTH = 4


def sequence_with(block: Iterable[int]) -> Sequence:
    request = Request(
        "r", (1, 2, 3), SamplingParams(max_tokens=500), seed=1, draft_ids=tuple(block)
    )
    return Sequence(request, frozenset(), max_length=500)


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens of a small vocabulary, so that contexts repeat here and there."""
    generator = random.Random(seed)
    return [generator.randrange(30) for _ in range(length)]


def decode(block: list[int], truth: list[int], depth: int = DEPTH) -> tuple[int, int]:
    """(accepted, proposed) when the verifier writes `truth` with drafts from `block`."""
    proposer, sequence = BlockProposer(), sequence_with(block)
    accepted = proposed = 0
    while sequence.num_output < len(truth):
        at = sequence.num_output
        cap = min(depth, len(truth) - at - 1, proposer.available(sequence))
        draft = proposer.propose([sequence], [cap])[0] if cap > 0 else []
        assert len(draft) <= max(cap, 0)
        agreed = 0
        while agreed < len(draft) and draft[agreed] == truth[at + agreed]:
            agreed += 1
        sequence.accept(draft, truth[at : at + agreed + 1], [0.0] * (agreed + 1))
        proposer.settle(sequence)
        accepted, proposed = accepted + agreed, proposed + len(draft)
    return accepted, proposed


def next_draft(block: list[int], output: list[int], steps: Iterable[int] = (1,)) -> list[int]:
    """The draft after `output` was decided, some tokens at a time."""
    proposer, sequence = BlockProposer(), sequence_with(block)
    sizes = list(steps)
    while sequence.num_output < len(output):
        proposer.available(sequence)
        size = sizes[sequence.num_output % len(sizes)]
        new = output[sequence.num_output : sequence.num_output + size]
        sequence.accept([0] * (len(new) - 1), new, [0.0] * len(new))
    if not proposer.available(sequence):
        return []
    return proposer.propose([sequence], [DEPTH])[0]


def test_a_right_block_is_followed_to_its_end() -> None:
    truth = text(101)
    accepted, proposed = decode(truth, truth)
    assert accepted == proposed == 80  # 4 of every 5; the fifth is the bonus


def test_without_a_block_nothing_is_offered() -> None:
    proposer, sequence = BlockProposer(), sequence_with([])
    assert proposer.available(sequence) == 0
    assert proposer.pass_time is None


def test_an_exhausted_block_offers_what_is_left_and_then_nothing() -> None:
    proposer, sequence = BlockProposer(), sequence_with([5, 6, 7])
    assert proposer.available(sequence) == 3
    assert proposer.propose([sequence], [8]) == [[5, 6, 7]]
    sequence.accept([5, 6], [5, 6, 7], [0.0] * 3)
    assert proposer.available(sequence) == 0
    sequence.accept([], [8], [0.0])
    assert proposer.available(sequence) == 0


@pytest.mark.parametrize("steps", [(1,), (3,), (1, 2, 5)], ids=str)
def test_a_substitution_is_stepped_over_at_once(steps: tuple[int, ...]) -> None:
    block = list(range(50))
    output = [*range(10), 99]
    assert next_draft(block, output, steps) == [11, 12, 13, 14]


@pytest.mark.parametrize("steps", [(1,), (3,), (1, 2, 5)], ids=str)
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param([*range(10), 99, 98, *range(10, 14)], [14, 15, 16, 17], id="two inserted"),
        pytest.param([*range(10), 99, *range(10, 14)], [14, 15, 16, 17], id="one inserted"),
        pytest.param([*range(10), *range(11, 15)], [15, 16, 17, 18], id="one deleted"),
        pytest.param([*range(10), *range(20, 24)], [24, 25, 26, 27], id="ten deleted"),
        pytest.param([99, 98, 97, 96, *range(4)], [4, 5, 6, 7], id="new beginning"),
    ],
)
def test_insertions_and_deletions_are_found_again(
    output: list[int], expected: list[int], steps: tuple[int, ...]
) -> None:
    assert next_draft(list(range(50)), output, steps) == expected


def test_of_several_places_the_nearest_is_taken() -> None:
    refrain = [90, 91, 92]
    block = [*refrain, *range(1, 9), *refrain, 20, 21, 22, 23, *range(30, 60), *refrain, 70]
    output = [*refrain, 1, 2, 3, 4, 80, 81, 82, *refrain]
    assert next_draft(block, output) == [20, 21, 22, 23]


@pytest.mark.parametrize("depth", [1, 4, 8])
@pytest.mark.parametrize("edit", ["replaced", "inserted", "deleted"])
def test_an_edit_every_20_tokens_wastes_little(edit: str, depth: int) -> None:
    """Of the drafts that an unspoilt block would have had accepted, at least 80 % still are."""
    truth = text(400)
    block = list(truth)
    for at in range(380, 0, -20):
        if edit == "replaced":
            block[at] = 77
        elif edit == "inserted":
            block.insert(at, 77)
        else:
            del block[at]
    accepted, proposed = decode(block, truth, depth)
    assert accepted >= 0.8 * decode(truth, truth, depth)[0]
    assert accepted >= 0.6 * proposed


def test_a_useless_block_offers_little() -> None:
    truth, block = text(300, seed=1), [token + 100 for token in text(300)]
    accepted, proposed = decode(block, truth)
    assert accepted == 0
    assert proposed <= 2 * DEPTH


def test_each_sequence_has_its_own_place_and_may_start_anew() -> None:
    proposer = BlockProposer()
    one, two = sequence_with(range(20)), sequence_with(range(100, 120))
    one.accept([0, 1], [0, 1, 2], [0.0] * 3)
    assert proposer.propose([one, two], [3, 2]) == [[3, 4, 5], [100, 101]]
    proposer.forget(one)  # preempted: its output stays, and is followed again
    assert proposer.propose([one], [3]) == [[3, 4, 5]]
    proposer.forget(sequence_with([]))  # never seen: nothing to do
