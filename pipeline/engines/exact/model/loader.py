"""Loads a checked model folder: for the native pass, or through transformers with our attention and
our linear layers."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from specbatch.kernels.decoder.contract import DecoderShape, DecoderWeights
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.batch_invariant.row_tiles import RowTiles
from specbatch.pipeline.engines.exact.model.loaded_model import (
    Attention,
    Kernels,
    LoadedModel,
    choose_kernels,
)
from specbatch.pipeline.engines.exact.model.native_model import NotNativeError, lower
from specbatch.pipeline.engines.exact.model.native_weights import NativeModel, read_native
from specbatch.pipeline.engines.exact.model.quantised import check_weights, quantise
from specbatch.pipeline.engines.models.dtypes import choose_dtype
from specbatch.pipeline.engines.models.model_folder import (
    check_again,
    check_architecture,
    end_tokens,
)
from specbatch.pipeline.engines.state.recovery import engine_error, may_pass, with_type
from specbatch.schemas.errors import BrokenModelError, MissingExtraError, ModelError, SpecbatchError
from specbatch.schemas.spec import Weights

log = logging.getLogger(__name__)

ATTENTION_NAME = "specbatch_paged"
# Their plans in transformers share out the heads of attention; tested with two ranks.
SHAREABLE = ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
# transformers keeps global state while it loads: two threads at once lose each other's weights.
_loading = threading.Lock()


def load_model(
    folder: ModelFolder,
    dtype: str = "auto",
    exactness: str = "bitwise",
    device: str = "cpu",
    native: bool = True,
    kernels: Literal["auto", "torch", "triton"] = "auto",
    weights: Weights = "as-is",
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load a model for the native pass if it can run there and `native`, else for the torch path.

    The choice and its reason are logged. So many ranks as `tensor_parallel` call this together and
    share the model.
    Raises `BrokenModelError` if its files cannot be loaded, `ModelError` if it cannot run as asked,
    `MissingExtraError` if a package is missing, and `EngineError` if a retry may work: memory, the
    storage or the device failed.
    """
    check_architecture(folder)  # the folder may have become another since the worker began
    with _explained(folder.ref):
        if tensor_parallel > 1:
            check_shareable(folder, tensor_parallel, exactness, weights)
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        by = choose_kernels(kernels, torch.device(device))
        check_weights(weights)
        if weights != "as-is" and by == "triton" and exactness == "bitwise":
            raise ModelError(
                f"model `{folder.ref}` has no bitwise products of `{weights}` weights on a GPU: "
                "use `exactness: fast`, or its weights as they are"
            )
        chosen = choose_dtype(dtype, torch.device(device))
        log.info(
            "model %s: %s on %s, exactness %s, weights %s",
            *(folder.ref, chosen, device, exactness, weights),
        )
        check_again(folder)
        plain = device == "cpu" and by == "torch" and weights == "as-is" and tensor_parallel == 1
        if native and plain and (found := read_native(folder, chosen)) is not None:
            return _native(folder, found, chosen, exactness)
        module = _read(folder, chosen, tensor_parallel)
        module = module.to(device).eval().requires_grad_(False)
        _detach(module)  # what went to another device is its own already
        quantise(module, weights)
        lowered = _lowered(module, folder) if native and plain else None
        tiles = None
        if lowered is None and exactness == "bitwise":
            tiles = _make_bitwise(module, folder.ref, by)
        config = module.config.get_text_config()
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        ends = end_tokens(folder.path, getattr(config, "eos_token_id", None))
        num_layers = int(config.num_hidden_layers)
        return LoadedModel(
            folder=folder,
            module=module,
            dtype=chosen,
            device=torch.device(device),
            native=lowered,
            tiles=tiles,
            kernels=by,
            exactness=exactness,
            num_layers=num_layers,
            num_kv_heads=kv_heads // tensor_parallel,
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            eos_ids=ends,
        )


