"""Checks model folders before they are loaded, and tracks which files were. No torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.fingerprint import Snapshot, snapshot_of
from specbatch.pipeline.engines.models.model_check import check_files, check_model, check_weights
from specbatch.schemas.errors import BrokenModelError, ModelChangedError, ModelError, first_line
from specbatch.schemas.fingerprint import Fingerprint, differing, listed

log = logging.getLogger(__name__)

# Of engine exact: tested against `generate`; it refuses every other one by name.
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
_CONTEXT = (  # how configs name it
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
)  # fmt: skip
# Families whose layers are exactly: norm, rotary attention, norm, SwiGLU.
NATIVE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def inspect_model(ref: str) -> ModelFolder:
    """Check a folder or hub id. Raises `ModelError` with one sentence that names the reason."""
    return inspect_folder(ref, _locate(ref))


def check_folder(ref: str) -> None:
    """Raise `ModelError` for a folder that is missing or has no config; a hub id is not asked for.

    `inspect_model` finds the rest, for which it reads all files.
    """
    if _folder_of(ref) is not None or _names_folder(ref):
        read_config(ref, _locate(ref))


def known_context(ref: str) -> int | None:
    """The context in tokens of a model whose folder is here and readable; else None."""
    try:
        folder = _folder_of(ref)
        return None if folder is None else _context_tokens(read_config(ref, folder))
    except (ModelError, TypeError, ValueError, AttributeError):
        return None


def inspect_folder(ref: str, path: Path) -> ModelFolder:
    """The same for a model that was located before, without asking the hub again."""
    config = read_config(ref, path)
    if "auto_map" in config:
        raise ModelError(
            f"model `{ref}` needs code from its own repository (trust_remote_code), which is "
            "refused: use a model that transformers supports itself"
        )
    weights = check_files(ref, path)
    model_type = str(config.get("model_type", "?"))
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"model `{ref}` has an encoder (architecture `{model_type}`), which is not supported: "
            "use a causal model"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            f"model `{ref}` attends in both directions (use_bidirectional_attention), so it cannot "
            "write token by token: use a causal model"
        )
    check_model(ref, config, weights, model_type in SUPPORTED_MODEL_TYPES)
    return ModelFolder(
        ref=ref,
        path=path,
        model_type=model_type,
        vocab_size=int(config["vocab_size"]),
        context_tokens=_context_tokens(config),
        fingerprint=snapshot_of(ref, path).fingerprint,
        revision=path.name if path.parent.name == "snapshots" else None,
    )


def check_architecture(model: ModelFolder, may_be_vllm: bool = False) -> None:
    """Raise `ModelError` for a model that engine exact does not run. `may_be_vllm`: another engine
    could be chosen for it."""
    other = "; or engine vllm, with `exactness: fast`" if may_be_vllm else ""
    if model.model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"model `{model.ref}` has architecture `{model.model_type}`, which is not supported by "
            f"engine exact: use one of {', '.join(SUPPORTED_MODEL_TYPES)}{other}"
        )


def models_here() -> Callable[[str], ModelFolder]:
    """`inspect_model` for a whole process, in which each hub id means one revision."""
    locate = lru_cache(maxsize=16)(_locate)
    return lambda ref: inspect_folder(ref, locate(ref))


def check_again(model: ModelFolder) -> None:
    """Raise `BrokenModelError` unless its files are still complete, just before loading them."""
    try:
        weights = check_files(model.ref, model.path)
        known = model.model_type in SUPPORTED_MODEL_TYPES
        check_weights(model.ref, read_config(model.ref, model.path), weights, known)
    except ModelError as error:
        raise BrokenModelError(str(error)) from None


def check_pair(verifier: ModelFolder, proposer: ModelFolder) -> None:
    """Raise `ModelError` unless both models use the same tokens."""
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


class LoadedModels:
    """The verifier and the draft models of one process, and which files they were read from.

    A loaded model keeps the fingerprint of the files that it was read from, whatever lies in its
    folder since. A model that is not loaded is known as its folder is now. One thread at a time.
    """

    def __init__(self, model: ModelFolder, draft_models: Iterable[ModelFolder] = ()) -> None:
        self.model = model
        self.draft_models = tuple(draft_models)
        self._loaded: dict[str, Fingerprint] = {}  # by name of a model: the files it was read from

    def of(self, folder: ModelFolder) -> Fingerprint:
        """The fingerprint of what was loaded; if nothing was, of the folder when last read."""
        return self._loaded.get(folder.ref, folder.fingerprint)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Digests of the draft models, sorted."""
        return tuple(sorted(self.of(folder).digest for folder in self.draft_models))

    def check_again(self) -> bool:
        """Read folders again that nothing was loaded from; returns whether the verifier changed.

        Raises `ModelError`.
        """
        found = self._as_it_is(self.model)
        is_other = found is not self.model
        if is_other:
            log.info("model %s: its files changed before they were loaded", found.ref)
            self.model = found
        self.draft_models = tuple(map(self._as_it_is, self.draft_models))
        return is_other

    def note(self, folder: ModelFolder, snapshot: Snapshot) -> None:
        """A model was read from these files. Raises `ModelChangedError` if another engine here was
        loaded from other files: one worker has one model per name."""
        self._check(folder, snapshot)
        self._loaded[folder.ref] = snapshot.fingerprint

    def forget(self) -> None:
        """No engine is left, so other files may be loaded."""
        self._loaded.clear()

    def check_changed(self) -> None:
        """Raise `ModelChangedError` if the verifier's files changed since they were loaded."""
        self._check(self.model, snapshot_of(self.model.ref, self.model.path))

    def _check(self, folder: ModelFolder, snapshot: Snapshot) -> None:
        known, found = self._loaded.get(folder.ref), snapshot.fingerprint
        if known is not None and known != found:
            names = differing(known.parts, found.parts)
            raise ModelChangedError(
                f"the {listed(names)} of model `{folder.ref}` changed after this worker had "
                "loaded it for other jobs: restart the worker"
            )

    def _as_it_is(self, folder: ModelFolder) -> ModelFolder:
        if folder.ref in self._loaded:
            return folder
        snapshot = snapshot_of(folder.ref, folder.path)
        if snapshot.fingerprint == folder.fingerprint:
            return folder
        return inspect_folder(folder.ref, folder.path)


