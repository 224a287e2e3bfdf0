"""A model folder for the stand-in engine: it can be inspected and has a tokenizer, and no weights.

A token is a byte, and one more ends a text. `codec` reads the tokenizer without transformers.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

from specbatch.pipeline.ingest.codec import TextCodec
from specbatch.schemas.errors import ModelError

EOS = 256  # after the bytes
VOCAB_SIZE = 257
CONTEXT_TOKENS = 4096
_END = "</s>"


def write_model(folder: Path, name: str = "stand-in") -> Path:
    """Write it, unless it is there. Folders of other names are other models of one vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": EOS,
    }
    tokenizer_config = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "config.json": json.dumps(config, indent=1).encode(),
        "tokenizer.json": json.dumps(_tokenizer(), indent=1).encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1).encode(),
        "model.safetensors": _no_tensors(name),
    }
    for file, data in files.items():
        path = folder / file
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    return folder


def codec(ref: str) -> TextCodec:
    """The tokenizer of such a folder. Raises `ModelError`."""
    try:
        return TextCodec(_Tokenizer(Path(ref)), ref)
    except Exception as error:  # the library raises plain `Exception`
        raise ModelError(f"model {ref} has no tokenizer that can be loaded ({error})") from error


class _Tokenizer:
    """What `TextCodec` asks of a tokenizer, by the library that transformers has it from."""

    chat_template = None

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self.eos_token_id: int | None = self.backend_tokenizer.token_to_id(config["eos_token"])

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))


def _tokenizer() -> dict[str, Any]:
    """`tokenizer.json` of bytes and nothing merged."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": EOS,
                "content": _END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _byte_symbols() | {_END: EOS},
            "merges": [],
        },
    }


def _byte_symbols() -> dict[str, int]:
    """The printable symbol of every byte; those of unprintable bytes start at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


def _no_tensors(name: str) -> bytes:
    """A safetensors file without tensors. Its metadata makes folders differ."""
    header = json.dumps({"__metadata__": {"stand_in": name}}).encode()
    return struct.pack("<Q", len(header)) + header
