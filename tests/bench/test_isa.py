"""Other engines are held to the forced level, and a row says whether that was seen to hold."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specbatch.jobs.bench.peers as package
from specbatch.jobs.bench import isa
from specbatch.jobs.bench.contenders import Completed, looked_at
from specbatch.jobs.bench.isa import Seen, denying, facts, forced_level, limits, verdict
from specbatch.jobs.bench.machine import Idling, cpu_seconds
from specbatch.jobs.bench.peer_client import PeerSpec, environment_of
from specbatch.jobs.bench.peers.serve import seen_since

pytestmark = pytest.mark.pipeline  # starts processes

V3 = "x86-64-v3"


def names(level: str | None) -> tuple[str, ...]:
    found = limits(level)
    keys = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
    return tuple(found.get(key, "") for key in (*keys, "TORCHINDUCTOR_CPP_MARCH"))


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (None, ("", "", "", "")),
        (V3, ("AVX2", "avx2", "AVX2", "x86-64-v3")),
        ("avx512", ("AVX512_CORE", "avx512", "AVX512", "x86-64-v4")),
        ("avx512-bf16", ("AVX512_CORE_BF16", "avx512", "AVX512_E3", "cooperlake")),
    ],
)
def test_each_library_is_told_the_level_by_its_own_variable(
    level: str | None, wanted: tuple[str, ...]
) -> None:
    assert names(level) == wanted
    assert limits(level).get("OV_CPU_MAX_ISA", "") == wanted[0]  # it has oneDNN's names
    assert ("GLIBC_TUNABLES" in limits(level)) == (level == V3)


def test_a_peer_gets_the_variables_of_its_level_and_as_many_threads(tmp_path: Path) -> None:
    spec = PeerSpec("p", "python", tmp_path, tmp_path, "float32", 3, tmp_path / "work")
    assert environment_of(spec) == {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "3"}
    held = PeerSpec("p", "python", tmp_path, tmp_path, "float32", 3, tmp_path / "work", isa=V3)
    found = environment_of(held)
    assert limits(V3).items() <= found.items()
    assert found["OMP_NUM_THREADS"] == "3"


def test_an_environment_with_intel_s_openmp_gets_it_preloaded(tmp_path: Path) -> None:
    spec = PeerSpec(
        "p", str(tmp_path / "bin" / "python"), tmp_path, tmp_path, "float32", 1, tmp_path
    )
    assert "LD_PRELOAD" not in environment_of(spec)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert environment_of(spec)["LD_PRELOAD"] == str(library)
    held = environment_of(replace(spec, isa=V3))["LD_PRELOAD"].split(":")
    assert held[-1] == str(library)
    assert held[:-1] == list(filter(None, [denying(V3, tmp_path).get("LD_PRELOAD")]))


@pytest.mark.parametrize(
    ("forced", "level"),
    [(None, None), ("", None), ("amx", None), (V3, V3), ("avx512-bf16", "avx512-bf16")],
)
def test_the_highest_level_holds_nobody(forced: str | None, level: str | None) -> None:
    assert forced_level({} if forced is None else {isa.FORCED: forced}) == level


@pytest.mark.parametrize("level", ["portable", "neon"])
def test_a_level_to_which_nobody_can_be_held_is_never_verified(level: str, tmp_path: Path) -> None:
    assert forced_level({isa.FORCED: level}) == level
    assert limits(level) == denying(level, tmp_path) == {}
    assert verdict(level, Seen(avx512=False, amx=False)) == (
        False,
        "other engines cannot be restricted to it",
    )


@pytest.mark.parametrize(
    ("level", "seen", "kept", "words"),
    [
        (V3, Seen(avx512=False, amx=False), True, "no thread used AVX-512 registers"),
        (V3, Seen(avx512=True, amx=False, denied=True), False, "AVX-512 registers were used"),
        (V3, Seen(avx512=False, amx=True), False, "may use AMX"),
        (V3, Seen(), False, "does not report"),
        ("avx512", Seen(avx512=True, amx=False), False, "only AMX is surely excluded"),
        ("avx512", Seen(avx512=True, amx=False, denied=True), True, "denied more"),
        ("avx512-bf16", Seen(avx512=True, amx=True, denied=True), False, "may use AMX"),
    ],
)
def test_a_limit_counts_only_where_it_was_seen_to_hold(
    level: str, seen: Seen, kept: bool, words: str
) -> None:
    assert verdict(level, seen)[0] == kept
    row = facts(level, seen, "built for AVX2")
    assert (row["isa"], row["isa_verified"]) == (level, kept)
    assert words in row["isa_by"]
    assert row["isa_by"].endswith("; built for AVX2")


def test_a_row_without_a_level_claims_nothing() -> None:
    assert facts(None, Seen(avx512=True)) == {"isa": "the machine's"}


def test_one_use_in_any_run_is_remembered() -> None:
    seen = Seen()
    for avx512 in (False, True, False):
        seen = seen.with_later(Seen(avx512, amx=False, denied=True))
    assert seen == Seen(avx512=True, amx=False, denied=True)


def test_a_contender_of_this_process_says_what_it_kept() -> None:
    run = looked_at(lambda prompts: Completed(1.0, prompts, {"steps": 3}), None)
    assert run([[1]]).facts == {"steps": 3, "isa": "the machine's"} | {
        key: value for key, value in run([[1]]).facts.items() if key == "isa_by"
    }
    assert run([[1]]).facts["isa_by"].startswith("torch dispatches for ")


ASK = """
import ctypes, subprocess, sys, torch
library = ctypes.CDLL(None)
print(torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_supported(),
      library.specbatch_cpuid_limited() if hasattr(library, "specbatch_cpuid_limited") else 0)
