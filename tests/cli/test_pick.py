"""`specbatch pick`: a small model's best candidates, and the verifier's own rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from support.models import TinyPair, tiny_llama
from support.packages import install

ROWS = 12
JUDGE = {"use": "judge", "prompt": "Is this a correct answer to {prompt}? {text}\nAnswer: "}
SCORER = """
def of_text(given) -> float:
    return sum(map(ord, given.text)) % 100
"""
Spec = Callable[..., Path]


@pytest.fixture
def spec(folder: Path, tiny_pair: TinyPair) -> Spec:
    """Writes a spec file: sections that are given are laid over a small pick's."""

    def write(**sections: Any) -> Path:
        values: dict[str, Any] = {
            "input": {"uri": "prompts.parquet"},
            "output": {"uri": "picked"},
            "verifier": str(tiny_pair.verifier),
            "sampling": {"max_tokens": 6, "temperature": 0.7},
            "group_size": 5,
            "pick": {
                "model": str(tiny_pair.draft),
                "sampling": {"n": 3, "temperature": 0.9},
                "by": JUDGE,
                "least": 0.5,
            },
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
        path = folder / "pick.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def alone(cli: Any, spec: Spec) -> dict[str, str]:
    """What the verifier writes without candidates, by id."""
    path = spec(output={"uri": "alone"})
    values = yaml.safe_load(path.read_text())
    del values["pick"]
    path.write_text(yaml.safe_dump(values))
    made = cli("submit-job", path, "--local")
    assert made.code == 0, made.err
    return {row["id"]: row["text"] for row in rows("alone")}


def rows(folder: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_output(str(folder)).to_pylist()
    return found


def digests(folder: str) -> dict[str, str]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def median_score(folder: str) -> float:
    scores = sorted(row["score"] for row in rows(folder))
    middle: float = scores[len(scores) // 2]
    return middle


def test_the_best_is_picked_above_the_least_and_the_verifier_writes_the_rest(
    cli: Any, spec: Spec, tiny_pair: TinyPair, alone: dict[str, str]
) -> None:
    everything = cli("pick", spec(pick={"least": 0.0}, output={"uri": "all"}), "--local", "--json")
    assert everything.code == 0, everything.err
    assert everything.json["rows"] == counts(picked=ROWS)
    assert everything.json["jobs"]["own"] is None
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

    least = median_score("all")
    some = cli("pick", spec(pick={"least": least}), "--local", "--json")
    assert some.code == 0, some.err
    jobs, found = some.json["jobs"], {row["id"]: row for row in rows("picked")}
    assert list(found) == list(alone), "in the order of the input"
    for row_id, row in found.items():
        if best[row_id]["score"] >= least:
            assert (row["text"], row["score"]) == (best[row_id]["text"], best[row_id]["score"])
            assert (row["written_by"], row["job"]) == (str(tiny_pair.draft), jobs["candidates"])
        else:
            assert (row["text"], row["score"]) == (alone[row_id], None)
            assert (row["written_by"], row["job"]) == (str(tiny_pair.verifier), jobs["own"])
    picked = sum(row["score"] is not None for row in found.values())
    assert 0 < picked < ROWS
    assert some.json["rows"] == counts(picked=picked, own=ROWS - picked)


def counts(picked: int = 0, own: int = 0, without: int = 0, rejected: int = 0) -> dict[str, int]:
    return {
        "picked": picked,
        "own": own,
        "own_without_candidate": without,
        "rejected": rejected,
    }


def test_the_manifest_says_by_which_rule_and_the_same_command_writes_the_same(
    cli: Any, spec: Spec, tiny_pair: TinyPair
) -> None:
    done = cli("pick", spec(), "--local", "--json")
    assert done.code == 0, done.err
    info = read_manifest("picked").info
    assert "verification" not in info
    said = info["pick"]
    assert (said["by"], said["least"]) == (JUDGE, 0.5)
    assert (said["candidates_by"], said["verifier"]) == (
        str(tiny_pair.draft),
        str(tiny_pair.verifier),
    )
    assert "not what the verifier would have written" in said["says"]
    assert said["jobs"] == done.json["jobs"]
    of_jobs = [cli("show", job, "--json").json["cost_usd"] for job in said["jobs"].values() if job]
    assert said["cost_usd"]["total"] == pytest.approx(sum(of_jobs))
    before, jobs = digests("picked"), cli("jobs", "--json").out
    again = cli("pick", spec(), "--local")
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
        output={"uri": "best", "keep_best": 1, "best_by": JUDGE},
        sampling={"n": 3, "temperature": 0.9},
    )
    values = yaml.safe_load(path.read_text())
    del values["pick"]
    path.write_text(yaml.safe_dump(values))
    assert cli("submit-job", path, "--local").code == 0
    same = ("id", "sample_index", "text", "score")
    assert [[row[name] for name in same] for row in rows("picked")] == [
        [row[name] for name in same] for row in rows("best")
    ]


def test_a_package_s_scorer_picks_where_the_candidates_are_written(
    cli: Any, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
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
            assert (row["text"], row["score"]) == (alone[row["id"]], None)
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


def test_an_interrupted_pick_goes_on_where_it_stopped(
    cli: Any, spec: Spec, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = cli("pick", spec(), "--local", "--timeout", 0)
    assert stopped.code == 6
    assert "to resume it: run the same command again" in stopped.complaint
    with monkeypatch.context() as elsewhere:  # workers elsewhere, of which there are none
        elsewhere.setenv("SPECBATCH_BROKER_URL", redis_url)
        waiting = cli("pick", spec())
        assert waiting.code == 0, waiting.err
        assert "once job" in waiting.err
    (job,) = cli("jobs", "--json").json
    assert waiting.out.strip() == job["job"]
    done = cli("pick", spec(), "--local", "--json")
    assert done.code == 0, done.err
    assert done.json["jobs"]["candidates"] == job["job"]
    assert len(rows("picked")) == ROWS


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


def test_purged_candidates_are_not_picked_again(cli: Any, folder: Path, spec: Spec) -> None:
    done = cli("pick", spec(pick={"least": 1.0}), "--local", "--json")
    assert done.code == 0, done.err
    assert done.json["rows"] == counts(own=ROWS)
    assert list(folder.rglob("pick-*.parquet")), "the inputs of its other jobs"
    assert cli("purge", "--job", done.json["jobs"]["candidates"]).code == 0
    assert not list(folder.rglob("pick-*.parquet"))
    refused = cli("pick", spec(pick={"least": 1.0}), "--local")
    assert refused.code == 2
    assert "was purged" in refused.complaint


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


def test_an_output_of_something_else_is_left_alone(cli: Any, spec: Spec) -> None:
    assert cli("pick", spec(pick={"least": 0.0}), "--local").code == 0
    before = digests("picked")
    refused = cli("pick", spec(pick={"least": 0.1}), "--local")
    assert refused.code == 2
    assert "which `specbatch pick` has for another spec or" in refused.complaint
    pq.write_table(pq.read_table("prompts.parquet").slice(1), "prompts.parquet")
    refused = cli("pick", spec(pick={"least": 0.0}), "--local")
    assert refused.code == 2, "the input has changed"
    assert "for another spec or input: choose" in refused.complaint
    assert digests("picked") == before


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