def _locate(ref: str) -> Path:
    if (path := _folder_of(ref)) is not None:
        return path
    name, _, revision = ref.partition("@")
    if _names_folder(ref):
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
                f"model `{ref}` is neither a local folder nor available from the hub "
                f"({type(error).__name__}): check the name or give a folder"
            ) from error
    except ImportError:
        raise ModelError(f"model folder `{ref}` does not exist") from None


def _folder_of(ref: str) -> Path | None:
    """The folder that a model's name is the path of, if it is. Raises `ModelError`."""
    try:
        path = Path(ref).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError) as error:  # no right to look there; no home folder
        raise ModelError(f"model folder `{ref}` cannot be read: {_reason(error)}") from None


def _names_folder(ref: str) -> bool:
    """Whether the name cannot be a hub id."""
    return ref.startswith((".", "/", "~")) or ref.partition("@")[0].count("/") != 1


def _reason(error: Exception) -> str:
    """An error in words, without numbers and paths."""
    return (getattr(error, "strerror", None) or first_line(error)).lower()


def read_config(ref: str, path: Path) -> dict[str, Any]:
    """A model's `config.json`. Raises `ModelError`."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(
            f"model folder `{ref}` has no config.json: is it a model folder?"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"config.json of model `{ref}` cannot be read: {_reason(error)}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"] | config
    if not isinstance(config, dict) or "vocab_size" not in config:
        raise ModelError(f"config.json of model `{ref}` names no vocab_size: is it a text model?")
    return config


def end_tokens(folder: Path, of_config: int | list[int] | None) -> frozenset[int]:
    """Those of the generation config, which `check_model` has read, or else `of_config`."""
    path = folder / "generation_config.json"
    generated = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    found = of_config if generated is None else generated
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _context_tokens(config: dict[str, Any]) -> int:
    """The longest sequence whose tokens' positions do not depend on its length."""
    tokens = next((config[name] for name in _CONTEXT if config.get(name)), 2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return int(tokens)
    # Beyond this length all tokens, the cached ones too, would turn by other angles.
    first = "original_max_position_embeddings"
    return int(min(tokens, rope.get(first) or config.get(first) or tokens))


def config_and_weights_sha256(folder: ModelFolder) -> str:
    """SHA-256 of config and weights, which identifies models of jobs without a fingerprint."""
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