"""


def test_a_library_without_a_variable_sees_a_smaller_processor(tmp_path: Path) -> None:
    """Where the kernel can make `cpuid` fault; elsewhere nothing is changed, nor claimed."""
    variables = denying(V3, tmp_path)
    if not variables:  # another kind of processor: its compiler refuses the source
        assert os.uname().machine != "x86_64"
        return
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    capability, avx512, limited = done.stdout.split()
    if limited == "1":
        assert (capability, avx512) == ("AVX2", "False")
    assert denying(None, tmp_path) == {}


def test_without_a_compiler_the_variables_alone_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert denying(V3, tmp_path) == {}


def test_what_was_seen_has_the_names_of_what_is_judged() -> None:
    found = seen_since(time.perf_counter())
    assert set(found) == {"avx512", "amx", "denied"}
    assert Seen(**found).denied is False


@pytest.mark.parametrize(
    ("level", "built_for", "above"),
    [
        ("", ["AVX2", "AVX512", "AMX_INT8"], []),
        (V3, ["SSE3", "AVX2", "FMA"], []),
        (V3, ["AVX2", "AVX512", "AVX512_BF16"], ["AVX512", "AVX512_BF16"]),
        ("avx512", ["AVX512", "AVX512_VNNI", "AVX512_BF16"], ["AVX512_BF16"]),
        ("avx512-bf16", ["AVX512_BF16", "AMX_INT8"], ["AMX_INT8"]),
    ],
)
def test_a_build_of_llama_cpp_above_the_level_is_refused(
    level: str, built_for: list[str], above: list[str]
) -> None:
    file = Path(package.__file__).with_name("llama_cpp.py")
    check: Any = runpy.run_path(str(file))["check_build"]
    if not above:
        check(level, built_for)
        return
    with pytest.raises(ValueError, match=f"has {', '.join(above)}, and {level} is forced"):
        check(level, built_for)


def test_a_process_that_does_not_keep_still_is_noticed() -> None:
    """One that spins, then one that sleeps, while this process runs."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    still = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        while cpu_seconds(busy.pid) < 0.2:
            time.sleep(0.02)
        idling = Idling(lambda: {"busy": busy.pid, "still": still.pid})
        for name in ("", "busy"):
            with idling.during(name, f"timed: {name}"):
                time.sleep(0.3)
        assert (idling.cores("timed: ") or 0) > 0.05
        assert (idling.cores("timed: busy") or 0) < 0.05
        assert idling.cores("never timed") is None
    finally:
        for process in (busy, still):
            process.kill()
            process.wait()
