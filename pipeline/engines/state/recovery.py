"""What the engine does when a forward pass raises: what the exception means, who is at fault, and
how large the next pass may be.

A processor's allocator raises a plain `RuntimeError`, so words must decide there. CUDA errors carry
the runtime's number in `error_code` where torch raised them itself, and only words where a library
or a kernel of ours did. Sticky ones spoil the process's context: each later call fails alike,
until a new process is started.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from specbatch.schemas.errors import DeviceLostError, EngineError, first_line

RECOVER_AFTER_PASSES = 64  # passes without trouble until twice as many tokens are tried again

Member = TypeVar("Member")
Result = TypeVar("Result")


class Fault(StrEnum):
    """The cause of a failed pass."""

    MEMORY = "memory"  # a smaller pass may fit
    DEVICE = "device"  # the device or its driver is gone
    KERNEL = "kernel"  # a kernel broke the process's context; its input may be why
    OTHER = "other"


# Codes (cudaError_t) and messages (cudaGetErrorString, in lower case) of the CUDA runtime; HIP uses
# the same.
_STICKY = (
    (4, "driver shutting down", Fault.DEVICE),
    (46, "device(s) is/are busy or unavailable", Fault.DEVICE),
    (100, "no cuda-capable device is detected", Fault.DEVICE),
    (214, "uncorrectable ecc error", Fault.DEVICE),
    (220, "uncorrectable nvlink error", Fault.DEVICE),
    (999, "unknown error", Fault.DEVICE),  # what a device that fell off the bus leaves
    (700, "illegal memory access", Fault.KERNEL),
    (702, "the launch timed out and was terminated", Fault.KERNEL),
    (709, "context is destroyed", Fault.KERNEL),
    (710, "device-side assert", Fault.KERNEL),
    (714, "hardware stack error", Fault.KERNEL),
    (715, "an illegal instruction was encountered", Fault.KERNEL),
    (716, "misaligned address", Fault.KERNEL),
    (717, "operation not supported on global/shared address space", Fault.KERNEL),
    (718, "invalid program counter", Fault.KERNEL),
    (719, "unspecified launch failure", Fault.KERNEL),
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
# Errors of files that a retry will not find or read either.
_LASTING = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
_NUMBER_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # of errors that come out of Rust


def fault_of(error: BaseException) -> Fault:
    """The cause of an exception that a pass raised."""
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
    known = (
        fault for number, words, fault in _STICKY if number == code or (on_device and words in text)
    )
    return next(known, Fault.OTHER)


def may_pass(error: BaseException) -> bool:
    """Whether loading a model failed because of its surroundings, so that a retry may work.

    transformers also raises `OSError` for a broken model, but without an error number.
    """
    if fault_of(error) is not Fault.OTHER:
        return True
    if not isinstance(error, OSError):
        return False
    in_words = _NUMBER_IN_WORDS.search(str(error))
    number = int(in_words[1]) if in_words else error.errno
    return number is not None and number not in _LASTING


def _is_torch(error: BaseException, name: str) -> bool:
    """Whether it is torch's exception of this name. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, getattr(torch, name))


def engine_error(error: BaseException, doing: str) -> EngineError:
    """The error that tickets fail with: `DeviceLostError` if a new process is needed."""
    fault = fault_of(error)
    message = f"{doing} failed: {first_line(error)}"
    if fault in (Fault.DEVICE, Fault.KERNEL):
        return DeviceLostError(message, blameless=fault is Fault.DEVICE)
    return EngineError(message)


def with_type(error: BaseException) -> str:
    """`Type: message` in one line."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


# --- who is at fault ----------------------------------------------------------------------------
def isolate(
    members: Sequence[Member],
    attempt: Callable[[list[Member]], Result],
    is_everyones: Callable[[Exception], bool],
) -> tuple[list[Result], list[tuple[Member, Exception]]]:
    """Attempt halves, and halves of the halves that raise, down to single members.

    Returns the results of the parts that passed, in order, and the members that raise alone. For a
    batch whose attempt raised as a whole. With k of n members at fault it takes about
    2 · k · log2(n) attempts. An exception for which no member is to blame (`is_everyones`) is
    raised at once.
    """
    passed: list[Result] = []
    raising: list[tuple[Member, Exception]] = []
    halves = _halves(list(members))
    while halves:
        part = halves.pop(0)
        try:
            result = attempt(part)
        except Exception as error:
            if is_everyones(error):
                raise
            if len(part) == 1:
                raising.append((part[0], error))
            else:
                halves[:0] = _halves(part)
        else:
            passed.append(result)
    return passed, raising


def _halves(members: list[Member]) -> list[list[Member]]:
    middle = (len(members) + 1) // 2
    return [half for half in (members[:middle], members[middle:]) if half]


# --- how large the next pass may be -------------------------------------------------------------
@dataclass(slots=True)
class TokenBudget:
    """Halved when a pass runs out of memory, doubled again up to `most` when passes go well."""

    most: int
    now: int = 0
    _passes: int = 0

    def __post_init__(self) -> None:
        self.now = self.most

    @property
    def strained(self) -> bool:
        """Memory ran out recently: drafts must wait."""
        return self.now < self.most

    def halve(self, used: int) -> bool:
        """After a pass of `used` tokens ran out of memory. False: there is no smaller pass."""
        if used <= 1:
            return False
        # Draft tokens may come on top of the most: half of those would be more than that.
        self.now, self._passes = max(1, min(used, self.most) // 2), 0
        return True

    def passed(self) -> None:
        """A pass went well."""
        if not self.strained:
            return
        self._passes += 1
        if self._passes >= RECOVER_AFTER_PASSES:
            self.now, self._passes = min(self.most, 2 * self.now), 0
