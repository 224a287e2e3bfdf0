"""Restricts other engines to the instruction set level that this engine is forced to.

`SPECBATCH_NATIVE_ISA` names the level. Libraries read variables of their own when they load, but
OpenVINO's float32 products ask the processor alone. So peers also get a processor that denies what
is above the level (`peers/cpuid.c`), where the kernel can do that. The limit is then verified: the
kernel knows which threads used AVX-512 registers, and whether a process may use those of AMX. This
module needs neither torch nor the engine, since it runs before they load.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORCED = "SPECBATCH_NATIVE_ISA"
HIGHEST = "amx"
MACHINE = "the machine's"  # in place of a level in rows without a forced one
CPUID_SOURCE = Path(__file__).parent / "peers" / "cpuid.c"


@dataclass(frozen=True, slots=True)
class Limit:
    """The libraries' names of a level, and the bits of `cpuid` that it lacks."""

    onednn: str
    mkl: str
    aten: str
    march: str
    denied: tuple[int, int, int, int]  # ebx, ecx, edx of leaf 7; eax of its subleaf 1


def _bits(*positions: int) -> int:
    return sum(1 << position for position in positions)


_AMX = _bits(22, 24, 25)  # in edx
_FP16 = _bits(23)
_LATER = _bits(21)  # AMX's float16, in eax of subleaf 1
LIMITS = {
    "x86-64-v3": Limit(
        *("AVX2", "AVX2", "avx2", "x86-64-v3"),
        (
            _bits(16, 17, 21, 26, 27, 28, 30, 31),  # AVX512-F, DQ, IFMA, PF, ER, CD, BW, VL
            _bits(1, 6, 11, 12, 14),  # AVX512-VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
            _AMX | _FP16 | _bits(2, 3, 8),
            _LATER | _bits(4, 5),  # AVX-VNNI, AVX512-BF16
        ),
    ),
    "avx512": Limit(
        *("AVX512_CORE", "AVX512", "avx512", "x86-64-v4"), (0, 0, _AMX | _FP16, _LATER | _bits(5))
    ),
    "avx512-bf16": Limit(
        *("AVX512_CORE_BF16", "AVX512_E3", "avx512", "cooperlake"), (0, 0, _AMX | _FP16, _LATER)
    ),
}
# The C library's string functions and numpy use AVX-512 as well. That gains little, but once a
# thread has used the registers they count as used, which would hide whether an engine uses them.
GLIBC = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD"
NUMPY = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"


def forced_level(environment: Mapping[str, str]) -> str | None:
    """The level that a run is restricted to; None for the machine's own."""
    level = environment.get(FORCED) or None
    return None if level == HIGHEST else level


def limits(level: str | None) -> dict[str, str]:
    """Variables that restrict libraries to a level. They must be set before the libraries load."""
    limit = LIMITS.get(level or "")
    if limit is None:
        return {}
    found = {
        "ONEDNN_MAX_CPU_ISA": limit.onednn,  # torch's, OpenVINO's and vLLM's own copies
        "OV_CPU_MAX_ISA": limit.onednn,  # OpenVINO's kernels beside oneDNN
        "ATEN_CPU_CAPABILITY": limit.aten,
        "MKL_ENABLE_INSTRUCTIONS": limit.mkl,
        "TORCHINDUCTOR_CPP_MARCH": limit.march,
    }
    if level == "x86-64-v3":
        found |= {
            "GLIBC_TUNABLES": GLIBC,
            "NPY_DISABLE_CPU_FEATURES": NUMPY,
            "OPENBLAS_CORETYPE": "Haswell",  # numpy's copy
        }
    return found


def restart_held(level: str | None) -> None:
    """Restart this process's program with the variables of a level, unless it has them, because
    some must be set when a process starts. Returns only if there is nothing to do."""
    wanted = limits(level)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def denying(level: str | None, work: Path) -> dict[str, str]:
    """The variables that preload `cpuid.c` for a level, compiled into `work`; none without `cc`."""
    compiler = shutil.which("cc")
    if level not in LIMITS or compiler is None:
        return {}
    library = work / "cpuid.so"
    if not library.exists():
        work.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(CPUID_SOURCE)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return {}  # another kind of processor
    masks = " ".join(f"{mask:x}" for mask in LIMITS[level].denied)
    return {"LD_PRELOAD": str(library), "SPECBATCH_BENCH_CPUID": masks}


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of a process that completed prompts; None where the kernel gives none."""

    avx512: bool | None = None  # a thread used its registers
    amx: bool | None = None  # the process may use its registers
    denied: bool | None = False  # the processor denied what is above the level

    def with_later(self, later: Seen) -> Seen:
        """Both observations together; `denied` holds for the whole life of a process."""
        return Seen(_either(self.avx512, later.avx512), _either(self.amx, later.amx), later.denied)


def _either(one: bool | None, other: bool | None) -> bool | None:
    if one is None or other is None:
        return other if one is None else one
    return one or other


def verdict(level: str, seen: Seen) -> tuple[bool, str]:
    """(whether the limit was surely kept, why)."""
    if level not in LIMITS:
        return False, "other engines cannot be restricted to it"
    if seen.avx512 is None or seen.amx is None:
        return False, "this kernel does not report which registers were used"
    if seen.amx:
        return False, "the process may use AMX"
    if level == "x86-64-v3":
        if seen.avx512:
            return False, "AVX-512 registers were used"
        return True, "no thread used AVX-512 registers, and the process may not use AMX"
    if seen.denied:
        return True, "the processor denied more, and the process may not use AMX"
    return False, "only AMX is surely excluded: registers do not show the kinds of AVX-512"


def facts(level: str | None, seen: Seen, own_words: str = "") -> dict[str, Any]:
    """For a row of results. What was not verified counts only on a machine of that level."""
    if level is None:
        return {"isa": MACHINE} | ({"isa_by": own_words} if own_words else {})
    kept, why = verdict(level, seen)
    words = "; ".join(filter(None, [why, own_words]))
    return {"isa": level, "isa_verified": kept, "isa_by": words}
