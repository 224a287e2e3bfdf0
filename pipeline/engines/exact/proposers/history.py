"""What earlier jobs wrote: by prompt, and by what was written before each token."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

from specbatch.pipeline.engines.exact.proposers.sealed_bytes import seal, unseal
from specbatch.pipeline.engines.exact.proposers.suffix_index import SuffixIndex
from specbatch.schemas.speculation import PastOutput

_KIND = b"specbatch history 1\n"
_HEADER = struct.Struct("<Q")  # bytes of the keys

Key = tuple[str, int]  # row id, sample index


class History:
    """An index over past outputs, and which prompt each was for. It never changes.

    The index holds the outputs, equal ones once. Memory: what `SuffixIndex` takes, and about 300
    bytes and the row id for each prompt and sample; there are at most as many as tokens.
    """

    def __init__(self, index: SuffixIndex, numbers: dict[Key, int]) -> None:
        """`numbers`: which of the index's outputs belongs to a key."""
        self.index = index
        self._numbers = numbers

    @classmethod
    def build(cls, past: Iterable[PastOutput], max_tokens: int) -> History:
        """Over `past` in its order until `max_tokens` are taken: the most relevant come first.

        Of several outputs of one prompt and sample the first is its past; empty ones are none.
        """
        numbers: dict[Key, int] = {}
        outputs: dict[tuple[int, ...], int] = {}
        room = max_tokens
        for output in past:
            if room <= 0:
                break
            if not output.token_ids:
                continue
            if output.token_ids not in outputs:
                outputs[output.token_ids] = len(outputs)
                room -= len(output.token_ids)
            key = (output.row_id, output.sample_index)
            numbers.setdefault(key, outputs[output.token_ids])
        return cls(SuffixIndex.build(outputs, max_tokens), numbers)

    def __len__(self) -> int:
        """Prompts and samples whose past is known."""
        return len(self._numbers)

    def past(self, row_id: str, sample: int) -> tuple[int, ...]:
        """What the prompt gave before, or its sample 0; empty if it is not known."""
        number = self._numbers.get((row_id, sample))
        if number is None:
            number = self._numbers.get((row_id, 0))
        return () if number is None else self.index.output(number)

    def to_bytes(self) -> bytes:
        keys = [[row_id, sample, number] for (row_id, sample), number in self._numbers.items()]
        encoded = json.dumps(keys).encode()
        return seal(_KIND, _HEADER.pack(len(encoded)), encoded, self.index.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> History:
        """Raises ValueError if `data` is not what `to_bytes` made."""
        payload = unseal(_KIND, data)
        if len(payload) < _HEADER.size:
            raise ValueError("a history without its header")
        end = _HEADER.size + int(_HEADER.unpack_from(payload)[0])
        index = SuffixIndex.from_bytes(payload[end:])
        return cls(index, _keys_from(bytes(payload[_HEADER.size : end]), len(index)))


def _keys_from(encoded: bytes, outputs: int) -> dict[Key, int]:
    numbers: dict[Key, int] = {}
    entries = json.loads(encoded)
    if not isinstance(entries, list):
        raise ValueError("a history without a list of keys")
    for entry in entries:
        match entry:
            case [str(row_id), int(sample), int(number)] if 0 <= number < outputs:
                numbers[row_id, sample] = number
            case _:
                raise ValueError(f"a history with a wrong key: {entry}")
    return numbers
