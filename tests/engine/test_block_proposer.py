"""A pre-generated block is followed while it fits, and found again when it does not."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams
from support.grids import pairwise

DEPTH = 4


def sequence_with(block: Iterable[int], length: int = 500) -> Sequence:
    params = SamplingParams(max_tokens=length)
    request = Request("r", (1, 2, 3), params, seed=1, draft_ids=tuple(block))
    return Sequence(request, frozenset(), max_length=3 + length)


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens of a small vocabulary, so that contexts repeat here and there."""
    generator = random.Random(seed)
    return [generator.randrange(30) for _ in range(length)]


@dataclass
class Run:
    """Draft tokens of one output."""

    proposed: int = 0
    accepted: int = 0
    bonus: set[int] = field(default_factory=set)  # places behind drafts that were accepted whole


def simulate(block: list[int], truth: list[int], depth: int = DEPTH) -> Run:
    """A verifier that writes `truth`, with drafts from `block`."""
    proposer, sequence, run = BlockProposer(), sequence_with(block, len(truth)), Run()
    while sequence.num_output < len(truth):
        at = sequence.num_output
        cap = min(depth, len(truth) - at - 1, proposer.available(sequence))
        draft = proposer.propose([sequence], [cap])[0] if cap > 0 else []
        assert len(draft) <= max(cap, 0)
        agreed = 0
        while agreed < len(draft) and draft[agreed] == truth[at + agreed]:
            agreed += 1
        sequence.accept(draft, truth[at : at + agreed + 1], [0.0] * (agreed + 1))
        proposer.on_verified(sequence)
        run.accepted += agreed
        run.proposed += len(draft)
        if draft and agreed == len(draft):
            run.bonus.add(at + agreed)
    return run


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
    run = simulate(truth, truth)
    assert run.accepted == run.proposed == 80  # 4 of every 5; the fifth is the bonus


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


EVERY = 20  # tokens of a pre-generated continuation, one of which is corrupted
EDITS = ("replaced", "inserted", "removed", "any")


def corrupted(truth: list[int], edit: str, seed: int) -> tuple[list[int], set[int]]:
    """(`truth` with an edit in every 20 tokens, the places of `truth` that it still has)."""
    generator = random.Random(seed)
    block, right = [], set(range(len(truth)))
    for begin in range(0, len(truth), EVERY):
        part = truth[begin : begin + EVERY]
        at = generator.randrange(len(part))
        wrong = generator.choice([t for t in range(30) if t != part[at]])
        kind = edit if edit != "any" else generator.choice(EDITS[:3])
        if kind == "replaced":
            part[at] = wrong
        elif kind == "inserted":
            part.insert(at, wrong)
        else:
            del part[at]
        if kind != "inserted":
            right.discard(begin + at)
        block += part
    return block, right


@pairwise(seed=range(5), depth=[4, 8, 16], edit=EDITS)
def test_with_an_edit_in_every_20_tokens_four_fifths_of_the_rest_are_used(
    edit: str, depth: int, seed: int
) -> None:
    """Used: offered and accepted, of the block tokens that are right. After a draft that is
    accepted whole the verifier's own token comes, so one of `depth` + 1 needs no draft."""
    truth = text(1000, seed)
    block, right = corrupted(truth, edit, seed)
    run = simulate(block, truth, depth)
    assert run.accepted >= 0.8 * len(right - run.bonus)
    assert run.accepted >= 0.8 * simulate(truth, truth, depth).accepted
    if depth > 4:  # the plainest reading, which at depth 4 even a right block only just meets
        assert run.accepted >= 0.8 * len(right)


@pytest.mark.parametrize("depth", [4, 8, 16])
@pytest.mark.parametrize("edit", EDITS)
def test_a_text_that_repeats_itself_is_not_left_for_another_place_like_it(
    edit: str, depth: int
) -> None:
    verse = text(37, seed=3)
    truth = []
    for number in range(30):  # the same again and again but for one word
        truth += [*verse[:18], 30 + number, *verse[18:]]
    block, right = corrupted(truth[:1000], edit, seed=4)
    run = simulate(block, truth[:1000], depth)
    assert run.accepted >= 0.8 * len(right - run.bonus)


@pytest.mark.parametrize("depth", [4, 16])
def test_one_token_over_and_over_stays_followed(depth: int) -> None:
    truth = [*([7] * 300), *range(20), *([8] * 100)]
    block = [*([7] * 290), *range(20), *([8] * 100)]  # it says 7 ten times less
    run = simulate(block, truth, depth)
    assert run.accepted >= 0.8 * (len(block) - len(run.bonus))


def test_a_distant_place_must_fit_more_tokens_than_a_near_one() -> None:
    cliche, rare = [90, 91, 92], [93, 94, 95, 96, 97, 98]
    block = [*range(50), *cliche, *range(200, 260), *rare, 70, 71, 72, 73]
    begun = [*range(4), 80, 81, 82]
    assert next_draft(block, [*begun, *cliche]) == []
    assert next_draft(block, [*begun, *rare]) == [70, 71, 72, 73]


def test_what_was_passed_is_not_gone_back_to() -> None:
    """A refrain that ends where the block ends is not the one at its beginning."""
    refrain = [90, 91, 92]
    block = [*refrain, *range(1, 9), *range(20, 40)]
    output = [*refrain, *range(1, 9), 80, 81, *refrain]
    assert next_draft(block, output) == []


def test_an_edit_of_the_same_kind_as_the_last_is_read_at_once() -> None:
    block = [token for token in range(60) if token not in (10, 30)]  # two are missing
    assert next_draft(block, list(range(11))) == [12, 13, 14, 15]  # it seems to be replaced
    assert next_draft(block, list(range(12))) == [12, 13, 14, 15]
    assert next_draft(block, list(range(31))) == [31, 32, 33, 34]


def test_a_useless_block_offers_little() -> None:
    truth, block = text(300, seed=1), [token + 100 for token in text(300)]
    run = simulate(block, truth)
    assert run.accepted == 0
    assert run.proposed <= 2 * DEPTH


def test_each_sequence_has_its_own_place_and_may_start_anew() -> None:
    proposer = BlockProposer()
    one, two = sequence_with(range(20)), sequence_with(range(100, 120))
    one.accept([0, 1], [0, 1, 2], [0.0] * 3)
    assert proposer.propose([one, two], [3, 2]) == [[3, 4, 5], [100, 101]]
    proposer.forget(one)  # preempted: its output stays, and is followed again
    assert proposer.propose([one], [3]) == [[3, 4, 5]]
    proposer.forget(sequence_with([]))  # never seen: nothing to do
