"""KV blocks: which sequence holds which, and which may be shared. Bookkeeping, no tensors.

A block is *held* by one or more sequences, or *cached* (held by none, its content still known), or
*free*. Only full blocks are shared. They are never written again, so no copy on write is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from specbatch.schemas.errors import OutOfBlocksError

TRASH_BLOCK = 0  # padding tokens write their KV here; it is never handed out


@dataclass(slots=True)
class KvState:
    """The cached part of one sequence: `length` tokens in `blocks`, in order."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    sealed: int = 0  # leading blocks that are final: others may read them, nobody writes them
    keys: list[bytes] = field(default_factory=list)  # of leading full blocks; outlive the blocks


class BlockManager:
    """Hands out the blocks 1 .. num_blocks - 1 of one cache.

    A full block's key is a 256-bit BLAKE2 hash of its tokens and of the key before it, so it stands
    for the whole prefix; at that width, equal keys are taken to mean equal prefixes.
    """

    def __init__(self, num_blocks: int, block_size: int, share_prefixes: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._share = share_prefixes
        self._free = list(range(num_blocks - 1, TRASH_BLOCK, -1))
        self._holders = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def untouched(self) -> int:
        """Blocks that hold nothing: the system may not have allocated their memory yet."""
        return len(self._free)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds. Cached ones are reclaimed last."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks that are held, free, and cached."""
        free, cached = len(self._free), len(self._cached)
        return self.num_blocks - 1 - free - cached, free, cached

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
        if missing > self.free_blocks:
            raise OutOfBlocksError(
                f"{missing} KV blocks are needed and {self.free_blocks} are free: "
                "raise SPECBATCH_KV_CACHE_MIB or lower SPECBATCH_MAX_CONCURRENT_SEQUENCES"
            )
        kv.blocks.extend(self._take() for _ in range(missing))

    def trim(self, kv: KvState, length: int) -> None:
        """Forget what lies beyond `length` tokens (rejected drafts); blocks stay reserved."""
        kv.length = min(kv.length, length)
        assert kv.sealed * self.block_size <= kv.length, "others may be reading what is sealed"

    def release(self, kv: KvState) -> None:
        """Give up all blocks. Sealed ones stay cached; the end of a prefix is reclaimed first."""
        for block in reversed(kv.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        kv.blocks.clear()
        kv.length = kv.sealed = 0

    # --- sharing -------------------------------------------------------------------------------
    def adopt(self, kv: KvState, tokens: list[int]) -> None:
        """Let an empty `kv` hold the longest run of known blocks that `tokens` begin with.

        At least the last token is left to be computed: its logits are wanted.
        """
        assert not kv.blocks, "only a sequence without KV can adopt a prefix"
        for index in range(self._shareable(tokens)):
            block = self._block_of.get(self._key(kv, tokens, index))
            if block is None:
                break
            self._cached.pop(block, None)
            self._holders[block] += 1
            kv.blocks.append(block)
        kv.sealed = len(kv.blocks)
        kv.length = kv.sealed * self.block_size

    def seal(self, kv: KvState, tokens: list[int]) -> None:
        """Let others find the blocks that `kv` has filled. Every token in them must be decided."""
        full = kv.length // self.block_size
        if full <= kv.sealed or not self._share:
            return
        assert kv.length <= len(tokens), "a draft's KV must not be shared"
        for index in range(kv.sealed, full):
            key = self._key(kv, tokens, index)
            if key not in self._block_of:  # else the same prefix was computed twice at once
                self._block_of[key] = kv.blocks[index]
                self._key_of[kv.blocks[index]] = key
        kv.sealed = full

    def disown(self, kv: KvState) -> None:
        """Stop sharing what `kv` holds: it must not be reused."""
        for block in kv.blocks[: kv.sealed]:
            self._forget(block)

    def sought(self, kv: KvState, tokens: list[int]) -> bytes | None:
        """The key that `adopt` did not find; None if it found all shareable blocks."""
        return self._key(kv, tokens, kv.sealed) if kv.sealed < self._shareable(tokens) else None

    def filling(self, kv: KvState, tokens: list[int], take: int) -> list[bytes]:
        """Keys of the blocks that computing the next `take` of `tokens` fills."""
        end = (kv.length + take) // self.block_size if self._share else 0
        return [self._key(kv, tokens, index) for index in range(kv.sealed, end)]

    def _shareable(self, tokens: list[int]) -> int:
        return (len(tokens) - 1) // self.block_size if self._share else 0

    def _key(self, kv: KvState, tokens: list[int], index: int) -> bytes:
        """The key of a full block of `tokens`. They only ever grow, so it is computed once."""
        for at in range(len(kv.keys), index + 1):
            own = tokens[at * self.block_size : (at + 1) * self.block_size]
            assert len(own) == self.block_size, "only full blocks have a key"
            parent = kv.keys[-1] if kv.keys else b""
            kv.keys.append(blake2b(parent + array("q", own).tobytes(), digest_size=32).digest())
        return kv.keys[index]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
