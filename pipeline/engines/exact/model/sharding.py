"""Which models several ranks can share, and how transformers is told to."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from specbatch.pipeline.engines.exact.model.model_folder import ModelFolder
from specbatch.schemas.errors import MissingExtraError, ModelError
from specbatch.schemas.spec import Weights

# Their plans in transformers share out the heads of attention; tested with two ranks.
SHAREABLE = ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def check_shareable(folder: ModelFolder, ranks: int, exactness: str, weights: Weights) -> None:
    """Raise `ModelError` if so many ranks cannot share the model, `MissingExtraError` if a package
    lacks.
    """
    if find_spec("accelerate") is None:
        raise MissingExtraError(
            "a model over several GPUs needs accelerate, which is not installed here: "
            "`pip install 'specbatch[parallel]'`"
        )
    if folder.model_type not in SHAREABLE:
        raise ModelError(
            f"model `{folder.ref}` cannot run over several GPUs: that is for {', '.join(SHAREABLE)}"
        )
    config = json.loads((folder.path / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % ranks:
        raise ModelError(
            f"model `{folder.ref}` has {heads} heads of keys and values, which {ranks} GPUs "
            "cannot share evenly: set SPECBATCH_TENSOR_PARALLEL to a divisor"
        )
    if exactness == "bitwise" or weights != "as-is":
        raise ModelError(
            f"model `{folder.ref}` runs over several GPUs only with `exactness: fast` and its "
            "weights as they are"
        )


def shared_among(ranks: int) -> dict[str, Any]:
    """Arguments for `from_pretrained`."""
    if ranks == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}
