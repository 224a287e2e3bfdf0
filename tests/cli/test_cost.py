"""`specbatch cost`, the saved money of `show`, and a forecast from history."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flags_of_a_job, run_in, write

from specbatch.jobs.cli.cost import saved_line
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.timekeeping import SessionRow
from support.databases import migrated
from support.models import TinyPair

KINDS = ("prefill", "verify", "draft", "rejected", "padding", "overhead", "lost", "idle", "pending")


BY = ("tenant", "job", "proposer", "tag", "day")


def paid_for(told: Any) -> int:
    return sum(int(told["parts"][kind]["units"]) for kind in KINDS)


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair
) -> tuple[Path, dict[str, Any]]:
    """A folder with a job of tenant a and one of tenant b, and what was told of the latter."""
    folder = tmp_path_factory.mktemp("site")
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    for tenant in ("a", "b"):
        flags = ("--tenant", tenant, "--output", f"out-{tenant}", "--json")
        done = run_in(folder, "submit-job", *flags_of_a_job(tiny_pair), "--local", *flags)
        assert done.code == 0, done.err
    return folder, done.json


@pytest.fixture
def done(
    site: tuple[Path, dict[str, Any]], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What was told of the job of tenant b, in the folder of both; tests only look at them."""
    assert cli
    monkeypatch.chdir(site[0])
    return site[1]


def test_where_nothing_was_leased_nothing_cost(cli: Any) -> None:
    assert "no costs yet" in cli("cost").out


def test_all_that_was_leased_is_somewhere_and_lines_add_up(cli: Any, done: dict[str, Any]) -> None:
    told = cli("cost", "--json").json
    assert told["job"] is None
    assert paid_for(told) == int(told["paid"]["units"]) > 0
    assert int(told["paid"]["units"]) == told["paid"]["ticks"] * 200_000
    assert told["parts"]["idle"]["ticks"] > 0
    assert told["parts"]["verify"]["ticks"] > 0
    assert told["parts"]["lost"]["ticks"] == told["parts"]["pending"]["ticks"] == 0
    assert (told["figures"]["jobs"], told["figures"]["documents"]) == (2, 24)
    for by in BY:
        told = cli("cost", "--by", by, "--json").json
        units = [int(line["cost"]["units"]) for line in told["lines"]]
        assert sum(units) == int(told["figures"]["cost"]["units"]), by
        assert sum(line["documents"] for line in told["lines"]) == 24, by
        names = {line["name"] for line in told["lines"]}
        assert (names == {"a", "b"}) == (by == "tenant")
        shown = cli("cost", "--by", by)
        assert "balance" in shown.out
        assert "do not add up" not in shown.out
    assert_of_one_job(cli("cost", done["job"][:15], "--json").json, done)
    assert "against depth 0: " in cli("show", done["job"]).out
    assert "saved_usd" in cli("show", done["job"], "--json").json


