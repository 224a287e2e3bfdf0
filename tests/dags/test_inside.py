"""The tests of `inside/`, each by its own name: they run where each scheduler is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from dags.conftest import INSIDE, RunInside


def sentences(name: str) -> list[str]:
    """The tests of a file, which cannot be imported here."""
    tree = ast.parse((INSIDE / f"in_{name}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def check(run_inside: RunInside, name: str, sentence: str) -> None:
    """All parameters of the test, of which there must be one at least."""
    inside = run_inside(name)
    mine = {n: f for n, f in inside.failures.items() if n.partition("[")[0] == sentence}
    assert mine, inside.log[-4000:]
    failed = [n for n, failure in mine.items() if failure]
    assert not failed, inside.log[-12000:]


@pytest.mark.parametrize("sentence", sentences("airflow"))
def test_in_airflow(run_inside: RunInside, sentence: str) -> None:
    check(run_inside, "airflow", sentence)


@pytest.mark.parametrize("sentence", sentences("dagster"))
def test_in_dagster(run_inside: RunInside, sentence: str) -> None:
    check(run_inside, "dagster", sentence)


@pytest.mark.parametrize("sentence", sentences("prefect"))
def test_in_prefect(run_inside: RunInside, sentence: str) -> None:
    check(run_inside, "prefect", sentence)


def test_no_file_of_tests_is_left_out() -> None:
    files = {path.stem for path in Path(INSIDE).glob("in_*.py")}
    assert files == {"in_airflow", "in_dagster", "in_prefect"}
