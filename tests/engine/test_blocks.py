"""KV blocks: written by one owner, read by those that begin alike, and all of them come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specbatch.pipeline.engines.state.kv_blocks import TRASH_BLOCK, BlockManager, KvState
from specbatch.schemas.errors import OutOfBlocksError

NUM_BLOCKS, BLOCK_SIZE = 12, 4
TEMPLATE = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1]


@dataclass(eq=False)
class Row:
    """A sequence: its decided tokens and its KV."""

    tokens: list[int]
    kv: KvState = field(default_factory=KvState)


class Blocks(RuleBasedStateMachine):
    """Sequences come, are computed in pieces, draft, are preempted, fail and go, in any order.

    `cells` is the cache: what a token's KV is made of, which is the whole prefix up to it.
    """

    live = Bundle("live")
    share = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, self.share)
        self.rows: list[Row] = []
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}

    @rule(
        target=live,
        common=st.integers(0, len(TEMPLATE)),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    )
    def arrive(self, common: int, own: list[int]) -> Row:
        row = Row([*TEMPLATE[:common], *own])
        self.rows.append(row)
        self.adopt(row)
        return row

    @rule(row=live)
    def preempt_and_come_back(self, row: Row) -> None:
        self.manager.release(row.kv)
        assert (row.kv.blocks, row.kv.length, row.kv.sealed) == ([], 0, 0)
        self.adopt(row)

    @rule(row=live, draft=st.integers(0, 9))
    def reserve_for_a_draft_that_nobody_makes(self, row: Row, draft: int) -> None:
        length = min(
            len(row.tokens) + draft,
            (len(row.kv.blocks) + self.manager.free_blocks) * BLOCK_SIZE,
        )
        length = max(length, row.kv.length)
        held = list(row.kv.blocks)
        self.manager.grow(row.kv, length)
        assert row.kv.blocks[: len(held)] == held

    @rule(
        row=live,
        take=st.integers(1, 12),
        draft=st.lists(st.integers(0, 1), max_size=7),
        agreed=st.integers(0, 7),
        token=st.integers(0, 1),
    )
    def compute(self, row: Row, take: int, draft: list[int], agreed: int, token: int) -> None:
        """Feed pending tokens; behind the last of them a draft, of which a part is kept."""
        kv, pending = row.kv, len(row.tokens) - row.kv.length
        take = min(take, pending)
        fed = [*row.tokens[: kv.length + take], *(draft if take == pending else [])]
        promised = self.manager.filling(kv, row.tokens, take)
        before, free = list(kv.blocks), self.manager.free_blocks
        missing = self.manager.missing_blocks(kv, len(fed))
        if missing > free:
            with pytest.raises(
                OutOfBlocksError, match=f"{missing} KV blocks are needed and {free}"
            ):
                self.manager.grow(kv, len(fed))
            assert kv.blocks == before
            assert self.manager.free_blocks == free
            return
        self.manager.grow(kv, len(fed))
        assert kv.blocks[: len(before)] == before, "what is cached must stay where it is"
        assert len(kv.blocks) == max(len(before), -(-len(fed) // BLOCK_SIZE))
        holders = Counter(block for other in self.rows for block in other.kv.blocks)
        for at in range(kv.length, len(fed)):
            block = kv.blocks[at // BLOCK_SIZE]
            assert at // BLOCK_SIZE >= kv.sealed
            assert holders[block] == 1, "a shared block is never written"
            self.cells[block, at % BLOCK_SIZE] = tuple(fed[: at + 1])
        kv.length = len(fed)
        if take == pending:
            row.tokens += [*draft[:agreed], token]
            self.manager.trim(kv, len(row.tokens) - 1)
        self.manager.seal(kv, row.tokens)
        assert kv.sealed == (kv.length // BLOCK_SIZE if self.share else 0)
        assert set(promised) <= self.manager._block_of.keys(), "others wait for them"

    @rule(row=live)
    def disown(self, row: Row) -> None:
        self.manager.disown(row.kv)

    @rule(row=consumes(live))
    def release(self, row: Row) -> None:
        self.rows = [other for other in self.rows if other is not row]
        elsewhere = {block for other in self.rows for block in other.kv.blocks}
        free = self.manager.free_blocks + len(set(row.kv.blocks) - elsewhere)
        self.manager.release(row.kv)
        assert self.manager.free_blocks == free

    def adopt(self, row: Row) -> None:
        known = set(self.manager._block_of.values())
        free = self.manager.free_blocks
        self.manager.adopt(row.kv, row.tokens)
        assert row.kv.length == len(row.kv.blocks) * BLOCK_SIZE < len(row.tokens)
        assert set(row.kv.blocks) <= known
        assert free - len(row.kv.blocks) <= self.manager.free_blocks <= free
        sought = self.manager.sought(row.kv, row.tokens)
        assert sought is None or sought not in self.manager._block_of, "it took all there is"

    @invariant()
    def a_block_is_held_cached_or_free(self) -> None:
        held = Counter(block for row in self.rows for block in row.kv.blocks)
        counted = {block: n for block, n in enumerate(self.manager._holders) if n}
        assert counted == dict(held)
        places = [*held, *self.manager._cached, *self.manager._free]
        assert sorted(places) == list(range(TRASH_BLOCK + 1, NUM_BLOCKS))
        assert len(held) + self.manager.free_blocks == NUM_BLOCKS - 1

    @invariant()
    def what_is_cached_can_be_found_and_what_is_free_cannot(self) -> None:
        key_of, block_of = self.manager._key_of, self.manager._block_of
        assert {key: block for block, key in key_of.items()} == block_of
        assert set(self.manager._cached) <= set(key_of)
        assert not set(self.manager._free) & set(key_of)

    @invariant()
    def only_sealed_blocks_have_several_holders(self) -> None:
        held = Counter(block for row in self.rows for block in row.kv.blocks)
        for row in self.rows:
            assert all(held[block] == 1 for block in row.kv.blocks[row.kv.sealed :])
            assert row.kv.sealed * BLOCK_SIZE <= row.kv.length <= len(row.kv.blocks) * BLOCK_SIZE

    @invariant()
    def every_sequence_reads_its_own_prefix(self) -> None:
        for row in self.rows:
            for at in range(row.kv.length):
                cell = row.kv.blocks[at // BLOCK_SIZE], at % BLOCK_SIZE
                assert self.cells[cell] == tuple(row.tokens[: at + 1])

    def teardown(self) -> None:
        for row in self.rows:
            self.manager.release(row.kv)
        assert self.manager.free_blocks == NUM_BLOCKS - 1
        assert not any(self.manager._holders)
        everything = KvState()
        self.manager.grow(everything, self.manager.capacity_tokens)
        assert sorted(everything.blocks) == list(range(1, NUM_BLOCKS)), "cached ones are reclaimed"
        assert not self.manager._block_of


Blocks.TestCase.settings = settings(
    derandomize=True, max_examples=150, stateful_step_count=40, deadline=None
)
test_any_order_of_calls_keeps_the_books = Blocks.TestCase


class UnsharedBlocks(Blocks):
    """The same with sharing off: no block ever has two holders."""

    share = False

    @invariant()
    def every_block_has_one_holder_at_most(self) -> None:
        assert max(self.manager._holders) <= 1
        assert not self.manager._cached


UnsharedBlocks.TestCase.settings = settings(Blocks.TestCase.settings, max_examples=50)
test_any_order_of_calls_keeps_the_books_without_sharing = UnsharedBlocks.TestCase


def test_a_cache_hands_out_all_but_the_trash_block() -> None:
    manager = BlockManager(num_blocks=5, block_size=4)
    assert manager.capacity_tokens == 16
    kv = KvState()
    manager.grow(kv, manager.capacity_tokens)
    assert sorted(kv.blocks) == [1, 2, 3, 4]
    assert manager.free_blocks == 0
    with pytest.raises(OutOfBlocksError, match="SPECBATCH_KV_CACHE_MIB"):
        manager.grow(kv, 17)


def test_released_blocks_are_handed_out_again() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    first, second = KvState(), KvState()
    manager.grow(first, 12)
    manager.release(first)
    manager.grow(second, 12)
    assert sorted(second.blocks) == [1, 2, 3]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_are_counted_by_whole_blocks(length: int, blocks: int) -> None:
    assert BlockManager(9, 4).missing_blocks(KvState(), length) == blocks


def filled(manager: BlockManager, tokens: list[int]) -> KvState:
    """A sequence that has computed and sealed all of `tokens`."""
    kv = KvState()
    manager.grow(kv, len(tokens))
    kv.length = len(tokens)
    manager.seal(kv, tokens)
    return kv


@pytest.mark.parametrize(
    ("tokens", "shared"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # its last token is computed again
        ([1, 2, 3, 4, 5, 6, 7, 0, 9], 4),
        ([1, 2, 3, 0, 5, 6, 7, 8, 9], 0),  # what follows a difference is different
        ([5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4], 0),
    ],
)
def test_the_longest_common_run_of_full_blocks_is_shared(tokens: list[int], shared: int) -> None:
    for held in (True, False):
        manager = BlockManager(9, 4)
        first = filled(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        blocks = list(first.blocks)
        if not held:
            manager.release(first)
        kv = KvState()
        manager.adopt(kv, tokens)
        assert kv.length == shared
        assert kv.blocks == blocks[: shared // 4]


def test_the_longest_unused_prefix_is_reclaimed_first_and_from_its_end() -> None:
    manager = BlockManager(7, 4)
    old, new = [1] * 12, [2] * 12
    for tokens in (old, new):
        manager.release(filled(manager, tokens))
    other = KvState()
    manager.grow(other, 8)
    lengths = []
    for tokens in (old, new):
        kv = KvState()
        manager.adopt(kv, [*tokens, 0])
        lengths.append(kv.length)
        manager.release(kv)
    assert lengths == [4, 12]


def test_nothing_is_shared_when_sharing_is_off() -> None:
    manager = BlockManager(9, 4, share_prefixes=False)
    first, second = filled(manager, [1] * 8), KvState()
    manager.adopt(second, [1] * 9)
    assert (second.blocks, second.length, first.sealed) == ([], 0, 0)
    assert manager.sought(second, [1] * 9) is None
    assert manager.filling(second, [1] * 9, 9) == []


def test_drafts_and_sealed_tokens_are_guarded() -> None:
    manager = BlockManager(9, 4)
    kv = filled(manager, [1] * 8)
    with pytest.raises(AssertionError, match="others may be reading"):
        manager.trim(kv, 7)
    drafting = KvState()
    manager.grow(drafting, 8)
    drafting.length = 8
    with pytest.raises(AssertionError, match="draft's KV"):
        manager.seal(drafting, [2] * 7)
