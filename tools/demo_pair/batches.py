"""The training text as token windows: spans from anywhere, and spans that begin a function.

Prompts begin at a function's head, so a share of the windows does too; a model that only saw
spans from the middle of files would meet every prompt unprepared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specbatch.tools.demo_pair.corpus import functions, held_out_files, read, training_files

FUNCTION_SHARE = 0.3
WINDOW = 256  # tokens
_CHARACTERS = 6 * WINDOW  # more than a window's text has


@dataclass(frozen=True, slots=True)
class Windows:
    """Packed documents and the windows that begin at a function's head."""

    stream: Tensor  # [num_tokens] int16, documents joined by the end-of-text token
    heads: Tensor  # [num_functions, WINDOW + 1] int16

    def draw(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random windows of `length + 1` tokens, [rows, length + 1] int64."""
        from_heads = int(rows * FUNCTION_SHARE)
        starts = torch.randint(
            len(self.stream) - length, (rows - from_heads, 1), generator=generator
        )
        spans = self.stream[starts + torch.arange(length + 1)]
        picks = torch.randint(len(self.heads), (from_heads,), generator=generator)
        return torch.cat([spans, self.heads[picks, : length + 1]]).long()


def training_windows(tokenizer: PreTrainedTokenizerBase) -> Windows:
    """All training text; a function too close to the end of its file has no window."""
    end = tokenizer.eos_token_id
    stream: list[int] = []
    heads: list[list[int]] = []
    for path in training_files().values():
        text = read(path)
        stream += [end, *encode(tokenizer, text)]
        starts = [function.start for function in functions(text)]
        spans = (encode(tokenizer, text[start : start + _CHARACTERS]) for start in starts)
        heads += [span[: WINDOW + 1] for span in spans if len(span) > WINDOW]
    return Windows(
        stream=torch.tensor(stream, dtype=torch.int16),
        heads=torch.tensor(heads, dtype=torch.int16),
    )


def held_out_windows(tokenizer: PreTrainedTokenizerBase, length: int = WINDOW) -> Tensor:
    """The held-out text in consecutive windows, [num_windows, length + 1] int64."""
    stream: list[int] = []
    for path in held_out_files().values():
        stream += [tokenizer.eos_token_id, *encode(tokenizer, read(path))]
    count = (len(stream) - 1) // length
    return torch.tensor(stream[: count * length + 1]).unfold(0, length + 1, length)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of any length, without the warning about the model's longest input."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text).ids
    return ids
