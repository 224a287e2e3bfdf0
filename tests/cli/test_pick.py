"""`specbatch pick`: a small model's best candidates, and the verifier's own rows."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cli.conftest import called_in

from specbatch.pipeline.operations import picks as operation
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.schemas.records import JobRow
from support.models import TinyPair, tiny_llama
from support.packages import install

ROWS = 12
JUDGE = {"use": "judge", "prompt": "Is this a correct answer to {prompt}? {text}\nAnswer: "}
SCORER = """
def of_text(given) -> float:
    return sum(map(ord, given.text)) % 100
"""
Spec = Callable[..., Path]


def spec_in(folder: Path, pair: TinyPair, name: str = "pick.yaml", **sections: Any) -> Path:
    """A spec file: sections that are given are laid over a small pick's; None leaves one out."""
    values: dict[str, Any] = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": "picked"},
        "verifier": str(pair.verifier),
        "sampling": {"max_tokens": 6, "temperature": 0.7},
        "group_size": 5,
        "pick": {
            "model": str(pair.draft),
            "sampling": {"n": 3, "temperature": 0.9},
            "by": JUDGE,
            "least": 0.5,
        },
    }
    for section, given in sections.items():
        values[section] = values.get(section, {}) | given if isinstance(given, dict) else given
    path = folder / name
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


@pytest.fixture
def spec(folder: Path, tiny_pair: TinyPair) -> Spec:
    """Writes a spec file into the working folder."""
    return partial(spec_in, folder, tiny_pair)


@dataclass(frozen=True)
class Picks:
    """A folder with two picks of the same input, and what the verifier writes alone."""

    folder: Path
    every_row: dict[str, Any]  # what was printed of the pick of all rows, into `all`
    of_some: dict[str, Any]  # of one whose least score is the first one's median, into `picked`
    least: float
    alone: dict[str, str]  # texts by id


