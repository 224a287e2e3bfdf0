"""Builds the C sources with the machine's compiler, once, and loads them.

The library is kept in the user's cache, named by a hash of the sources, the compiler and the
processor. Without a compiler the caller takes the torch path; the reason is in the exception.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-pthread")
# Noise must round like its definition, product by product; the decoder may fuse.
_UNITS = {"decoder.c": (), "sampling.c": ("-ffp-contract=off",), "drafting.c": ()}
_BUILD_SEC = 120
ARITHMETIC_VERSION = "1"  # raised when the kernels' bits change


class NativeUnavailableError(Exception):
    """The C kernels cannot be used here; the message says why."""


def library() -> ctypes.CDLL:
    """The loaded library. Raises `NativeUnavailableError`.

    What came of the first call is remembered in this process, failures too: a compiler that fails
    takes its time. The switch is looked at each time.
    """
    if os.environ.get("SPECBATCH_NATIVE", "1") == "0":
        raise NativeUnavailableError("switched off by SPECBATCH_NATIVE=0")
    found = outcome()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@lru_cache(maxsize=1)
def outcome() -> ctypes.CDLL | str:
    """The library, built if it must be, or why it cannot be had."""
    try:
        return _load()
    except NativeUnavailableError as error:
        return str(error)


def arithmetic(dtype: str) -> str:
    """How the kernels compute in a dtype on this processor: `f32`, `bf16/dot` or `bf16/amx`.

    Raises `NativeUnavailableError`.
    """
    if dtype == "float32":
        return "f32"
    return "bf16/amx" if library().specbatch_amx() else "bf16/dot"


def _load() -> ctypes.CDLL:
    if platform.system() != "Linux":
        raise NativeUnavailableError(f"not built on {platform.system()}")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NativeUnavailableError("no C compiler was found")
    try:
        target = _cache_folder() / f"native-{_fingerprint(compiler)}.so"
        if not target.exists():
            _build(compiler, target)
    except (OSError, RuntimeError) as error:  # no home, or a cache that cannot be written
        raise NativeUnavailableError(f"the user's cache cannot be used: {error}") from error
    try:
        loaded = ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailableError(f"{target.name} cannot be loaded: {error}") from error
    log.info("native kernels from %s", target)
    return loaded


def _build(compiler: str, target: Path) -> None:
    """Compile into a temporary file, then rename: processes may race, all win."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for unit, flags in _UNITS.items():
            objects.append(str(Path(folder) / unit) + ".o")
            _run([compiler, *_FLAGS, *flags, "-c", str(_SOURCES / unit), "-o", objects[-1]])
        linked = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", "-o", str(linked), *objects, "-lm"])
        linked.replace(target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SEC)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[:3]
        raise NativeUnavailableError(f"the C compiler failed: {' / '.join(reason)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"the C compiler failed: {error}") from error


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "specbatch"


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(version + repr((_FLAGS, _UNITS)).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def processor_name() -> str:
    """The model of processor, as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _processor() -> str:
    """Model and features: -march=native means something else elsewhere."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return platform.machine() + line
    return platform.machine()
