"""`specbatch spot-check`: a share of one model's rows, written again by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from cli.conftest import called_in

from specbatch.pipeline.operations.spot_checks import Selection
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.policy.ratios import share_of
from support.models import TinyPair, tiny_llama


def make_small(folder: Path, pair: TinyPair) -> str:
    """A job of the small model alone; its id."""
    made = called_in(
        folder,
        *("submit-job", "--input", "prompts.parquet", "--output", "small", "--max-tokens", 6),
        *("--verifier", pair.draft, "--temperature", 0.7, "--local", "--json"),
    )
    found: str = made.json["job"]
    return found


@pytest.fixture
def own_small(cli: Any, folder: Path, tiny_pair: TinyPair) -> str:
    """One that a test may purge, or whose checks it looks for in the folder."""
    assert cli
    return make_small(folder, tiny_pair)


@pytest.fixture(scope="module")
def made(shared_folder: Path, tiny_pair: TinyPair) -> tuple[Path, str]:
    return shared_folder, make_small(shared_folder, tiny_pair)


@pytest.fixture
def small(cli: Any, made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """One for all tests; each has another check."""
    assert cli
    monkeypatch.chdir(made[0])
    return made[1]


def texts(folder: str | Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in read_output(str(folder)).to_pylist()}


def checked() -> dict[str, str]:
    """The texts of the one check."""
    (folder,) = Path.cwd().glob("small-spot-check-*")
    return texts(folder)


def rows_drawn(selection: Selection) -> Iterator[str]:
    return (f"row-{i}" for i in range(12) if selection.draws(i))


def test_drawn_rows_are_written_again_and_compared(
    cli: Any, own_small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 0.5, "--seed", 3)
    done = cli("spot-check", own_small, *flags, "--local", "--json")
    assert done.code == 0, done.err
    found, mine, theirs = done.json, texts("small"), checked()
    assert list(theirs) == list(rows_drawn(Selection(0.5, 3)))
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

    again = cli("spot-check", own_small, *flags)
    assert again.code == 0, again.err
    assert f"job {found['check']} is this check, and done" in again.err
    assert f"{same} of {len(theirs)} rows are the same" in again.out
    assert cli("spot-check", own_small, *flags, "--json").json == found


def test_a_model_agrees_with_itself_and_its_outputs_were_drafts(
    cli: Any, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.draft, "--share", 1, "--local", "--least", 100)
    done = cli("spot-check", small, *flags, "--output", "itself")
    assert done.code == 0, done.err
    assert "12 of 12 rows are the same (100.0%)" in done.out
    assert texts("small") == texts("itself")


def test_less_agreement_than_asked_for_is_an_exit_code(
    cli: Any, small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--local", "--least", 100)
    done = cli("spot-check", small, *flags)
    assert done.code == 1
    assert "fewer than 100 % of the drawn rows are the same" in done.err


def test_flagged_rows_are_checked_and_told_apart(cli: Any, small: str, tiny_pair: TinyPair) -> None:
    rules = ("--flag", "any=(?s).", "--flag", "too=(?s)..", "--flag", "none=no such text")
    flags = ("--by", tiny_pair.verifier, "--share", 0, *rules, "--local", "--json")
    done = cli("spot-check", small, *flags, "--least", 90)
    assert done.code == 0, done.err
    assert "no row was drawn, so --least says nothing" in done.err
    with_text = sum(bool(one) for one in texts("small").values())
    longer = sum(len(one) > 1 for one in texts("small").values())
    by_rule = {"malformed": 0, "any": with_text, "too": longer, "none": 0}
    assert done.json["flagged"]["by_rule"] == by_rule
    assert done.json["drawn"] == {
        **{"rows": 0, "same": 0, "tokens": 0, "tokens_alike": 0},
        **{"share": None, "interval_95": [None, None]},
    }


def test_the_prompts_of_a_check_are_not_believed_once_changed_and_go_with_a_purge(
    cli: Any, folder: Path, own_small: str, tiny_pair: TinyPair
) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--local")
    assert cli("spot-check", own_small, *flags).code == 0
    (prompts,) = folder.rglob("spot-check-*.parquet")
    table = pq.read_table(prompts)
    assert table.num_rows == 12
    for changed in (table.slice(0, 5), table.set_column(5, "row_index", table["row_index"][::-1])):
        pq.write_table(changed, prompts)
        refused = cli("spot-check", own_small, *flags)
        assert refused.code == 4
        assert "was changed or damaged since" in refused.complaint
    assert cli("purge", "--job", own_small).code == 0
    assert not prompts.exists()
    refused = cli("spot-check", own_small, *flags)
    assert refused.code == 2
    assert "was purged" in refused.complaint


def test_a_check_that_was_purged_found_nothing(cli: Any, small: str, tiny_pair: TinyPair) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--seed", 8, "--local", "--json")
    done = cli("spot-check", small, *flags)
    assert done.code == 0, done.err
    assert cli("purge", "--job", done.json["check"]).code == 0
    refused = cli("spot-check", small, *flags)
    assert refused.code == 2
    assert "are not kept" in refused.complaint


def test_malformed_rows_are_always_checked_and_drawn_ones_count_in_both(
    cli: Any, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    spec = tmp_path / "forms.yaml"
    forms = {"n": 2, "response_format": {"type": "regex", "regex": "[ab]{40}"}}
    spec.write_text(yaml.safe_dump({"sampling": {**forms, "temperature": 0.7}}))
    made = cli(
        *("submit-job", spec, "--input", "prompts.parquet", "--output", "small"),
        *("--max-tokens", 6, "--verifier", tiny_pair.draft, "--local", "--json"),
    )
    assert made.json["rows_failed"] == 12
    flags = ("--by", tiny_pair.verifier, "--share", 0.5, "--seed", 3, "--local", "--json")
    done = cli("spot-check", made.json["job"], *flags)
    assert done.code == 3, "the check's own outputs are as malformed"
    assert done.json["flagged"]["by_rule"] == {"malformed": 12}
    assert done.json["drawn"]["rows"] == len(list(rows_drawn(Selection(0.5, 3))))
    assert done.json["left_out"] == 0


def test_rows_that_a_policy_withholds_are_left_out(
    cli: Any, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    spec = tmp_path / "judged.yaml"
    policy = {"use": "patterns", "patterns": {"any": "(?s).+"}, "verdict": "block"}
    spec.write_text(yaml.safe_dump({"policies": [policy]}))
    made = cli(
        *("submit-job", spec, "--input", "prompts.parquet", "--output", "small"),
        *("--max-tokens", 6, "--verifier", tiny_pair.draft, "--local", "--json"),
    )
    refused = cli(
        "spot-check", made.json["job"], "--by", tiny_pair.verifier, "--share", 1, "--local"
    )
    assert refused.code == 2
    assert "has an output that can be checked" in refused.complaint


def test_a_check_that_fails_says_why(cli: Any, small: str, tiny_pair: TinyPair) -> None:
    flags = ("--by", tiny_pair.verifier, "--share", 1, "--seed", 9, "--local")
    own = cli("spot-check", small, *flags, "--output", "small")
    assert own.code == 2
    assert "is the output of job" in own.complaint
    Path("taken/data").mkdir(parents=True)
    Path("taken/data/part-00000.parquet").write_text("another's")
    for _ in range(2):
        refused = cli("spot-check", small, *flags, "--output", "taken")
        assert refused.code == 4
        assert "taken" in refused.complaint
    assert "and failed: `specbatch retry" in refused.err
    assert cli("spot-check", small, *flags, "--output", "elsewhere").code == 0


def test_outputs_that_depend_on_drafts_are_not_compared(
    cli: Any, job: Any, tiny_pair: TinyPair
) -> None:
    ratio = ("--verification", "rejection", "--temperature", 0.7, "--local", "--json")
    made = cli("submit-job", *job, *ratio)
    assert made.code == 0, made.err
    refused = cli("spot-check", made.json["job"], "--by", tiny_pair.verifier, "--local")
    assert refused.code == 2
    assert "verified by a ratio test" in refused.complaint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--share", 0), "no row of job"),
        (("--flag", "nameless"), "should be NAME=REGEX"),
        (("--flag", "bad=("), "pattern `bad`"),
        (("--flag", "my rule=x"), "a name of letters, digits"),
        (("--flag", "malformed=x"), "none malformed"),
    ],
)
def test_what_cannot_be_checked_is_said(
    cli: Any, small: str, tiny_pair: TinyPair, flags: tuple[object, ...], words: str
) -> None:
    before = cli("jobs", "--json").json
    refused = cli("spot-check", small, "--by", tiny_pair.verifier, *flags, "--local")
    assert refused.code == 2
    assert words in refused.complaint
    assert cli("jobs", "--json").json == before


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