@pytest.fixture(scope="module")
def made(shared_folder: Path, tiny_pair: TinyPair) -> Picks:
    folder, pair = shared_folder, tiny_pair
    shutil.copy(folder / "prompts.parquet", folder / "all.parquet")
    whole = {"input": {"uri": "all.parquet"}, "output": {"uri": "all"}, "pick": {"least": 0.0}}
    every_row = called_in(
        folder, "pick", spec_in(folder, pair, "all.yaml", **whole), "--local", "--json"
    )
    scores = sorted(row["score"] for row in rows(folder / "all"))
    least = scores[len(scores) // 2]
    some = spec_in(folder, pair, "some.yaml", pick={"least": least})
    of_some = called_in(folder, "pick", some, "--local", "--json")
    own = spec_in(folder, pair, "alone.yaml", pick=None, output={"uri": "alone"})
    called_in(folder, "submit-job", own, "--local")
    alone = {row["id"]: row["text"] for row in rows(folder / "alone")}
    return Picks(folder, every_row.json, of_some.json, least, alone)


@pytest.fixture
def picks(cli: Any, made: Picks, monkeypatch: pytest.MonkeyPatch) -> Picks:
    """The same for all tests, in their working folder."""
    assert cli
    monkeypatch.chdir(made.folder)
    return made


def rows(folder: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_output(str(folder)).to_pylist()
    return found


def digests(folder: str) -> dict[str, str]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_best_is_picked_above_the_least_and_the_verifier_writes_the_rest(
    picks: Picks, tiny_pair: TinyPair
) -> None:
    assert picks.every_row["rows"] == counts(picked=ROWS)
    assert picks.every_row["jobs"]["own"] is None
    candidates = {(row["id"], row["sample_index"]): row for row in rows("all-candidates")}
    assert len(candidates) == 3 * ROWS
    best = {row["id"]: row for row in rows("all")}
    for row in best.values():
        of = candidates[row["id"], row["sample_index"]]
        assert (row["text"], row["token_ids"], row["seed"]) == (
            of["text"],
            of["token_ids"],
            of["seed"],
        )
        assert row["written_by"] == of["verifier"] == str(tiny_pair.draft)

    jobs, found = picks.of_some["jobs"], {row["id"]: row for row in rows("picked")}
    assert list(found) == list(picks.alone), "in the order of the input"
    for row_id, row in found.items():
        if best[row_id]["score"] >= picks.least:
            assert (row["text"], row["score"]) == (best[row_id]["text"], best[row_id]["score"])
            assert (row["written_by"], row["job"]) == (str(tiny_pair.draft), jobs["candidates"])
        else:
            assert (row["text"], row["score"]) == (picks.alone[row_id], None)
            assert (row["written_by"], row["job"]) == (str(tiny_pair.verifier), jobs["own"])
    picked = sum(row["score"] is not None for row in found.values())
    assert 0 < picked < ROWS
    assert picks.of_some["rows"] == counts(picked=picked, own=ROWS - picked)


def counts(picked: int = 0, own: int = 0, without: int = 0, rejected: int = 0) -> dict[str, int]:
    return {
        "picked": picked,
        "own": own,
        "own_without_candidate": without,
        "rejected": rejected,
    }


def test_the_manifest_says_by_which_rule_and_the_same_command_writes_the_same(
    cli: Any, picks: Picks, tiny_pair: TinyPair
) -> None:
    info = read_manifest("picked").info
    assert "verification" not in info
    said = info["pick"]
    assert (said["by"], said["least"]) == (JUDGE, picks.least)
    assert (said["candidates_by"], said["verifier"]) == (
        str(tiny_pair.draft),
        str(tiny_pair.verifier),
    )
    assert "not what the verifier would have written" in said["says"]
    assert said["jobs"] == picks.of_some["jobs"]
    of_jobs = [cli("show", job, "--json").json["cost_usd"] for job in said["jobs"].values() if job]
    assert said["cost_usd"]["total"] == pytest.approx(sum(of_jobs))
    before, jobs = digests("picked"), cli("jobs", "--json").out
    again = cli("pick", "some.yaml", "--local")
    assert again.code == 0, again.err
    assert "makes the candidates of this pick, and is done" in again.err
    assert "picked: " in again.out
    assert digests("picked") == before
    assert cli("jobs", "--json").out == jobs
    for job in filter(None, said["jobs"].values()):
        audited = cli("audit", job, "--sample", "30%")
        assert audited.code == 0, audited.err


def test_scores_are_those_of_best_by_bit_for_bit(cli: Any, spec: Spec, tiny_pair: TinyPair) -> None:
    itself = {"model": str(tiny_pair.verifier), "least": 0.0}
    done = cli("pick", spec(pick=itself), "--local")
    assert done.code == 0, done.err
    path = spec(
        pick=None,
        output={"uri": "best", "keep_best": 1, "best_by": JUDGE},
        sampling={"n": 3, "temperature": 0.9},
    )
    assert cli("submit-job", path, "--local").code == 0
    same = ("id", "sample_index", "text", "score")
    assert [[row[name] for name in same] for row in rows("picked")] == [
        [row[name] for name in same] for row in rows("best")
    ]


def test_a_package_s_scorer_picks_where_the_candidates_are_written(
    cli: Any, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Picks
) -> None:
    lines = {"specbatch.scorers": "of-text = our_scorers:of_text"}
    install(monkeypatch, tmp_path / "site-packages", "our_scorers", SCORER, lines)
    done = cli("pick", spec(pick={"by": {"use": "of-text"}, "least": 80}), "--local", "--json")
    assert done.code == 0, done.err
    assert done.json["jobs"]["scores"] is None
    best = {row["id"]: row["text"] for row in rows("picked-candidates")}
    for row in rows("picked"):
        text = best[row["id"]]
        score = sum(map(ord, text)) % 100
        if score >= 80:
            assert (row["text"], row["score"]) == (text, score)
        else:
            assert (row["text"], row["score"]) == (made.alone[row["id"]], None)
    assert 0 < done.json["rows"]["own"] < ROWS


def test_candidates_that_a_policy_keeps_back_or_changes_are_never_picked(
    cli: Any, spec: Spec
) -> None:
    policies = [
        {"use": "patterns", "patterns": {"vowels": "[aeiou]"}, "verdict": "block"},
        {"use": "patterns", "patterns": {"others": "[b-z]"}, "verdict": "redact"},
    ]
    done = cli("pick", spec(pick={"least": 0.0}, policies=policies), "--local", "--json")
    assert done.code in (0, 3), done.err
    candidates = rows("picked-candidates")
    assert {row["finish_reason"] for row in candidates} >= {"blocked", "length"}
    well: dict[str, list[str]] = {}
    for row in candidates:
        is_own = row["token_ids"] is not None
        well.setdefault(row["id"], []).extend([row["text"]] if is_own else [])
    picked = {row["id"]: row["text"] for row in rows("picked") if row["score"] is not None}
    assert picked.keys() == {row_id for row_id, texts in well.items() if texts}
    assert all(text in well[row_id] for row_id, text in picked.items())
    without = ROWS - len(picked)
    assert without > 0
    assert done.json["rows"] == counts(len(picked), own=without, without=without)


def test_malformed_candidates_are_never_picked(cli: Any, spec: Spec) -> None:
    form = {"response_format": {"type": "regex", "regex": "a{2}|a{4}|b{40}"}}
    lines = {"uri": "picked", "format": "jsonl"}
    path = spec(sampling=form, pick={"least": 0.0}, output=lines)
    done = cli("pick", path, "--local", "--json")
    candidates = rows("picked-candidates")
    malformed = {(row["id"], row["sample_index"]) for row in candidates if row["error"]}
    assert 0 < len(malformed) < 3 * ROWS, "some of both"
    found = rows("picked")
    assert len(found) == ROWS
    assert all(
        (row["id"], row["sample_index"]) not in malformed
        for row in found
        if row["score"] is not None
    )
    assert done.code == (3 if any(row["error"] for row in found) else 0), done.err


def test_rows_that_could_not_be_read_are_in_the_output(
    cli: Any, spec: Spec, bad_rows: Path
) -> None:
    path = spec(input={"uri": str(bad_rows)}, pick={"least": 0.0})
    done = cli("pick", path, "--local", "--json")
    assert done.code == 3
    assert done.json["rows"] == counts(picked=5, rejected=3)
    assert done.json["rows_failed"] == 3
    errors = [row["error"] for row in rows("picked") if row["error"]]
    assert [error.partition(":")[0] for error in errors] == [
        "null_prompt",
        "empty_prompt",
        "duplicate_id",
    ]


def test_an_interrupted_pick_goes_on_where_it_stopped_and_a_purged_one_does_not(
    cli: Any, folder: Path, spec: Spec, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec(pick={"least": 1.0})
    stopped = cli("pick", path, "--local", "--timeout", 0)
    assert stopped.code == 6
    assert "to resume it: run the same command again" in stopped.complaint
    with monkeypatch.context() as elsewhere:  # workers elsewhere, of which there are none
        elsewhere.setenv("SPECBATCH_BROKER_URL", redis_url)
        waiting = cli("pick", path)
        assert waiting.code == 0, waiting.err
        assert "once job" in waiting.err
    (job,) = cli("jobs", "--json").json
    assert waiting.out.strip() == job["job"]
    done = cli("pick", path, "--local", "--json")
    assert done.code == 0, done.err
    assert done.json["jobs"]["candidates"] == job["job"]
    assert done.json["rows"] == counts(own=ROWS)
    assert len(rows("picked")) == ROWS
    assert list(folder.rglob("pick-*.parquet")), "the inputs of its other jobs"
    assert cli("purge", "--job", job["job"]).code == 0
    assert not list(folder.rglob("pick-*.parquet"))
    refused = cli("pick", path, "--local")
    assert refused.code == 2
    assert "was purged" in refused.complaint


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("texts", 2, "was purged"), ("files", 4, "are missing"), ("all", 2, "was purged")],
)
def test_a_pick_whose_candidates_go_while_it_is_written_publishes_nothing(
    cli: Any, spec: Spec, monkeypatch: pytest.MonkeyPatch, what: str, code: int, words: str
) -> None:
    """A purge empties the texts in the store, and deletes the prompts."""
    publish, choices = operation.Picks.publish, operation.Picks.choices

    def purged_meanwhile(self: operation.Picks, job: JobRow, *rest: Any) -> Iterator[Any]:
        for number, choice in enumerate(choices(self, job, *rest)):
            yield choice
            if number == 0 and what in ("texts", "all"):
                list(self.store.purge(job.job_id, "asked for"))
            if number == 0 and what in ("files", "all"):
                for file in Path(job.workspace_uri).rglob("prompts-*"):
                    file.unlink()

    def publishing(self: operation.Picks, *given: Any) -> Any:
        monkeypatch.setattr(operation.Picks, "choices", purged_meanwhile)
        return publish(self, *given)

    monkeypatch.setattr(operation.Picks, "publish", publishing)
    done = cli("pick", spec(pick={"least": 0.0}), "--local")
    assert (done.code, words in done.complaint) == (code, True), done.err
    assert not Path("picked/manifest.json").exists()


def test_workers_elsewhere_get_one_job_at_a_time_and_must_read_what_was_asked(
    cli: Any, folder: Path, spec: Spec, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SPECBATCH_BROKER_URL", redis_url)
        first, second = cli("pick", spec()), cli("pick", spec(), "--wait", "--timeout", 0)
        assert (first.code, second.code) == (0, 6)
        (job,) = cli("jobs", "--json").json
        assert (job["job"], job["state"]) == (first.out.strip(), "queued")
        assert job["name"] == "job-candidates"
    assert cli("retry", job["job"], "--local").code == 0
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SPECBATCH_BROKER_URL", redis_url)
        assert cli("pick", spec()).code == 0
    (path,) = folder.rglob("pick-*-scores-*.parquet")
    asked = pq.read_table(path)
    prompts = asked["prompt_ids"].to_pylist()
    swapped = pa.array([*prompts[2:], *prompts[:2]], asked.schema.field("prompt_ids").type)
    at = asked.column_names.index("prompt_ids")
    pq.write_table(asked.set_column(at, asked.schema.field("prompt_ids"), swapped), path)
    refused = cli("pick", spec(), "--local")
    assert refused.code == 4
    assert "was changed or damaged" in refused.complaint
    assert not Path("picked/manifest.json").exists()


def test_a_budget_is_of_all_jobs_together(cli: Any, spec: Spec) -> None:
    stopped = cli("pick", spec(budget_usd=1e-9), "--local")
    assert stopped.code == 5, stopped.err
    assert "budget" in stopped.err


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pick": None}, "section `pick` not given"),
        ({"pick": {"least": 3}}, "least 3 says nothing of a judge's scores"),
        ({"pick": {"by": {"use": "judge"}}}, "judge needs prompt"),
        ({"pick": {"by": {"use": "x"}, "sampling": {"n": 1}}}, "scorer `x` scores where there is"),
        ({"pick": {"sampling": {"seed": 3}}}, "leave it out"),
        ({"pick": {"sampling": {"heat": 3}}}, "pick.sampling: unknown field `heat`"),
        ({"pick": {"model": "nowhere/at/all"}}, "`nowhere/at/all`"),
        ({"sampling": {"n": 2}}, "each row of a pick has one text"),
        ({"output": {"keep_columns": "all"}}, "join the output with the input by id"),
        ({"output": {"keep_best": 1}}, "are what `pick` says"),
        ({"output": {"table": "outputs"}}, "output.table gets the finished rows of one job"),
        ({"deadline_sec": 5}, "use --timeout"),
        ({"notify": "chat"}, "notify tells the end of one job"),
        ({"input": {"uri": "nothing.parquet"}}, "nothing.parquet"),
        ({"output": {"uri": "prompts.parquet"}}, "is a file"),
    ],
)
def test_what_cannot_be_picked_is_refused_before_it_starts(
    cli: Any, spec: Spec, sections: dict[str, Any], words: str
) -> None:
    refused = cli("pick", spec(**sections), "--local")
    assert refused.code == 2, refused.err
    assert words in refused.complaint
    assert cli("jobs", "--json").json == []


