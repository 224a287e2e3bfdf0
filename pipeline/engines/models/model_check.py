"""Checks that the files of a model are what they claim, without loading them.

A truncated weight file, a wrong header, or a config of other sizes would otherwise show only when
the first group arrives, as an allocation of many gigabytes or as untrained weights. Only headers
are read, so this takes milliseconds for any size.

Weights are safetensors inside the folder and nothing else: pickled weights could run code, a link
could make a worker read any file of the machine, and an index could name either.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbatch.schemas.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_ADAPTER = "adapter_config.json"
MAX_JSON_BYTES = 256 << 20  # of a tokenizer; configs have kilobytes
# Far above all models of today. What is allocated by a config alone stays below 2 GiB.
LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "n_embd": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "n_inner": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "n_layer": 1 << 10,
    "num_attention_heads": 1 << 12,
    "n_head": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 22,
    "n_positions": 1 << 22,
    "num_local_experts": 1 << 12,
    "num_experts": 1 << 12,
    "original_max_position_embeddings": 1 << 22,
}
_OPTIONAL = (  # may be null
    "n_inner", "num_key_value_heads", "head_dim", "original_max_position_embeddings",
)  # fmt: skip
_OLD_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


def check_files(ref: str, folder: Path) -> list[Path]:
    """The weight files, sorted by name. Raises `ModelError` with one sentence."""
    _check_links(ref, folder)
    check_regular(ref, folder)
    if (folder / _ADAPTER).exists():  # it would lead to the weights of some other repository
        raise ModelError(
            f"model `{ref}` is an adapter ({_ADAPTER}): merge it into its base model and save that"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        found = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        reason = f"only pickle weights ({', '.join(found)})" if found else "no weights"
        raise ModelError(f"model `{ref}` has {reason}: save it as safetensors")
    _check_index(ref, folder, {path.name for path in weights})
    return weights


def _check_links(ref: str, folder: Path) -> None:
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # of the hub's cache, where files are links to blobs
        allowed.append(home.parent.parent / "blobs")
    for path in _links(folder):
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in allowed):
            raise ModelError(
                f"model `{ref}` has the file {path.relative_to(folder)}, which is a link out of "
                "its folder: copy what it points to into the folder"
            )


def _links(folder: Path) -> Iterable[Path]:
    """All links in the folder and below it. Linked folders are not entered."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        reason = (error.strerror or type(error).__name__).lower()
        raise ModelError(f"model folder `{folder}` cannot be read: {reason}")

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        found += [p for name in (*folders, *sorted(files)) if (p := Path(root, name)).is_symlink()]
    return found


def _check_index(ref: str, folder: Path, there: set[str]) -> None:
    """An index may name only safetensors files beside it."""
    path = folder / INDEX
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(
            f"{INDEX} of model `{ref}` cannot be read ({type(error).__name__}): save it again"
        ) from None
    strange = sorted(str(name) for name in named - there)
    if strange:
        raise ModelError(
            f"{INDEX} of model `{ref}` names {strange[0]}, which is not a "
            "safetensors file of its folder: save the model again"
        )


def check_model(
    ref: str, config: Mapping[str, Any], weights: Sequence[Path], is_known: bool
) -> None:
    """Raise `ModelError` with one sentence for the first contradiction. `is_known`: its
    architecture is, and with it the shapes of its tensors."""
    _check_config(ref, config if is_known else {"vocab_size": config["vocab_size"]})
    _check_end_tokens(ref, weights[0].parent)
    check_weights(ref, config, weights, is_known)


def check_weights(
    ref: str, config: Mapping[str, Any], weights: Sequence[Path], is_known: bool
) -> None:
    """The same for the weights alone; their config was checked before."""
    index = weights[0].parent / INDEX
    named = _weight_map(index)
    single = [path for path in weights if path.name == SINGLE]  # wins, if it is there
    read = single or [path for path in weights if named is None or path.name in named.values()]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in read:
        for name, shape in _header(ref, path).items():
            if name in shapes:
                raise ModelError(
                    f"model `{ref}` has the tensor {name:.100} in several files: remove what is "
                    "left of an older copy, or save the model again"
                )
            shapes[name] = shape
    lost = [] if single or named is None else [name for name in named if name not in shapes]
    if lost:
        raise ModelError(
            f"{INDEX} of model `{ref}` names the tensor {lost[0]:.100}, which is in none of its "
            "files: copy or save the model again"
        )
    if is_known and not config.get("quantization_config"):  # those are packed in their own ways
        _check_shapes(ref, config, shapes)


