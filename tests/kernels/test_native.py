"""The C kernels are really there, at the level that was asked for."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from specbatch.kernels import native


@pytest.fixture
def afresh() -> Iterator[None]:
    """Nothing is remembered, before and after."""
    for clear in (native.at_level.cache_clear, native._loaded.cache_clear):
        clear()
    yield
    for clear in (native.at_level.cache_clear, native._loaded.cache_clear):
        clear()


def test_the_c_kernels_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.FORCED_BY, raising=False)
    kernels = native.library()
    assert kernels.level == native.available()[0], "the best level is chosen"
    assert "best" in kernels.reason


def test_the_environment_can_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is native.library()
    monkeypatch.setenv("SPECBATCH_NATIVE", "0")
    with pytest.raises(native.NativeUnavailableError, match="SPECBATCH_NATIVE"):
        native.library()


@pytest.mark.parametrize("level", native.available())
def test_a_level_that_the_processor_has_can_be_forced(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.FORCED_BY, level)
    assert native.library().level == level
    assert native.FORCED_BY in native.library().reason


def test_an_unknown_level_is_named_with_those_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(native.FORCED_BY, "sse9")
    with pytest.raises(
        native.InstructionSetError, match=r"sse9 is not an instruction set.*portable"
    ):
        native.library()


def test_a_level_of_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next(name for name in native.LEVELS if name not in native.available())
    monkeypatch.setenv(native.FORCED_BY, missing)
    with pytest.raises(native.InstructionSetError, match=f"{missing} is not supported by this"):
        native.library()


@pytest.mark.usefixtures("afresh")
def test_an_installation_without_the_library_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(native.NativeUnavailableError, match="no C compiler"):
        native.library()
    assert native.available() == []


@pytest.mark.usefixtures("afresh")
def test_a_library_that_is_cut_short_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec("specbatch.kernels._native")
    assert found is not None
    assert found.origin is not None
    whole = Path(found.origin).read_bytes()
    damaged = tmp_path / "_native.so"
    for length in (100, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:length])
        spec = ModuleSpec("specbatch.kernels._native", None, origin=str(damaged))
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name, spec=spec: spec)
        native._loaded.cache_clear()
        with pytest.raises(native.NativeUnavailableError, match="cut short"):
            native.library()


@pytest.mark.usefixtures("afresh")
def test_a_library_of_another_version_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "_native.so"
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(other)]
    subprocess.run(command, check=True)
    spec = ModuleSpec("specbatch.kernels._native", None, origin=str(other))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    with pytest.raises(native.NativeUnavailableError, match="another version"):
        native.library()


@pytest.mark.usefixtures("afresh")
def test_a_library_that_cannot_be_loaded_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "_native.so"
    damaged.write_bytes(b"not a library")
    spec = ModuleSpec("specbatch.kernels._native", None, origin=str(damaged))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    with pytest.raises(native.NativeUnavailableError, match=r"_native\.so cannot be loaded"):
        native.library()


@pytest.mark.parametrize(
    ("level", "kind"),
    [("portable", "bf16/dot"), ("x86-64-v3", "bf16/dot"), ("amx", "bf16/amx")],
)
def test_the_arithmetic_of_a_level(level: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if level not in native.available():
        level, kind = "portable", "bf16/dot"
    monkeypatch.setenv(native.FORCED_BY, level)
    assert native.arithmetic("bfloat16") == kind
    assert native.arithmetic("float32") == "f32"
