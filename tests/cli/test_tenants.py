"""`specbatch tenants`: set, list and remove; and what commands say of a job that waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contracts.test_budgets import GROUP, claim, ingest, limit, record

from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.budgets import Period


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_ACTOR", "alice@laptop")
    monkeypatch.setenv("SPECBATCH_TENANT_WEIGHTS", '{"acme": 3}')


def test_budgets_are_set_listed_and_removed(cli: Any, folder: Path) -> None:
    assert "no tenant has a budget" in cli("tenants").err
    to_set = ("tenants", "set", "acme", "--reason", "a plan")
    done = cli(*to_set, "--period", "day", "--tokens", "100")
    assert done.code == 0
    assert done.out.startswith(
        "tenant acme has a budget of 100 tokens a day, 100 tokens left; set "
    )
    assert done.out.endswith(" by alice@laptop: a plan\n")
    cli(*to_set, "--period", "total", "--tokens", "1000", "--usd", "4.5")
    store = open_store(f"sqlite:///{folder}/specbatch-data/specbatch.db")
    ingest(store, "job-0000001", groups=2)
    work = claim(store)
    assert work is not None
    record(store, work)
    assert claim(store) is not None
    listed = cli("tenants")
    assert listed.out.count("acme") == 3
    assert "4 tokens left; set" in listed.out
    under_way = GROUP * 1.0 / 32  # at the price of the tokens that are recorded
    said = f"and ${3.5 - under_way:.4f} left if the groups under way cost ${under_way:.4f}, as"
    assert said in " ".join(listed.out.split())
    (acme,) = cli("tenants", "list", "--json").json
    assert (acme["share"], acme["reserved_tokens"]) == (3, GROUP)
    assert acme["spent"]["day"] == {"tokens": 32, "usd": 1.0}
    assert [one["left_tokens"] for one in acme["budgets"]] == [4, 1000 - 32 - GROUP]
    gone = cli("tenants", "remove", "acme", "--period", "day", "--reason", "it is over")
    assert gone.code == 0
    again = cli("tenants", "remove", "acme", "--period", "day", "--reason", "it is over")
    assert again.complaint.startswith("tenant acme has no budget for day: ")
    first, second = cli("tenants", "list", "--history").out.splitlines()
    assert first.endswith("ended by alice@laptop: it is over")
    assert second.startswith("acme: 1,000 tokens and $4.50, total, set at ")
    store.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "acme", "--period", "day", "--tokens", "9"], "needs --reason"),
        (["set", "acme", "--tokens", "9", "--reason", "r"], "needs a tenant and --period"),
        (["set", "--period", "day", "--tokens", "9", "--reason", "r"], "needs a tenant"),
        (["set", "acme", "--period", "day", "--reason", "r"], "--tokens, --usd or both"),
        (["set", "a b", "--period", "day", "--usd", "1", "--reason", "r"], "letters, digits"),
        (["set", "a" * 101, "--period", "day", "--usd", "1", "--reason", "r"], "1 to 100 char"),
        (["set", "a", "--period", "day", "--tokens", "0", "--reason", "r"], "from 1 to"),
        (["set", "a", "--period", "day", "--usd", "nan", "--reason", "r"], "must be above 0"),
        (
            ["remove", "a", "--period", "day", "--usd", "1", "--reason", "r"],
            "`specbatch tenants set`",
        ),
        (["set", "a", "--period", "day", "--json"], "for `specbatch tenants list`"),
        (["list", "acme"], "lists all tenants"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Any, arguments: list[str], said: str) -> None:
    done = cli("tenants", *arguments)
    assert done.code == 2
    assert said in done.complaint


def test_show_and_top_say_which_budget_a_job_waits_for(cli: Any, folder: Path) -> None:
    store = open_store(f"sqlite:///{folder}/specbatch-data/specbatch.db")
    ingest(store, "job-0000001", groups=2)
    limit(store, GROUP + 1, Period.MONTH)
    assert claim(store) is not None
    said = "waits for its tenant's budget of 65 tokens a month: 1 tokens are left, 64 are reserved"
    assert said in " ".join(cli("show", "job-0000001").out.split())
    assert said in cli("show", "job-0000001", "--json").json["waits_for"]
    assert said in " ".join(cli("top").out.split())
    store.close()
