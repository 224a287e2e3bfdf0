"""Tiny random models in Hugging Face's folder format, so that tests need no weights.

Their weights are larger than a fresh initialisation's: a tiny model made the usual way repeats one
token for ever, which hides most mistakes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BOS, EOS, PAD = 256, 257, 258  # after the 256 bytes
TOKENIZER_FROM = 259  # smallest vocabulary that holds every byte and the specials
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # English, most frequent first


@dataclass(frozen=True)
class TinyPair:
    """Folders of two models with the same tokenizer."""

    verifier: Path
    draft: Path


def tiny_llama(
    path: Path,
    *,
    vocab_size: int = 111,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype | None = None,  # None: float32
) -> Path:
    """Write a random Llama to `path`, with a tokenizer if the vocabulary has room for all bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    has_tokenizer = vocab_size >= TOKENIZER_FROM
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=BOS if has_tokenizer else 0,
        eos_token_id=EOS if has_tokenizer else 1,
        pad_token_id=PAD if has_tokenizer else None,
    )
    model: Any = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue  # norms stay at one
            std = 0.3 if "embed_tokens" in name or "lm_head" in name else weight.shape[1] ** -0.5
            weight.normal_(0.0, std, generator=generator)
    model.to(dtype or torch.float32).save_pretrained(path)
    if has_tokenizer:
        byte_tokenizer(vocab_size).save_pretrained(path)
    return path


def byte_tokenizer(vocab_size: int = TOKENIZER_FROM) -> Any:
    """Ids 0 to 255 are the bytes, then the specials, then pairs of letters as merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    room = vocab_size - TOKENIZER_FROM
    pairs = ((left, right) for left in _LETTERS for right in _LETTERS)
    merges = list(itertools.islice(pairs, room))
    vocab = _byte_symbols() | specials
    vocab |= {left + right: TOKENIZER_FROM + i for i, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> dict[str, int]:
    """GPT-2's printable symbol of every byte; symbols of unprintable bytes start at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
