"""`specbatch spot-check`: a share of one model's rows, written again by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.pipeline.operations.spot_checks import Lot
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.policy.ratios import share_of
from support.models import TinyPair, tiny_llama


@pytest.fixture
def small(cli: Any, tiny_pair: TinyPair) -> str:
    """A job of the small model alone; its id."""
    made = cli(
        *("submit-job", "--input", "prompts.parquet", "--output", "small", "--max-tokens", 6),
        *("--verifier", tiny_pair.draft, "--temperature", 0.7, "--local", "--json"),
    )
    assert made.code == 0, made.err
    found: str = made.json["job"]
    return found


def texts(folder: str | Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in read_output(str(folder)).to_pylist()}


def checked() -> dict[str, str]:
    """The texts of the one check."""
    (folder,) = Path.cwd().glob("small-spot-check-*")
    return texts(folder)


def rows_drawn(lot: Lot, of: int = 12) -> Iterator[str]:
    return (f"row-{i}" for i in range(of) if lot.draws(i))


def test_drawn_rows_are_written_again_and_compared(
    cli: Any, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 0.5, "--seed", 3)
    done = cli("spot-check", small, *flags, "--local", "--json")
    assert done.code == 0, done.err
    found, mine, theirs = done.json, texts("small"), checked()
    assert list(theirs) == list(rows_drawn(Lot(0.5, 3)))
    assert 0 < len(theirs) < 12
    same = sum(mine[row] == theirs[row] for row in theirs)
    assert (found["drawn"]["rows"], found["drawn"]["same"]) == (len(theirs), same)
    low, high = found["drawn"]["interval_95"]
    assert low <= same / len(theirs) <= high
    assert found["flagged"]["rows"] == found["unfinished"] == 0
    # what checks would have written the same alone, with the same noise
    alone = cli(
        *("submit-job", "--input", "prompts.parquet", "--output", "large", "--max-tokens", 6),
        *("--verifier", tiny_pair.verifier, "--temperature", 0.7, "--local", "--json"),
    )
    assert alone.code == 0, alone.err
    assert {row: text for row, text in texts("large").items() if row in theirs} == theirs

    again = cli("spot-check", small, *flags)
    assert again.code == 0, again.err
    assert f"job {found['check']} is this check, and done" in again.err
    assert f"{same} of {len(theirs)} rows are the same" in again.out
    assert cli("spot-check", small, *flags, "--json").json == found


def test_a_model_agrees_with_itself_and_its_outputs_were_drafts(
    cli: Any, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.draft, "--share", 1, "--local", "--least", 100)
    done = cli("spot-check", small, *flags)
    assert done.code == 0, done.err
    assert "12 of 12 rows are the same (100.0%)" in done.out
    assert texts("small") == checked()


def test_less_agreement_than_asked_for_is_an_exit_code(
    cli: Any, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--local", "--least", 100)
    done = cli("spot-check", small, *flags)
    assert done.code == 1
    assert "fewer than 100 % of the drawn rows are the same" in done.err


def test_flagged_rows_are_checked_and_told_apart(cli: Any, small: str, tiny_pair: TinyPair) -> None:
    text = texts("small")["row-4"]
    flags = ("--by", tiny_pair.verifier, "--share", 0, "--flag", r"any=(?s).", "--local", "--json")
    done = cli("spot-check", small, *flags)
    assert done.code == 0, done.err
    with_text = sum(bool(one) for one in texts("small").values())
    assert text
    assert done.json["flagged"]["by_rule"] == {"any": with_text}
    assert done.json["drawn"] == {
        **{"rows": 0, "same": 0, "share": None, "interval_95": [None, None]},
        **{"tokens": 0, "tokens_alike": 0},
    }


def test_a_purge_deletes_the_prompts_of_a_check(
    cli: Any, folder: Path, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--local")
    assert cli("spot-check", small, *flags).code == 0
    (prompts,) = folder.rglob("spot-check-*.parquet")
    assert pq.read_table(prompts).num_rows == 12
    assert cli("purge", "--job", small).code == 0
    assert not prompts.exists()
    refused = cli("spot-check", small, *flags)
    assert refused.code == 2
    assert "was purged" in refused.complaint


def test_a_check_that_fails_says_why(cli: Any, small: str, tiny_pair: TinyPair) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--local")
    refused = cli("spot-check", small, *flags, "--output", "small")
    assert refused.code == 4
    assert "small" in refused.complaint
    assert cli("spot-check", small, *flags[:3], 0.5, "--seed", 3, "--local").code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--share", 0), "no row of job"),
        (("--flag", "nameless"), "should be NAME=REGEX"),
        (("--flag", "bad=("), "pattern `bad`"),
    ],
)
def test_what_cannot_be_checked_is_said(
    cli: Any, small: str, tiny_pair: TinyPair, flags: tuple[object, ...], words: str
) -> None:
    refused = cli("spot-check", small, "--by", tiny_pair.verifier, *flags, "--local")
    assert refused.code == 2
    assert words in refused.complaint
    assert len(cli("jobs", "--json").out.splitlines()) == 1


def test_models_of_other_tokens_cannot_check(cli: Any, small: str, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=64)
    refused = cli("spot-check", small, "--by", other, "--local")
    assert refused.code == 2
    assert "vocabulary" in refused.complaint


def test_a_share_of_few_rows_has_a_wide_interval() -> None:
    none, all_ = share_of(0, 10), share_of(10, 10)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)  # Wilson's interval by statsmodels
    assert all_.low == pytest.approx(1 - none.high)
    half = share_of(500, 1000)
    assert (half.low, half.high) == pytest.approx((0.4691, 0.5309), abs=1e-4)
