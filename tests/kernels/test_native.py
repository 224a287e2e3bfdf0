"""The C kernels are really there: otherwise every test of them would test something else."""

from __future__ import annotations

import shutil

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
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    native.library.cache_clear()
    with pytest.raises(native.NativeUnavailableError, match="no C compiler"):
        native.library()
    native.library.cache_clear()