def check_regular(ref: str, folder: Path) -> None:
    """Raise `ModelError` for what is not a regular file: reading a pipe would wait."""
    for path in sorted(folder.iterdir()):
        try:
            found = path.stat()
        except OSError as error:
            raise ModelError(
                f"file {path.name} of model `{ref}` cannot be read "
                f"({(error.strerror or type(error).__name__).lower()}): save the model again"
            ) from None
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ModelError(
                f"model `{ref}` has {path.name}, which is neither a file nor a folder: remove it"
            )
        if path.suffix == ".json" and found.st_size > MAX_JSON_BYTES:
            raise ModelError(
                f"file {path.name} of model `{ref}` has {found.st_size} bytes, above the "
                f"{MAX_JSON_BYTES} that such a file may have: save the model again"
            )


# --- the config ---------------------------------------------------------------------------------
def _check_config(ref: str, config: Mapping[str, Any]) -> None:
    for name, limit in LIMITS.items():
        if name not in config or (config[name] is None and name in _OPTIONAL):
            continue
        _check_number(ref, name, config[name], limit)
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise ModelError(
                f"config.json of model `{ref}` has {name} {config[name]!r:.50}, which must be an "
                "object: save the model again"
            )
        first = "original_max_position_embeddings"
        if (value := (config.get(name) or {}).get(first)) is not None:
            _check_number(ref, f"{name}.{first}", value, LIMITS[first])
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ModelError(
            f"config.json of model `{ref}` has {heads} attention heads for {kv_heads} heads of "
            "keys and values, which do not divide them: save the model again"
        )


def _check_end_tokens(ref: str, folder: Path) -> None:
    """Check end tokens of a generation config; loaders differ in how they read nonsense."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    try:
        value = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError, OSError, RecursionError):
        raise ModelError(
            f"{path.name} of model `{ref}` is not a JSON object: save the model again"
        ) from None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or abs(i) >= 1 << 31 for i in ids):
        raise ModelError(
            f"{path.name} of model `{ref}` has eos_token_id {value!r:.50}, which must be token "
            "ids: save the model again"
        )


def _check_number(ref: str, name: str, value: Any, limit: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelError(
            f"config.json of model `{ref}` has {name} {value!r:.50}, which must be a whole number "
            f"from 1 to {limit}: save the model again, or correct it"
        )


# --- the weights --------------------------------------------------------------------------------
def _header(ref: str, path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors, once header and size fit together."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ModelError(
            f"weight file {path.name} of model `{ref}` cannot be read ({reason:.200}): copy or "
            "save the model again"
        ) from None


def _weight_map(index: Path) -> dict[str, str] | None:
    """File names by tensor; None without an index. `check_files` has checked it."""
    return dict(json.loads(index.read_text())["weight_map"]) if index.exists() else None


# --- both ---------------------------------------------------------------------------------------
def _check_shapes(ref: str, config: Mapping[str, Any], shapes: Shapes) -> None:
    layers = {int(m[1]) for name in shapes if (m := _LAYER.search(name))}
    wanted = _value(config, "num_hidden_layers")
    if wanted is not None and layers != set(range(wanted)):
        raise ModelError(
            f"config.json of model `{ref}` declares {wanted} layers, but the weights have "
            f"{len(layers)}: copy or save the model again"
        )
    for name, shape in shapes.items():
        expected = _expected(name, config)
        if expected is not None and shape != expected:
            raise ModelError(
                f"tensor {name:.100} of model `{ref}` has the shape {list(shape)}, by its config "
                f"it is {list(expected)}: copy or save the model again"
            )


def _expected(name: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape that a config gives to a tensor; None where this is not known here."""
    hidden = _value(config, "hidden_size")
    heads = _value(config, "num_attention_heads")
    if hidden is None or heads is None:
        return None
    vocabulary = config["vocab_size"]
    inner = config.get("intermediate_size")
    head_dim = config.get("head_dim") or hidden // heads
    of_kv = (config.get("num_key_value_heads") or heads) * head_dim
    # Elsewhere what is not said has a default of the architecture's.
    said = config.get("model_type") == "llama" or {"head_dim", "num_key_value_heads"} <= set(config)
    last = ".".join(name.split(".")[-2:])
    dense = not {"experts", "block_sparse_moe", "mlp_only"} & set(name.split("."))
    known: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden),
        "wte.weight": (vocabulary, hidden),
        "embed_in.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "embed_out.weight": (vocabulary, hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if said:
        known |= {
            "q_proj.weight": (heads * head_dim, hidden),
            "k_proj.weight": (of_kv, hidden),
            "v_proj.weight": (of_kv, hidden),
            "o_proj.weight": (hidden, heads * head_dim),
        }
    if inner and dense:
        known |= {
            "gate_proj.weight": (inner, hidden),
            "up_proj.weight": (inner, hidden),
            "down_proj.weight": (hidden, inner),
        }
    if "n_positions" in config:
        known["wpe.weight"] = (config["n_positions"], hidden)
    return known.get(last)


def _value(config: Mapping[str, Any], name: str) -> int | None:
    """By its usual name or that of GPT-2."""
    value = config.get(name, config.get(_OLD_NAMES[name]))
    return value if isinstance(value, int) else None
