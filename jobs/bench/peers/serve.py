"""A peer's process: `python -I serve.py ENGINE.py` answers JSON lines. Knows nothing of specbatch.

The first line is one of the first two, those after a model the third. An answer may be `{"error":
reason}`. Completions are greedy and ignore the end of text.

    {"convert": folder, "into": folder, "dtype": name}                   -> {"done": true}
    {"model": folder, "dtype": name, "threads": n, "options": {...}}
                                                        -> {"versions": {...}, "isa": words}
    {"prompts": [[id, ...], ...], "new_tokens": n}
                       -> {"seconds": s, "outputs": [[id, ...], ...], "counts": {}, "seen": {...}}

ENGINE.py defines `convert(source, target, dtype)` and `Engine(model, dtype, threads, options)` with
`versions()`, `prepare(sequences, tokens)` (not timed) and `generate(prompts, new_tokens)` (timed).
Its `isa()`, if it has one, says what it was built for; `seen` is what `seen_since` says.

An engine that drafts is also asked with `"depth": n`, which `generate` then gets, and one that
replays with `"known"` and `"drafts"` (shaped like the outputs: what will come, and guesses of it),
which its `learn(prompts, known, drafts)` gets before (not timed). If that returns True, it made
something anew, whose first run is cold: all is generated once more before, and not timed. Its
`counts` (tokens `proposed` and `accepted`) are in the answer.
Isolated (`-I`), for else this folder's `llama_cpp.py` would hide the package it imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
SWITCHED_SEC = 0.02  # the kernel notes what a thread used when it takes the thread off its core
ARCH_PRCTL, ARCH_GET_XCOMP_PERM, AMX_DATA = 158, 0x1022, 18


def main(source: str) -> None:
    if sys.platform == "linux":  # stopped between two lines, it could not see that nobody asks
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries write to file descriptor 1 as well, so redirect it to the error stream.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    state: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = reply(json.loads(line), source, state)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answers, answer)


def reply(asked: dict[str, Any], source: str, state: dict[str, Any]) -> dict[str, Any]:
    """Answer one line; `state` keeps the engine once there is one."""
    if "prompts" in asked:
        engine, prompts, new_tokens = state["engine"], asked["prompts"], asked["new_tokens"]
        engine.prepare(len(prompts), max(map(len, prompts)) + new_tokens)
        depth = {"depth": asked["depth"]} if "depth" in asked else {}
        if "drafts" in asked and engine.learn(prompts, asked["known"], asked["drafts"]):
            engine.generate(prompts, new_tokens, **depth)
        begun = time.perf_counter()
        outputs = engine.generate(prompts, new_tokens, **depth)
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "outputs": outputs,
            "counts": getattr(engine, "counts", {}),
            "seen": seen_since(begun),
        }
    module = runpy.run_path(source)
    if "convert" in asked:
        module["convert"](Path(asked["convert"]), Path(asked["into"]), asked["dtype"])
        return {"done": True}
    state["engine"] = module["Engine"](
        Path(asked["model"]), asked["dtype"], asked["threads"], asked["options"]
    )
    engine = state["engine"]
    return {"versions": engine.versions(), "isa": engine.isa() if hasattr(engine, "isa") else ""}


def seen_since(begun: float) -> dict[str, bool | None]:
    """Of the instruction sets that this process used since a `perf_counter` time."""
    limited = getattr(ctypes.CDLL(None), "specbatch_cpuid_limited", None)
    return {
        "avx512": avx512_since(begun),
        "amx": amx_permitted(),
        "denied": bool(limited and limited()),
    }


def avx512_since(begun: float) -> bool | None:
    """Whether a thread of this process used AVX-512 registers; None if unknown."""
    time.sleep(SWITCHED_SEC)
    elapsed_ms = (time.perf_counter() - begun) * 1000
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread ended
            words = (thread / "arch_status").read_text().split()
            if words[:1] == ["AVX512_elapsed_ms:"]:
                found.append(0 <= int(words[1]) < elapsed_ms)
    return any(found) if found else None


def amx_permitted() -> bool | None:
    """Whether this process asked the kernel for AMX's registers and has them; None if unknown."""
    if platform.machine() != "x86_64":
        return None
    permitted = ctypes.c_uint64()
    libc = ctypes.CDLL(None)
    if libc.syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(permitted)):
        return None
    return bool(permitted.value >> AMX_DATA & 1)


def write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
