"""Loads the C kernels and chooses the instruction set that this processor runs them with.

One library holds the kernels once per level: the same sources, compiled for it. In float32 all
levels give the same bits, in bfloat16 all of x86-64 but `amx`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import struct
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

log = logging.getLogger(__name__)

# From the least to the best; a processor runs those its architecture has up to some level.
LEVELS = ("portable", "neon", "x86-64-v3", "avx512", "avx512-bf16", "amx")
FORCED_BY = "SPECBATCH_NATIVE_ISA"
# Part of every numeric class. Raise it with any change that can change a bit, on either path.
ARITHMETIC_VERSION = "1"
_MODULE = "specbatch.kernels._native"
_OTHER_VERSION = "the C kernels are of another version of specbatch; install it again"
_AT, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FUNCTIONS: dict[str, list[type]] = {  # of every level, with their arguments
    "decode": [_AT, _AT, _INT],
    "draft": [_AT, _AT, _AT, _INT, _AT, _AT, _AT, _INT],
    "generate": [_AT] * 10 + [_INT],
    "sample": [_AT, _INT],
    "gumbel": [_AT, _LONG, _LONG, ctypes.c_uint32, _AT],
    "pack": [_INT, _AT, _INT, _INT, _AT],
    "panel": [],
    "product": [_INT, _INT, _AT, _AT, _AT, _INT],
    "acts": [_INT, _INT, _INT, _AT, _AT],
}
_SHARED: dict[str, list[type]] = {  # that need no level
    "rotary": [_AT, _LONG, _LONG, ctypes.c_float, _AT, _AT],
    "match": [_AT, _AT, _AT, _LONG, _AT],
    "settle": [],
}
_SYMBOLS = {
    "x86-64-v3": "v3",
    "avx512-bf16": "avx512_bf16",
}  # of levels whose name is no identifier


class NativeUnavailableError(Exception):
    """The C kernels cannot be used here; the message says why. The caller takes the torch path."""


class InstructionSetError(ValueError):
    """The instruction set that was asked for is unknown, or this processor does not have it."""


class Kernels(SimpleNamespace):
    """The exported functions of one level (`_FUNCTIONS`, `_SHARED`). Tensors pass as addresses."""

    level: str
    reason: str  # why it was chosen


def library() -> Kernels:
    """The kernels at the level of this process.

    Raises `NativeUnavailableError` where there are none, and `InstructionSetError` for a level
    that cannot be had. Both variables are looked at each time.
    """
    if os.environ.get("SPECBATCH_NATIVE", "1") == "0":
        raise NativeUnavailableError("switched off by SPECBATCH_NATIVE=0")
    return at_level(os.environ.get(FORCED_BY) or None)


def arithmetic(dtype: str) -> str:
    """What decides the bits of a native pass in this dtype.

    `f32`, or for bfloat16 `bf16/amx`, `bf16/dot` (all else on x86-64) or `bf16/` and the machine,
    whose way of flushing denormals may differ. Raises `NativeUnavailableError`.
    """
    if dtype == "float32":
        return "f32"
    if library().level == "amx":
        return "bf16/amx"
    machine = platform.machine().lower().replace("_", "-")
    return "bf16/dot" if machine in ("x86-64", "amd64") else f"bf16/{machine}"


@lru_cache(maxsize=8)
def at_level(forced: str | None) -> Kernels:
    """The kernels of one level; of the best that this processor has, if none is named."""
    loaded = _loaded()
    if isinstance(loaded, str):
        raise NativeUnavailableError(loaded)
    level, reason = _chosen(loaded, forced)
    symbol = _SYMBOLS.get(level, level)
    try:
        functions = {
            **{n: _function(loaded, f"{n}_{symbol}", of) for n, of in _FUNCTIONS.items()},
            **{n: _function(loaded, n, of) for n, of in _SHARED.items()},
        }
    except AttributeError as error:
        raise NativeUnavailableError(f"{_OTHER_VERSION}: {error}") from error
    log.info("native kernels at level %s: %s", level, reason)
    return Kernels(level=level, reason=reason, **functions)


def _function(loaded: ctypes.CDLL, name: str, arguments: list[type]) -> Any:
    function = loaded[f"specbatch_{name}"]  # one of its own: others may declare it otherwise
    function.argtypes = arguments
    return function


def start_watch(step: ctypes.c_int64, seconds: float, message: str, code: int) -> bool:
    """Have a thread without Python end the process with `code`, after `message` on stderr, once
    `step` has held the same number but 0 for so long. False: there is no library for it.

    `step` must live as long as the process.
    """
    loaded = _loaded()
    if isinstance(loaded, str) or not hasattr(loaded, "specbatch_watch"):
        return False
    watch = loaded["specbatch_watch"]
    watch.argtypes = [_AT, ctypes.c_double, ctypes.c_char_p, ctypes.c_int]
    return bool(watch(ctypes.addressof(step), seconds, message.encode(), code))


def available() -> list[str]:
    """The levels that this processor runs, the best first; none without the library."""
    loaded = _loaded()
    if isinstance(loaded, str):
        return []
    return [name for name in reversed(LEVELS) if _supports(loaded, name) == 1]


def _chosen(loaded: ctypes.CDLL, forced: str | None) -> tuple[str, str]:
    have = available()
    if forced is None:
        allowed = (level for level in have if loaded.specbatch_enter(level.encode()))
        return next(allowed), "the best that this processor has"
    if forced not in LEVELS:
        raise InstructionSetError(
            f"{FORCED_BY}={forced} is not an instruction set: use one of {', '.join(have)}"
        )
    if forced not in have:
        why = "this processor" if _supports(loaded, forced) == 0 else "this build"
        raise InstructionSetError(
            f"{FORCED_BY}={forced} is not supported by {why}: use one of {', '.join(have)}"
        )
    if not loaded.specbatch_enter(forced.encode()):
        raise InstructionSetError(f"{FORCED_BY}={forced}: the system does not let a process use it")
    return forced, f"forced by {FORCED_BY}"


def _supports(loaded: ctypes.CDLL, level: str) -> int:
    return int(loaded.specbatch_supports(level.encode()))


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL | str:
    """The library, or why it cannot be had."""
    found = importlib.util.find_spec(_MODULE)
    if found is None or found.origin is None:
        return (
            "the C kernels were not built when specbatch was installed: there was no C compiler, "
            "or one older than GCC 11 and Clang 14; install one, then specbatch again"
        )
    path = Path(found.origin)
    try:
        if not _is_whole(path):
            return f"{path.name} is cut short: install specbatch again"
        loaded = ctypes.CDLL(str(path))
        loaded.specbatch_supports.restype = ctypes.c_int
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    except AttributeError as error:
        return f"{_OTHER_VERSION}: {error}"
    return loaded


def _is_whole(path: Path) -> bool:
    """Whether an ELF file reaches to the end of its section table, which stands last. Loading one
    that does not would end the process."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if header[:5] != b"\x7fELF\x02":
        return True  # whatever it is, loading it says so
    table, entry, count = struct.unpack_from("<Q10xHH", header, 40)
    return int(table + entry * count) <= size


def processor_name() -> str:
    """The model of processor, as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
