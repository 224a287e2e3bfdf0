"""The dtype in which models compute on a device here."""

from __future__ import annotations

import torch

from specbatch.kernels.native import InstructionSetError, NativeUnavailableError, library
from specbatch.schemas.errors import UsageError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes it, else float32 (float16 on a GPU).

    A lower instruction set that is forced counts as the processor's.
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    computed = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    narrow = native_level() in ("portable", "x86-64-v3")  # as a processor that ends there chooses
    return torch.bfloat16 if computed and not narrow else torch.float32


def native_level() -> str:
    """The instruction set of the C kernels here; `torch` if there are none."""
    try:
        return library().level
    except NativeUnavailableError:
        return "torch"
    except InstructionSetError as error:
        raise UsageError(str(error)) from error