@pytest.mark.parametrize("is_live", [True, False])
def test_parts_that_differ_from_the_sum_are_told_where_nobody_works_any_more(
    cli: Any, done: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    assert done
    sessions = SqlStore.sessions

    def with_more(store: SqlStore) -> list[SessionRow]:
        """While a worker works, what it gives to jobs changes between two statements."""
        ended = [replace(one, spent=one.spent + 7, leased=one.accounted + 7)
                 for one in sessions(store)]  # fmt: skip
        return [replace(one, leased=None, ended_at=None) for one in ended] if is_live else ended

    assert "do not add up" not in cli("cost").out
    monkeypatch.setattr(SqlStore, "sessions", with_more)
    shown = cli("cost").out
    assert ("the parts above do not add up to this" in shown) == (not is_live)
    assert ("workers continued while it was read" in shown) == is_live


BOOK = {
    **{"box/local/spot": 3.5, "cpu/local/reserved": 1},  # of device hours
    **{"cpu_hour": 0.048, "store_statements": 0.2, "stored_gb": 0.069},
}
UNITS = {  # of money, for one of a counter: by the book, and 3.6e16 units to a dollar
    "cpu_ticks": 48_000,
    "store_statements": 200_000 * 36_000,
    "stored_bytes": 69_000 * 36,
}


def test_a_job_costs_what_its_stages_used_and_tokens_bear_all_of_it(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_PRICE_BOOK", json.dumps(BOOK))
    monkeypatch.setenv("SPECBATCH_DEVICE_KIND", "box")
    monkeypatch.setenv("SPECBATCH_TENURE", "spot")
    done = cli("submit-job", *job, "--local", "--json").json
    told = cli("cost", done["job"], "--json").json
    for stage, one in told["stages"].items():
        used = sum(one["used"][counter] * price for counter, price in UNITS.items())
        parts = sum(int(units) for units in one["units"].values())
        assert int(one["sum"]["units"]) == parts == used + int(one["units"]["device"]), stage
        assert (int(one["sum"]["units"]) > 0) == (stage != "propose"), "nothing is written ahead"
        assert one["lost"]["units"] == one["pending"]["units"] == "0", stage
    whole = sum(int(one["sum"]["units"]) for one in told["stages"].values())
    device = sum(int(one["units"]["device"]) for one in told["stages"].values())
    assert device == int(told["paid"]["units"]), "the balance is of devices"
    everything = cli("cost", "--json").json["paid"]
    assert int(everything["units"]) == everything["ticks"] * 3_500_000, "as the book has it"
    figures = told["figures"]
    assert int(figures["cost"]["units"]) == whole > device
    usd = whole / 3.6e16
    assert figures["usd_per_1k_tokens"] == pytest.approx(1000 * usd / done["tokens"])
    assert figures["usd_per_document"] == pytest.approx(usd / 12)
    for by in BY:
        lines = cli("cost", "--by", by, "--json").json["lines"]
        assert sum(int(line["cost"]["units"]) for line in lines) == whole, by
    shown = cli("show", done["job"])
    assert f"; ${usd:.6f} in all" in shown.out
    for summary in (shown.out, cli("watch", done["job"]).out):
        assert re.search(rf"\bcost\W+\${usd:.6f}\b", summary), summary
        assert re.search(rf"cost per 1k tokens\W+\${1000 * usd / done['tokens']:.6f}", summary)
    assert cli("show", done["job"], "--json").json["stages"] == told["stages"]
    assert "by stage, in dollars" in cli("cost", done["job"]).out
    forecast = cli("submit-job", *job, "--dry-run", "--json", "--output", "out2").json["forecast"]
    assert forecast["usd"]["middle"] == pytest.approx(usd)
    assert cli("report", done["job"], "--output", "report.html").code == 0
    assert "Cost by stage" in Path("report.html").read_text()


def assert_of_one_job(told: Any, done: Any) -> None:
    """It has what its rows had, and nothing else."""
    assert told["job"] == done["job"]
    assert paid_for(told) == int(told["paid"]["units"])
    assert told["parts"]["idle"]["ticks"] == 0
    figures = told["figures"]
    assert figures["tokens"] == done["tokens"]
    assert figures["cost"]["usd"] == pytest.approx(done["cost_usd"])
    assert figures["usd_per_document"] == pytest.approx(done["cost_usd"] / 12)
    per_1k = 1000 * done["cost_usd"] / done["tokens"]
    assert figures["usd_per_1k_tokens"] == pytest.approx(per_1k)


def test_a_plan_foretells_the_cost_by_earlier_nights(
    cli: Any, job: Any, done: dict[str, Any]
) -> None:
    plan = ("submit-job", *job, "--dry-run")
    assert cli(*plan, "--json").json["forecast"] is None, "other tenants' jobs say nothing"
    assert "no finished job of this name" in cli(*plan).out
    told = cli(*plan, "--json", "--tenant", "b").json["forecast"]
    assert told["jobs"] == 1
    cost = cli("cost", done["job"], "--json").json["figures"]["cost"]["usd"]
    assert told["usd"]["middle"] == pytest.approx(cost)
    assert told["completion_tokens"]["middle"] == pytest.approx(done["tokens"])
    assert "forecast cost" in cli(*plan, "--tenant", "b").out


def test_a_price_that_is_no_whole_number_of_millionths_is_refused(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_PRICE_BOOK", '{"box/local/spot": 0.1234567}')
    assert "at most six decimals" in cli("cost").complaint
    monkeypatch.setenv("SPECBATCH_PRICE_BOOK", '{"box/spot": 0.1}')
    assert cli("cost").code == 2


@pytest.mark.parametrize(
    ("controls", "why"), [(1, "there was only one"), (16, "one of the jobs had only one")]
)
def test_why_there_is_no_interval_is_true_of_one_job_and_of_several(
    controls: int, why: str
) -> None:
    line = saved_line(Savings(0.5, None, None, 1.0, 1.5, controls), is_drafted=True)
    assert (
        line == f"saved against depth 0: $0.500000 (1.50×), without an interval: {why} control step"
    )
