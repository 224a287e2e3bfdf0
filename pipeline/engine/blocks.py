"""KV blocks: who owns which. Pure bookkeeping, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbatch.schemas.errors import OutOfBlocksError

TRASH_BLOCK = 0  # padding tokens write their KV here; it is never handed out


@dataclass(slots=True)
class KvState:
    """The cached part of one sequence: `length` tokens in `blocks`, in order."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockManager:
    """Hands out the blocks 1 .. num_blocks - 1 of one cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, TRASH_BLOCK, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one sequence has the cache to itself."""
        return (self.num_blocks - 1) * self.block_size

    def missing_blocks(self, kv: KvState, length: int) -> int:
        """Blocks `kv` still needs to hold `length` tokens."""
        return max(0, -(-length // self.block_size) - len(kv.blocks))

    def grow(self, kv: KvState, length: int) -> None:
        """Give `kv` room for `length` tokens. Raises `OutOfBlocksError`, changing nothing."""
        missing = self.missing_blocks(kv, length)
        if missing > len(self._free):
            raise OutOfBlocksError(
                f"{missing} KV blocks are needed and {len(self._free)} are free: "
                "raise SPECBATCH_KV_CACHE_MIB or lower SPECBATCH_MAX_CONCURRENT_SEQUENCES"
            )
        kv.blocks.extend(self._free.pop() for _ in range(missing))

    def trim(self, kv: KvState, length: int) -> None:
        """Forget what lies beyond `length` tokens (rejected drafts); blocks stay reserved."""
        kv.length = min(kv.length, length)

    def release(self, kv: KvState) -> None:
        """Take all blocks back."""
        self._free.extend(reversed(kv.blocks))
        kv.blocks.clear()
        kv.length = 0
