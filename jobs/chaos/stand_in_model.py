"""A model folder for the stand-in engine, with a tokenizer and without tensors.

A token is a byte, and one more ends a text. `tokenizer` reads the tokenizer without transformers.
What the files say decides the tokens, as with a real model: `replace_part` makes another model of
one.
"""

from __future__ import annotations

import itertools
import json
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import ModelError
from specbatch.schemas.fingerprint import CONFIG, GENERATION, TOKENIZER, WEIGHTS

EOS = 256  # after the bytes
VOCAB_SIZE = 257
CONTEXT_TOKENS = 4096
_END = "</s>"
_FILES = {  # by part of a fingerprint
    WEIGHTS: "model.safetensors",
    CONFIG: "config.json",
    GENERATION: "generation_config.json",
    TOKENIZER: "tokenizer.json",
}
_DECIDING = (WEIGHTS, CONFIG, GENERATION)  # parts by which prompt ids become output ids
REPLACED = tuple(_FILES)  # parts that `replace_part` knows


def write_model(folder: Path, name: str = "stand-in") -> Path:
    """Write a model unless it exists. Folders of other names are other models of one vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1).encode(),
        **{_FILES[part]: _written(part, name) for part in _FILES},
    }
    for file, data in files.items():
        path = folder / file
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    return folder


def replace_part(folder: Path, part: str, name: str, version: int) -> None:
    """Replace a file atomically under its name, as a deployment does.

    Version 0 is what `write_model` wrote.
    """
    path = folder / _FILES[part]
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_written(part, name, version))
    fresh.replace(path)


def weights_of(folder: Path) -> bytes:
    """A digest of the files that decide output tokens. Raises `OSError`."""
    digest = blake2b(digest_size=16)
    for part in _DECIDING:
        path = folder / _FILES[part]
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.digest()


def tokenizer(ref: str) -> TextTokenizer:
    """The tokenizer of such a folder. Raises `ModelError`."""
    try:
        return TextTokenizer(_Tokenizer(Path(ref)), ref)
    except Exception as error:  # the library raises plain `Exception`
        raise ModelError(f"model {ref} has no tokenizer that can be loaded ({error})") from error


class _Tokenizer:
    """The interface that `TextTokenizer` needs, on the library that transformers uses."""

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


def _written(part: str, name: str, version: int = 0) -> bytes:
    """The content of a part's file. Other versions differ and can be served as well."""
    if part == WEIGHTS:
        return _no_tensors(name, version)
    if part == TOKENIZER:
        return _tokenizer(version).encode()
    values: dict[str, Any] = {"eos_token_id": EOS}
    if part == CONFIG:
        values |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": CONTEXT_TOKENS,
        }
    return json.dumps(values | ({"version": version} if version else {}), indent=1).encode()


def _tokenizer(version: int) -> str:
    """A `tokenizer.json` of bytes without merges. Other versions number bytes differently."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(_byte_symbols(version) | {_END: EOS}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(_END, normalized=False)])
    return str(made.to_str(pretty=True))


def _byte_symbols(shift: int) -> dict[str, int]:
    """The printable symbol of every byte; those of unprintable bytes start at 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    symbols = [chr(byte if byte in printable else next(spare)) for byte in range(256)]
    return {symbol: (byte + shift) % 256 for byte, symbol in enumerate(symbols)}


def _no_tensors(name: str, version: int = 0) -> bytes:
    """A safetensors file without tensors. Its metadata makes folders differ."""
    metadata = {"stand_in": name} | ({"version": str(version)} if version else {})
    header = json.dumps({"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(header)) + header
