"""What can be said about a model before loading it, without torch: may it be served at all?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.exact.model.fingerprint import Look, look_at
from specbatch.pipeline.engines.exact.model.model_check import check_model, check_weights
from specbatch.pipeline.engines.exact.model.model_files import check_files
from specbatch.schemas.errors import BrokenModelError, ModelError
from specbatch.schemas.fingerprint import Fingerprint

# Tested against `generate`; every other architecture is refused by name.
SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
# Families whose layers are exactly: norm, rotary attention, norm, SwiGLU.
NATIVE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked model folder."""

    ref: str  # as the user named it
    path: Path
    model_type: str
    vocab_size: int
    context_tokens: int
    fingerprint: Fingerprint
    revision: str | None = None  # of a hub id: the commit that it led to
    look: Look | None = None  # at its files, when it was checked


def inspect_model(ref: str) -> ModelFolder:
    """Check a folder or hub id. Raises `ModelError` with one sentence that names the reason."""
    return inspect_folder(ref, _locate(ref))


def inspect_folder(ref: str, path: Path) -> ModelFolder:
    """The same of a model that was located before: a hub id is not asked for once more."""
    config = _read_config(ref, path)
    if "auto_map" in config:
        raise ModelError(
            f"model `{ref}` needs code from its own repository (trust_remote_code), which is "
            "refused: use a model that transformers supports itself"
        )
    weights = check_files(ref, path)
    model_type = config.get("model_type", "?")
    if config.get("is_encoder_decoder") or model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"model `{ref}` has architecture `{model_type}`, which is not supported: "
            f"use one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            f"model `{ref}` attends in both directions (use_bidirectional_attention), so it cannot "
            "write token by token: use a causal model"
        )
    check_model(ref, config, weights)
    look = look_at(ref, path)
    return ModelFolder(
        ref=ref,
        path=path,
        model_type=model_type,
        vocab_size=int(config["vocab_size"]),
        context_tokens=_context_tokens(config),
        fingerprint=look.fingerprint,
        revision=path.name if path.parent.name == "snapshots" else None,
        look=look,
    )


def models_here() -> Callable[[str], ModelFolder]:
    """`inspect_model` for a whole process: each id of the hub leads to one revision."""
    locate = lru_cache(maxsize=16)(_locate)
    return lambda ref: inspect_folder(ref, locate(ref))


def check_again(model: ModelFolder) -> None:
    """Raise `BrokenModelError` unless its files are still whole, just before they are loaded."""
    try:
        weights = check_files(model.ref, model.path)
        check_weights(model.ref, _read_config(model.ref, model.path), weights)
    except ModelError as error:
        raise BrokenModelError(str(error)) from None


def check_pair(verifier: ModelFolder, proposer: ModelFolder) -> None:
    """Raise `ModelError` unless both models speak the same tokens."""
    if verifier.vocab_size != proposer.vocab_size:
        raise ModelError(
            f"verifier `{verifier.ref}` has {verifier.vocab_size} tokens and proposer "
            f"`{proposer.ref}` has {proposer.vocab_size}: they must share one vocabulary"
        )
    mine, theirs = (_vocabulary(m.path) for m in (verifier, proposer))
    if mine is not None and theirs is not None and mine != theirs:
        raise ModelError(
            f"verifier `{verifier.ref}` and proposer `{proposer.ref}` give different meanings to "
            "the same token ids: use a proposer trained with the verifier's tokenizer"
        )


def _locate(ref: str) -> Path:
    path = Path(ref).expanduser()
    if path.is_dir():
        return path
    name, _, revision = ref.partition("@")
    if ref.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model folder `{ref}` does not exist: give a folder or a hub id owner/name[@revision]"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
        try:
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise ModelError(
                f"model `{ref}` is neither a folder here nor to be had from the hub "
                f"({type(error).__name__}): check the name or give a folder"
            ) from error
    except ImportError:
        raise ModelError(f"model folder `{ref}` does not exist") from None


def _read_config(ref: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(
            f"model folder `{ref}` has no config.json: is it a model folder?"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"config.json of model `{ref}` cannot be read: {error}") from None
    if not isinstance(config, dict) or "vocab_size" not in config:
        raise ModelError(f"config.json of model `{ref}` names no vocab_size: is it a text model?")
    return config


def _context_tokens(config: dict[str, Any]) -> int:
    """The longest sequence whose tokens' positions do not depend on its length."""
    tokens = config.get("max_position_embeddings", config.get("n_positions", 2048))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return int(tokens)
    # Beyond this length all tokens, the cached ones too, would turn by other angles.
    first = "original_max_position_embeddings"
    return int(min(tokens, rope.get(first) or config.get(first) or tokens))


def config_and_weights_sha256(folder: ModelFolder) -> str:
    """SHA-256 of these alone, by which jobs without a fingerprint know their models."""
    digest = hashlib.sha256((folder.path / "config.json").read_bytes())
    for file in sorted(folder.path.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def vocabulary_digest(model: ModelFolder) -> str:
    """SHA-256 of what its token ids mean: equal for models that share a tokenizer."""
    meanings = _vocabulary(model.path)
    if meanings is None:
        return model.fingerprint.digest  # only the very same model is known to speak the same
    return hashlib.sha256(json.dumps(meanings, sort_keys=True).encode()).hexdigest()


def _vocabulary(path: Path) -> object:
    """The token ids' meanings, or None where the folder has no tokenizer.json."""
    try:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
    except (OSError, ValueError):
        return None
    model = tokenizer.get("model", {})
    added = [(t.get("id"), t.get("content")) for t in tokenizer.get("added_tokens", [])]
    return model.get("vocab"), added
