"""The mutation tester: its mutants are Python, its areas exist, and it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbatch.tools import mutation
from specbatch.tools.mutation import AREAS, mutants_of, planted, wilson
from support.tree import ROOT


@pytest.mark.parametrize("area", AREAS)
def test_an_area_names_modules_and_tests_that_are_there(area: str) -> None:
    patterns, tests = AREAS[area]
    assert all(list(ROOT.glob(pattern)) for pattern in patterns)
    assert all((ROOT / path).exists() for path in tests)


def test_every_mutant_is_python_and_differs() -> None:
    path = ROOT / "pipeline" / "policy" / "breaker.py"
    source = path.read_bytes()
    mutants = list(mutants_of(path))
    assert len(mutants) > 10
    for mutant in mutants:
        start, end = mutant.span
        assert source[start:end].decode() == mutant.was != mutant.now
        compile(source[:start] + mutant.now.encode() + source[end:], path, "exec")


def test_the_module_is_put_back_when_a_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("def small(x):\n    return x < 3\n")
    seen = []

    def interrupted() -> None:
        with planted(next(iter(mutants_of(path)))):
            seen.append(path.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["def small(x):\n    return not (x < 3)\n"]
    assert path.read_text() == "def small(x):\n    return x < 3\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_interval_is_wilson_s() -> None:
    low, high = wilson(103, 120)
    assert (round(low, 4), round(high, 4)) == (0.7848, 0.9096)
    assert wilson(120, 120)[1] == pytest.approx(1.0)
