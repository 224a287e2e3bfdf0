"""The kernels in a C program of their own: the same digests at every level, on aarch64 too.

`driver.c` makes its inputs by integer arithmetic; `expected.txt` holds what its kernels wrote once.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from specbatch.kernels import native
from support.tree import ROOT

HERE = Path(__file__).parent / "driver"
SOURCES = ROOT / "kernels" / "csrc"
EXPECTED = (HERE / "expected.txt").read_text().split("\n")
FLAGS = ("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-static", "-Wno-psabi")
AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
LEVELS = {
    "portable": ("-DLEVEL=portable", "-DPORTABLE"),
    "x86-64-v3": ("-DLEVEL=v3", "-march=x86-64-v3"),
    "avx512": ("-DLEVEL=avx512", *AVX512),
    "avx512-bf16": ("-DLEVEL=avx512_bf16", *AVX512, "-mavx512bf16"),
}


def digests(
    compiler: str, flags: tuple[str, ...], folder: Path, runner: tuple[str, ...]
) -> list[str]:
    program = folder / "driver"
    units = [HERE / "driver.c", SOURCES / "team.c", SOURCES / "levels.c"]
    command = [compiler, *FLAGS, *flags, f"-I{SOURCES}", *map(str, units), "-lm", "-lpthread"]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True)
    done = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True)
    return done.stdout.split("\n")


@pytest.mark.pipeline  # compiles a program for each
@pytest.mark.parametrize("level", [level for level in LEVELS if level in native.available()])
def test_every_level_writes_what_was_written_once(level: str, tmp_path: Path) -> None:
    assert digests("cc", LEVELS[level], tmp_path, ()) == EXPECTED


@pytest.mark.integration
@pytest.mark.skipif(platform.machine() != "x86_64", reason="aarch64 is emulated on x86-64 only")
@pytest.mark.parametrize("flags", [("-DLEVEL=neon",), ("-DLEVEL=portable", "-DPORTABLE")], ids=str)
def test_aarch64_writes_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    for program in (compiler, emulator):
        assert shutil.which(program), "install gcc-aarch64-linux-gnu and qemu-user"
    assert digests(compiler, flags, tmp_path, (emulator,)) == EXPECTED
