"""The C kernels are really there: otherwise every test of them would test something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specbatch.kernels import native


def test_the_c_kernels_build_and_load_with_this_machines_compiler() -> None:
    assert shutil.which("cc") or shutil.which("gcc"), "install a C compiler (Debian: gcc)"
    assert native.library().specbatch_decode is not None


def test_the_environment_can_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_NATIVE", "0")
    native.library.cache_clear()
    with pytest.raises(native.NativeUnavailableError, match="SPECBATCH_NATIVE"):
        native.library()
    native.library.cache_clear()


def test_without_a_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    native.library.cache_clear()
    with pytest.raises(native.NativeUnavailableError, match="no C compiler"):
        native.library()
    native.library.cache_clear()


def test_a_cache_that_cannot_be_written_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    native.library.cache_clear()
    with pytest.raises(native.NativeUnavailableError, match="cache"):
        native.library()
    native.library.cache_clear()