def _native(
    folder: ModelFolder, found: NativeModel, dtype: torch.dtype, exactness: str
) -> LoadedModel:
    log.info("model %s runs as one native pass", folder.ref)
    return LoadedModel(
        folder=folder,
        module=None,
        dtype=dtype,
        device=torch.device("cpu"),
        native=(found.shape, found.weights),
        tiles=None,
        kernels="torch",
        exactness=exactness,
        num_layers=found.shape.layers,
        num_kv_heads=found.shape.kv_heads,
        head_dim=found.shape.head_dim,
        eos_ids=found.eos_ids,
    )


def _read(folder: ModelFolder, dtype: torch.dtype, ranks: int) -> Any:
    """The module with the folder's weights. Raises `BrokenModelError` unless it has all of them."""
    # Importing these takes seconds, which the native pass does without.
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    AttentionInterface.register(ATTENTION_NAME, _attention)
    transformers_logging.disable_progress_bar()  # in the middle of a log, or beside ours
    with _loading:
        module, read = AutoModelForCausalLM.from_pretrained(
            str(folder.path),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **_shared_among(ranks),
        )
    if missing := sorted(read["missing_keys"]):  # they would be drawn at random
        raise BrokenModelError(
            f"the weights of model `{folder.ref}` lack {len(missing)} tensors, the first is "
            f"{missing[0]}: copy or save the model again"
        )
    return module


@contextmanager
def _explained(ref: str) -> Iterator[None]:
    """Turns the many kinds of errors of transformers and safetensors into ours."""
    try:
        yield
    except SpecbatchError:
        raise
    except Exception as error:
        if may_pass(error):
            raise engine_error(error, f"loading model `{ref}`") from error
        raise BrokenModelError(
            f"model `{ref}` cannot be loaded ({with_type(error)}): copy or save it again"
        ) from error


def check_shareable(folder: ModelFolder, ranks: int, exactness: str, weights: Weights) -> None:
    """Raise `ModelError` if so many ranks cannot share the model, `MissingExtraError` if a package
    is missing.
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


def _shared_among(ranks: int) -> dict[str, Any]:
    """Arguments for `from_pretrained`."""
    if ranks == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def _detach(module: nn.Module) -> None:
    """Copy tensors out of the mapped file: later writes to the file change nothing here.

    A mapped file shows later writes, and reading beyond a later truncation kills the process.
    """
    own: dict[tuple[int, torch.Size], Tensor] = {}  # by address: tied weights stay tied
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.untyped_storage().resizable():  # memory that torch did not allocate
            key = (tensor.data_ptr(), tensor.shape)
            if key not in own:
                own[key] = tensor.data.clone()
            tensor.data = own[key]


def _make_bitwise(module: nn.Module, ref: str, kernels: Kernels) -> RowTiles | None:
    """Make the torch path batch-invariant; returns the tiles to which passes are padded."""
    if kernels == "torch":
        from specbatch.pipeline.engines.exact.model.batch_invariant import torch_modules

        return torch_modules.make_batch_invariant(module, ref)
    from specbatch.pipeline.engines.exact.model.batch_invariant import triton_modules

    triton_modules.make_batch_invariant(module, ref)
    return None


def _lowered(module: Any, folder: ModelFolder) -> tuple[DecoderShape, DecoderWeights] | None:
    try:
        lowered = lower(module, folder.context_tokens)
    except NotNativeError as reason:
        log.info("model %s takes the torch path: %s", folder.ref, reason)
        return None
    log.info("model %s runs as one native pass", folder.ref)
    return lowered


def _without_overflow(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A value that is infinite or NaN would reach rows that must not see it, for 0 · NaN is NaN:
    a wrong draft token would spoil the tokens before it. Its key is NaN instead, which spoils
    exactly the rows that see it."""
    is_finite = value.isfinite().all(dim=-1, keepdim=True)
    return key.where(is_finite, float("nan")), value.where(is_finite, 0.0)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: tuple[RaggedBatch, list[tuple[Tensor, Tensor]], Attention] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: write the KV, then attend."""
    assert paged is not None, "the runner passes the batch to every forward pass"
    assert attention_mask is None, "an unregistered mask function yields no mask"
    batch, caches, attend = paged
    key_cache, value_cache = caches[cast(int, module.layer_idx)]
    if value.dtype == torch.float16:
        key, value = _without_overflow(key, value)
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, batch.slots, new[0].transpose(0, 1))
    out = attend(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        batch,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None
