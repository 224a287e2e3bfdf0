"""KV blocks: one owner each, all come back, and growing is all or nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specbatch.pipeline.engine.blocks import TRASH_BLOCK, BlockManager, KvState
from specbatch.schemas.errors import OutOfBlocksError

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow, are trimmed and go, in any order."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.held: list[KvState] = []

    @rule(target=live)
    def arrive(self) -> KvState:
        kv = KvState()
        self.held.append(kv)
        return kv

    @rule(kv=live, length=st.integers(0, NUM_BLOCKS * BLOCK_SIZE + 3))
    def grow(self, kv: KvState, length: int) -> None:
        before, free = list(kv.blocks), self.manager.free_blocks
        missing = self.manager.missing_blocks(kv, length)
        if missing > free:
            with pytest.raises(
                OutOfBlocksError, match=f"{missing} KV blocks are needed and {free}"
            ):
                self.manager.grow(kv, length)
            assert kv.blocks == before
            assert self.manager.free_blocks == free
            return
        self.manager.grow(kv, length)
        assert kv.blocks[: len(before)] == before, "what is cached must stay where it is"
        assert len(kv.blocks) == max(len(before), -(-length // BLOCK_SIZE))
        assert self.manager.missing_blocks(kv, length) == 0
        kv.length = length

    @rule(kv=live, length=st.integers(0, NUM_BLOCKS * BLOCK_SIZE))
    def trim(self, kv: KvState, length: int) -> None:
        before, cached = list(kv.blocks), kv.length
        self.manager.trim(kv, length)
        assert kv.length == min(cached, length)
        assert kv.blocks == before

    @rule(kv=consumes(live))
    def release(self, kv: KvState) -> None:
        free = self.manager.free_blocks + len(kv.blocks)
        self.manager.release(kv)
        assert self.manager.free_blocks == free
        assert (kv.blocks, kv.length) == ([], 0)
        self.held = [other for other in self.held if other is not kv]

    @invariant()
    def no_block_has_two_owners(self) -> None:
        owned = [block for kv in self.held for block in kv.blocks]
        assert len(owned) == len(set(owned))
        assert all(TRASH_BLOCK < block < NUM_BLOCKS for block in owned)
        assert len(owned) + self.manager.free_blocks == NUM_BLOCKS - 1

    @invariant()
    def every_cached_token_has_a_block(self) -> None:
        assert all(kv.length <= len(kv.blocks) * BLOCK_SIZE for kv in self.held)

    def teardown(self) -> None:
        for kv in self.held:
            self.manager.release(kv)
        assert self.manager.free_blocks == NUM_BLOCKS - 1


Blocks.TestCase.settings = settings(
    derandomize=True, max_examples=100, stateful_step_count=40, deadline=None
)
test_any_order_of_calls_keeps_the_books = Blocks.TestCase


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
