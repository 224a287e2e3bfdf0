"""What the engine does when a forward pass raises: what the exception means, who is at fault, and
how large the next pass may be.

A processor's allocator raises a plain `RuntimeError`, so words must decide there. CUDA errors carry
the runtime's number in `error_code` where torch raised them itself, and only words where a library
or a kernel of ours did. `Sticky` ones spoil the process's context: each later call fails alike,
until a new process is started.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from specbatch.schemas.errors import DeviceLostError, EngineError, first_line

RECOVER_AFTER_PASSES = 64  # passes without trouble until twice as many tokens are tried again

Member = TypeVar("Member")
Result = TypeVar("Result")


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


# --- who is at fault ----------------------------------------------------------------------------
@dataclass(slots=True)
class Isolated(Generic[Member, Result]):
    """What came of a batch: results of the parts that passed, in order, and who raises alone."""

    passed: list[tuple[list[Member], Result]] = field(default_factory=list)
    raising: list[tuple[Member, Exception]] = field(default_factory=list)


def isolate(
    members: Sequence[Member],
    attempt: Callable[[list[Member]], Result],
    is_everyones: Callable[[Exception], bool],
) -> Isolated[Member, Result]:
    """Attempt halves, and halves of the halves that raise, down to single members.

    For a batch whose attempt raised as a whole. With k members at fault of n it takes about
    2 · k · log2(n) attempts. An exception that `is_everyones` (no member can be blamed for it) is
    raised on at once.
    """
    found: Isolated[Member, Result] = Isolated()
    halves = _halves(list(members))
    while halves:
        part = halves.pop(0)
        try:
            result = attempt(part)
        except Exception as error:
            if is_everyones(error):
                raise
            if len(part) == 1:
                found.raising.append((part[0], error))
            else:
                halves[:0] = _halves(part)
        else:
            found.passed.append((part, result))
    return found


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
        """Memory ran out a short while ago: drafts must wait."""
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
