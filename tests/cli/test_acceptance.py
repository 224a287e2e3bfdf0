"""`specbatch acceptance`: nights beside their baseline, and a baseline that is accepted."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.speculation import AcceptanceCount

NIGHTS = 60


def learn(folder: Path, name: str, fall: float) -> None:
    """Nights up to this one; the newest three weeks fall by this share each."""
    url = f"sqlite:///{folder / 'specbatch-data' / 'specbatch.db'}"
    now = time.time()
    for night in range(NIGHTS):
        at = now - (NIGHTS - 1 - night) * 86_400.0
        store = SqlStore(url, clock=lambda at=at: at)
        agreed = 700.0 * (1.0 - fall) ** max(0, night + 21 - NIGHTS)
        counts = [AcceptanceCount("ngram:2", tag, agreed, 1_000.0) for tag in (None, "news")]
        store.learn_acceptance("default", name, counts)
        store.close()


def test_nights_are_shown_beside_their_baseline(cli: Any, folder: Path) -> None:
    learn(folder, "nightly", 0.01)
    told = cli("acceptance", "nightly", "--nights", 3)
    assert told.code == 0
    _, *rows = told.out.splitlines()
    assert [row.split()[0] for row in rows] == ["ngram"] * 6 + ["ngram,"] * 2
    assert rows[0].split()[-4:] == ["1,000", "58.4%", "70.0%", "83%"]
    assert "ngram, news: falls slowly (score" in rows[-1]
    (series, _) = cli("acceptance", "nightly", "--json").json["series"]
    assert (series["proposer"], series["tag"], len(series["nights"])) == ("ngram", None, 14)
    assert series["baseline"]["falls"]
    accepted = cli("acceptance", "nightly", "--accept")
    assert "no baseline yet" in accepted.out
    assert f"{2 * (NIGHTS - 1)} earlier figures are no baseline any more" in accepted.out
    assert len(cli("acceptance", "nightly", "--json").json["series"]) == 2, "nothing is deleted"


def test_a_steady_job_has_no_slow_fall_and_an_unknown_one_no_nights(cli: Any, folder: Path) -> None:
    learn(folder, "steady", 0.0)
    assert cli("acceptance", "steady").out.count("no slow fall (score 0.0, a fall from 12 on)") == 2
    for more in ([], ["--json"]):
        missing = cli("acceptance", "steady", "--tenant", "other", *more)
        assert (missing.code, missing.complaint) == (
            2,
            "nothing was drafted for jobs named 'steady' of tenant 'other'; names of its jobs: "
            "none",
        )


def test_two_models_of_one_name_have_a_line_each(cli: Any, folder: Path) -> None:
    with closing(SqlStore(f"sqlite:///{folder / 'specbatch-data' / 'specbatch.db'}")) as store:
        for fingerprint, agreed in (("a" * 64, 900.0), ("b" * 64, 100.0)):
            count = AcceptanceCount("draft:2", None, agreed, 1_000.0, fingerprint=fingerprint)
            store.learn_acceptance("default", "docs", [count])
    told = cli("acceptance", "docs").out.splitlines()
    assert ["aaaaaaaaaaaa" in told[1], "90.0%" in told[1]] == [True, True]
    assert ["bbbbbbbbbbbb" in told[2], "10.0%" in told[2]] == [True, True]
    assert told[3].startswith("draft, 2 models together, (no tag): ")
    (series,) = cli("acceptance", "docs", "--json").json["series"]
    assert [night["acceptance"] for night in series["nights"]] == [0.9, 0.1]
