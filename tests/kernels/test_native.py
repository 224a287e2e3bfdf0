"""The C kernels are really there: otherwise every test of them would test something else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbatch.kernels import native


@pytest.fixture
def afresh() -> Iterator[None]:
    """Nothing is remembered, before and after."""
    native.outcome.cache_clear()
    yield
    native.outcome.cache_clear()


def test_the_c_kernels_build_and_load_with_this_machines_compiler() -> None:
    assert shutil.which("cc") or shutil.which("gcc"), "install a C compiler (Debian: gcc)"
    assert native.library().specbatch_decode is not None


def test_the_environment_can_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is native.library()
    monkeypatch.setenv("SPECBATCH_NATIVE", "0")
    with pytest.raises(native.NativeUnavailableError, match="SPECBATCH_NATIVE"):
        native.library()


@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeUnavailableError, match="no C compiler"):
        native.library()


@pytest.mark.usefixtures("afresh")
def test_a_cache_that_cannot_be_written_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(native.NativeUnavailableError, match="cache"):
        native.library()


@pytest.mark.usefixtures("afresh")
def test_a_compiler_that_fails_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    compiler = tmp_path / "failing-cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo 1.0\necho x >>{calls}\n'
        "echo 'no such instruction' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(3):
        with pytest.raises(native.NativeUnavailableError, match="failed: no such instruction"):
            native.library()
    assert calls.read_text() == "x\n"
