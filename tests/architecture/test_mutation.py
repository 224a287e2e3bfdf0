"""The mutation tester: its mutants are Python, and they change what is imported."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from specbatch.tools import mutation
from specbatch.tools.mutation import (
    AREAS,
    Calls,
    Mutant,
    mutants_of,
    note_calls,
    plant,
    wilson,
)
from support.tree import ROOT

MODULE = """
from dataclasses import dataclass
from functools import cache

LIMIT = 3


def is_small(x):
    return x < LIMIT


@cache
def doubled(x):
    return x * 2


@dataclass(frozen=True)
class Box:
    size: int = 1

    @property
    def is_large(self):
        return self.size >= 5

    @classmethod
    def of(cls, size):
        def inner():
            return size + 1

        return cls(inner())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the product that is imported, and one that imported its names."""
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "small.py").write_text(MODULE)
    made, importer = types.ModuleType("specbatch.small"), types.ModuleType("importer")
    monkeypatch.setitem(sys.modules, "specbatch.small", made)
    monkeypatch.setitem(sys.modules, "importer", importer)
    made.__file__ = str(tmp_path / "small.py")
    exec(compile(MODULE, str(tmp_path / "small.py"), "exec"), made.__dict__)
    importer.__dict__.update({k: v for k, v in vars(made).items() if not k.startswith("__")})
    return importer


def mutant_to(now: str) -> Mutant:
    found = [one for one in mutants_of(mutation.ROOT / "small.py") if one.now == now]
    assert len(found) == 1, found
    return found[0]


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


def test_a_function_is_changed_for_whoever_imported_it(module: types.ModuleType) -> None:
    assert module.is_small(2)
    plant(mutant_to("(x >= LIMIT)"))
    assert not module.is_small(2)


def test_a_cached_function_forgets_what_it_returned(module: types.ModuleType) -> None:
    assert module.doubled(4) == 8
    plant(mutant_to("(x / 2)"))
    assert module.doubled(4) == 2


def test_a_property_and_a_function_within_a_class_method_are_changed(
    module: types.ModuleType,
) -> None:
    box = module.Box(5)
    plant(mutant_to("(self.size > 5)"))
    assert not box.is_large
    plant(mutant_to("(size - 1)"))
    assert module.Box.of(3) == module.Box(2)


def test_a_constant_and_a_default_are_changed_for_whoever_imported_them(
    module: types.ModuleType,
) -> None:
    plant(mutant_to("(4)"))
    assert module.LIMIT == 4
    assert module.is_small(3)
    [default] = [one for one in mutants_of(mutation.ROOT / "small.py") if one.line == 19]
    plant(default)
    assert module.Box().size == 2


def test_a_mutant_meets_the_tests_that_call_its_function_quickest_first(
    module: types.ModuleType,
) -> None:
    called: set[tuple[str, str]] = set()
    note_calls(mutation.ROOT / "small.py", called)
    module.Box.of(1)
    assert called == {("small.py", "Box.of")}
    slow, quick, other = Calls(2.0, set(called)), Calls(1.0, set(called)), Calls(0.5)
    assert mutation.tests_of(mutant_to("(size - 1)"), [slow, quick, other]) == [1, 0]
    assert mutation.tests_of(mutant_to("(4)"), [slow, quick, other]) == [2, 1, 0]


def test_a_mutant_that_no_test_meets_survives(module: types.ModuleType) -> None:
    assert mutation.verdict(mutant_to("(x >= LIMIT)"), []) == mutation.PASSED
    assert not module.is_small(2)


def test_the_interval_is_wilson_s() -> None:
    low, high = wilson(103, 120)
    assert (round(low, 4), round(high, 4)) == (0.7848, 0.9096)
    assert wilson(120, 120)[1] == pytest.approx(1.0)