def test_verification_that_depends_on_drafts_is_refused(
    cli: Any, spec: Spec, tiny_pair: TinyPair
) -> None:
    ratio = {"speculation": {"verification": "rejection"}, "proposer": str(tiny_pair.draft)}
    refused = cli("pick", spec(**ratio), "--local")
    assert refused.code == 2
    assert "verification rejection" in refused.complaint


def test_models_of_other_tokens_and_private_tenants_are_refused(
    cli: Any, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=64)
    refused = cli("pick", spec(pick={"model": str(other)}), "--local")
    assert refused.code == 2
    assert "vocabulary" in refused.complaint
    monkeypatch.setenv("SPECBATCH_PRIVACY", "hash-only")
    refused = cli("pick", spec(), "--local")
    assert refused.code == 2
    assert "are kept hash-only" in refused.complaint


def test_an_output_of_something_else_is_left_alone(
    cli: Any, picks: Picks, tiny_pair: TinyPair
) -> None:
    before = digests("all")
    whole = {"input": {"uri": "all.parquet"}, "output": {"uri": "all"}}
    other = spec_in(picks.folder, tiny_pair, "other.yaml", pick={"least": 0.1}, **whole)
    refused = cli("pick", other, "--local")
    assert refused.code == 2
    assert "which `specbatch pick` has for another spec or" in refused.complaint
    pq.write_table(pq.read_table("prompts.parquet").slice(1), "all.parquet")
    refused = cli("pick", "all.yaml", "--local")
    assert refused.code == 2, "the input has changed"
    assert "for another spec or input: choose" in refused.complaint
    assert digests("all") == before


def test_without_a_broker_or_local_nothing_is_held(cli: Any, spec: Spec) -> None:
    alone = cli("submit-job", spec(), "--local")
    assert (alone.code, "section `pick` is for `specbatch pick`" in alone.complaint) == (2, True)
    refused = cli("pick", spec())
    assert refused.code == 2
    assert "run it here with --local" in refused.complaint
    assert not Path("picked").exists()


def test_what_a_reviewer_has_released_is_written(cli: Any, spec: Spec) -> None:
    policy = {"use": "patterns", "patterns": {"any": "(?s).*"}, "verdict": "review"}
    path = spec(policies=[policy])
    held = cli("pick", path, "--local", "--json")
    assert held.code == 0, held.err
    assert held.json["rows"] == counts(own=ROWS, without=ROWS)
    assert {row["text"] for row in rows("picked")} == {None}
    own = held.json["jobs"]["own"]
    texts = [yaml.safe_load(line)["text"] for line in cli("review", own, "--json").out.splitlines()]
    assert cli("review", own, "--release", "0", "--block", "1", "--local").code == 0
    assert cli("pick", path, "--local").code == 0
    found = rows("picked")
    assert (found[0]["text"], found[1]["error"]) == (texts[0], "blocked by a reviewer")
