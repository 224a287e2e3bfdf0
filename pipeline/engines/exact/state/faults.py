"""What an exception out of a forward pass means: too little memory, a lost device, or neither.

A processor's allocator raises a plain `RuntimeError`, so words must decide there. CUDA errors carry
the runtime's number in `error_code` where torch raised them itself, and only words where a library
or a kernel of ours did. `Sticky` ones spoil the process's context: each later call fails alike,
until a new process is started.
"""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass
from enum import StrEnum

from specbatch.schemas.errors import DeviceLostError, EngineError, first_line


class Fault(StrEnum):
    """Who or what a failed pass is the fault of."""

    MEMORY = "memory"  # a smaller pass may fit
    DEVICE = "device"  # the device or its driver is gone
    KERNEL = "kernel"  # a kernel broke the process's context; its input may be why
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Sticky:
    code: int  # of cudaError_t
    words: str  # of cudaGetErrorString, in lower case
    fault: Fault


# Numbers and words as the CUDA runtime has them; HIP uses the same ones.
_STICKY = (
    _Sticky(4, "driver shutting down", Fault.DEVICE),
    _Sticky(46, "device(s) is/are busy or unavailable", Fault.DEVICE),
    _Sticky(100, "no cuda-capable device is detected", Fault.DEVICE),
    _Sticky(214, "uncorrectable ecc error", Fault.DEVICE),
    _Sticky(220, "uncorrectable nvlink error", Fault.DEVICE),
    _Sticky(999, "unknown error", Fault.DEVICE),  # what a device that fell off the bus leaves
    _Sticky(700, "illegal memory access", Fault.KERNEL),
    _Sticky(702, "the launch timed out and was terminated", Fault.KERNEL),
    _Sticky(709, "context is destroyed", Fault.KERNEL),
    _Sticky(710, "device-side assert", Fault.KERNEL),
    _Sticky(714, "hardware stack error", Fault.KERNEL),
    _Sticky(715, "an illegal instruction was encountered", Fault.KERNEL),
    _Sticky(716, "misaligned address", Fault.KERNEL),
    _Sticky(717, "operation not supported on global/shared address space", Fault.KERNEL),
    _Sticky(718, "invalid program counter", Fault.KERNEL),
    _Sticky(719, "unspecified launch failure", Fault.KERNEL),
)
_OUT_OF_MEMORY_CODE = 2
_OUT_OF_MEMORY = (
    "out of memory",
    "cannot allocate memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
_ACCELERATORS = ("cuda", "hip error", "accelerator", "cublas", "cudnn", "nccl", "triton error")
_OFF_THE_BUS = "fallen off the bus"
# What the system says of a file that will not be there, or readable, the next time either.
_LASTING = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
_NUMBER_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # of errors that come out of Rust


def fault_of(error: BaseException) -> Fault:
    """The meaning of an exception that a pass raised."""
    if isinstance(error, DeviceLostError):
        return Fault.DEVICE if error.blameless else Fault.KERNEL
    if isinstance(error, MemoryError) or _is_torch(error, "OutOfMemoryError"):
        return Fault.MEMORY
    if isinstance(error, OSError):
        return Fault.MEMORY if error.errno == errno.ENOMEM else Fault.OTHER
    if not isinstance(error, RuntimeError):
        return Fault.OTHER
    text, code = str(error).lower(), getattr(error, "error_code", None)
    if code == _OUT_OF_MEMORY_CODE or any(words in text for words in _OUT_OF_MEMORY):
        return Fault.MEMORY
    if _OFF_THE_BUS in text:
        return Fault.DEVICE
    on_device = _is_torch(error, "AcceleratorError") or any(n in text for n in _ACCELERATORS)
    known = (s.fault for s in _STICKY if s.code == code or (on_device and s.words in text))
    return next(known, Fault.OTHER)


def may_pass(error: BaseException) -> bool:
    """Whether loading a model failed for its surroundings' sake, so that it may be loaded later.

    transformers says with an `OSError` too what is wrong with a model; those have no number.
    """
    if fault_of(error) is not Fault.OTHER:
        return True
    if not isinstance(error, OSError):
        return False
    in_words = _NUMBER_IN_WORDS.search(str(error))
    number = int(in_words[1]) if in_words else error.errno
    return number is not None and number not in _LASTING


def _is_torch(error: BaseException, name: str) -> bool:
    """Whether torch raised it, as this class of its own. Nothing is loaded to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, getattr(torch, name))


def engine_error(error: BaseException, doing: str) -> EngineError:
    """The error that tickets fail with: `DeviceLostError` if a new process is needed to go on."""
    fault = fault_of(error)
    message = f"{doing} failed: {first_line(error)}"
    if fault in (Fault.DEVICE, Fault.KERNEL):
        return DeviceLostError(message, blameless=fault is Fault.DEVICE)
    return EngineError(message)


def with_type(error: BaseException) -> str:
    """`Type: message` in one line."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"
