"""Every test is in exactly one tier, and what CI runs has every tier but the long one."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from engine.conftest import BOTH_PATHS

from support.servers import PrivateRedis, PrivateServer, ServerError
from support.tiers import COLLECTED, FOLDERS, NEEDS, TIER_OF, TIERS, tier_of
from support.tree import ROOT

TARGETS = {"check": "unit", "test": "unit,pipeline", "test-integrations": "integration",
           "test-serve": "unit,pipeline,integration", "test-long": "long"}  # fmt: skip


def test_every_test_of_this_run_is_in_one_tier(pytestconfig: pytest.Config) -> None:
    collected = pytestconfig.stash[COLLECTED]
    assert collected
    assert {item.stash[TIER_OF] for item in collected} <= set(TIERS)
    assert [name for name, times in Counter(i.nodeid for i in collected).items() if times > 1] == []


def test_every_folder_of_tests_has_a_tier() -> None:
    with_tests = {path.relative_to(ROOT / "tests").parts[0]
                  for path in (ROOT / "tests").glob("*/**/test_*.py")}  # fmt: skip
    assert with_tests == set(FOLDERS)
    assert not list((ROOT / "tests").glob("test_*.py"))


@pytest.mark.parametrize(
    ("marks", "needs", "tier"),
    [
        ([], ["tmp_path"], "unit"),
        (["parametrize", "pipeline"], [], "pipeline"),
        (["pipeline", "long"], [], "long"),
        ([], ["redis_server"], "pipeline"),
        (["unit"], ["redis_server"], "pipeline"),
        ([], ["redis_server", "rabbit_server"], "integration"),
        ([], ["store", "postgres"], "pipeline"),
        (["long"], ["rabbit_server"], "long"),
    ],
)
def test_the_highest_of_marks_and_servers_counts(
    marks: list[str], needs: list[str], tier: str
) -> None:
    assert tier_of("policy", marks, needs) == tier


def test_a_mark_counts_more_than_the_folder() -> None:
    assert FOLDERS["dags"] == "integration"
    assert tier_of("dags", ["unit"], []) == "unit"


def test_a_unit_test_can_start_no_server() -> None:
    assert not PrivateServer.may_start
    with pytest.raises(ServerError, match="mark it `pipeline`"):
        PrivateRedis().__enter__()


def test_every_fixture_of_a_server_is_known() -> None:
    text = (ROOT / "tests" / "conftest.py").read_text()
    made = re.findall(r"def (\w+)\(.*\) -> Iterator\[Private", text)
    assert made
    assert set(made) <= set(NEEDS)


def test_targets_of_make_run_every_tier_and_ci_all_but_the_long_one() -> None:
    makefile = (ROOT / "Makefile").read_text()
    run = dict(re.findall(r"^([a-z-]+):.*\n(?:\t.*\n)*?\t@tools/setup/run-\w+ --tier (\S+)",
                          makefile, re.MULTILINE))  # fmt: skip
    assert run == TARGETS
    assert {tier for tiers in run.values() for tier in tiers.split(",")} == set(TIERS)
    ci = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {tier for target in ci for tier in run[target].split(",")} == set(TIERS) - {"long"}
    assert all(f"\n    make {target} " in (ROOT / "CONTRIBUTING.md").read_text() for target in run)
    assert all(f"\n    make {target} " in (ROOT / "README.md").read_text() for target in ci)


def test_files_that_run_on_both_paths_of_the_engine_are_there() -> None:
    """One that is renamed would lose its torch path."""
    there = {path.stem for path in (ROOT / "tests" / "engine").glob("test_*.py")}
    assert there >= BOTH_PATHS
