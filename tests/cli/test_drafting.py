"""`specbatch drafting`: off, on and list, and what `show` says of a job meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import ingest
from ledger.builders import JOB

from specbatch.pipeline.ledger.sql.migrate import open_store


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_ACTOR", "alice@laptop")


def test_what_is_switched_off_is_listed_until_it_is_on_again_and_then_in_the_history(
    cli: Any,
) -> None:
    assert cli("drafting", "list").out == "drafting is switched off for nothing\n"
    done = cli("drafting", "off", "--tenant", "search", "--tag", "de", "--reason", "it is slow")
    assert done.code == 0
    assert done.out.startswith("drafting is off for tenant search, tag de: ")
    again = cli("drafting", "off", "--tenant", "search", "--tag", "de", "--reason", "as above")
    assert again.code == 0
    assert again.out.startswith("already off: tenant search, tag de, off since ")
    assert again.out.endswith(" by alice@laptop: it is slow\n")
    (listed,) = cli("drafting", "list", "--json").json
    assert listed["scope"] == {"tenant": "search", "job_name": "", "tag": "de", "proposer": ""}
    assert (listed["off_by"], listed["on_by"]) == ("alice@laptop", None)
    cli("drafting", "off", "--reason", "an incident")
    done = cli("drafting", "on", "--tenant", "search", "--tag", "de")
    assert done.code == 0
    assert done.out.splitlines()[1].startswith("still off: everything, off since ")
    assert len(cli("drafting", "list").out.splitlines()) == 1
    first, second = cli("drafting", "list", "--history").out.splitlines()
    assert first.endswith(" by alice@laptop")
    assert "; on again at " in first
    assert "; on again at " not in second


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["off"], "needs --reason"),
        (["off", "--reason", " "], "needs --reason"),
        (["on", "--reason", "it is fast"], "--reason is for `specbatch drafting off`"),
        (["on", "--tag", "de"], "drafting was not switched off for tag de"),
        (["on", "--json"], "--history and --json are for `specbatch drafting list`"),
        (["list", "--tag", "de"], "lists all switches"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Any, arguments: list[str], said: str) -> None:
    refused = cli("drafting", *arguments)
    assert refused.code == 2
    assert said in refused.complaint


def test_show_says_what_is_switched_off_for_a_job_that_is_not_over(cli: Any, folder: Path) -> None:
    store = open_store(f"sqlite:///{folder / 'specbatch-data' / 'specbatch.db'}")
    ingest(store, groups=1)
    store.close()
    cli("drafting", "off", "--job", "nightly", "--tag", "de", "--reason", "it is slow")
    cli("drafting", "off", "--job", "hourly", "--reason", "it is slow")
    (line,) = [x for x in cli("show", JOB).out.splitlines() if x.startswith("drafting is")]
    assert line.startswith("drafting is switched off for job nightly, tag de, off since ")
    assert line.endswith(" by alice@laptop: it is slow")
    (one,) = cli("show", JOB, "--json").json["drafting_switched_off"]
    assert one["scope"]["job_name"] == "nightly"
