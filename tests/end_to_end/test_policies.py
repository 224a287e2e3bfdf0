"""Whole jobs whose texts are judged before they are published: what a policy objects to is nowhere
but where the tenant's privacy mode keeps texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, Done, Night

from specbatch.pipeline.operations.tools import make_auditor
from specbatch.pipeline.stages.judging import MOST_FAILURES
from specbatch.schemas.errors import UsageError
from specbatch.schemas.policies import Decided
from specbatch.schemas.records import FinishReason, JobState
from support.packages import install

MODULE = """
import os, time
from specbatch import PolicyInput, Verdict


def by_row(given: PolicyInput, rulings: dict) -> Verdict:
    what = rulings.get(given.row_id, "allow")
    if "asked" in rulings:
        with open(rulings["asked"], "a") as file:
            file.write(given.row_id + "\\n")
    if what == "raise":
        raise RuntimeError(given.text)
    if what == "hang":
        time.sleep(3600)
    if what == "die":
        os._exit(1)
    if what == "nonsense":
        return given.text
    if what == "redact":
        return Verdict.redact("[NOTHING]", "by-row")
    return getattr(Verdict, what)(*([] if what == "allow" else ["by-row"]))
"""
SENTINEL = "SENTINEL"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package that offers policy `by-row`."""
    lines = {"specbatch.policies": "by-row = our_policies:by_row"}
    with pytest.MonkeyPatch.context() as patch:
        install(patch, tmp_path_factory.mktemp("package") / "site", "our_policies", MODULE, lines)
        yield


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, package: None) -> Iterator[Night]:  # noqa: ARG001 - installed before
    """With a worker that does the jobs of all tests."""
    night = Night(tmp_path_factory.mktemp("night"))
    with night.worker(draft=None):
        yield night
    night.store.close()


@pytest.fixture(scope="module")
def plain(night: Night) -> dict[str, dict[str, Any]]:
    """What a job without policies publishes, by row id."""
    return published(night.run())


def by_row(rulings: Mapping[str, str], **more: Any) -> dict[str, Any]:
    return {"policies": [{"use": "by-row", "options": {"rulings": rulings}, **more}]}


def published(done: Done) -> dict[str, dict[str, Any]]:
    rows = pq.read_table(Path(done.job.output_uri.removeprefix("file://")) / "data").to_pylist()
    return {row["id"]: row for row in rows}


def manifest(done: Done) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(
        (Path(done.job.output_uri.removeprefix("file://")) / "manifest.json").read_bytes()
    )
    return found


def logged(night: Night, done: Done) -> list[dict[str, Any]]:
    entries = night.store.log(done.job.job_id)
    return [p for entry in entries if (p := orjson.loads(entry.payload)).get("policies")]


def test_each_ruling_of_a_package_s_policy(night: Night, plain: dict[str, Any]) -> None:
    ids = list(plain)
    rulings = dict(zip(ids, ["redact", "block", "review"], strict=False))
    done = night.run(more=by_row(rulings))
    rows = published(done)
    redacted, blocked, held = (rows[row] for row in ids[:3])
    assert redacted["text"] == "[NOTHING]"
    assert redacted["finish_reason"] == plain[ids[0]]["finish_reason"]
    assert redacted["error"] is None
    assert blocked["finish_reason"] == "blocked"
    assert blocked["error"] == "blocked by policy `by-row` (by-row)"
    assert held["finish_reason"] == "review"
    assert held["error"] == "held back for review by policy `by-row` (by-row)"
    for row in (redacted, blocked, held):
        assert row["token_ids"] is None
        assert row["logprobs"] is None
        assert row["completion_tokens"] == plain[row["id"]]["completion_tokens"]
    assert blocked["text"] is held["text"] is None
    for row in ids[3:]:
        same = ("text", "token_ids", "finish_reason", "logprobs")
        assert [rows[row][name] for name in same] == [plain[row][name] for name in same]
    (said,) = (p["policies"] for p in logged(night, done))
    (by,) = said
    assert (by["policy"], by["version"], by["asked"]) == ("by-row", "our-policies 1.2", ROWS)
    assert by["sec"] > 0
    assert [one[2:] for one in by["not_allowed"]] == [
        ["redact", "by-row"],
        ["block", "by-row"],
        ["review", "by-row"],
    ]
    report = done.job.report
    assert [report[f"policy_{r}"] for r in ("redact", "block", "review")] == [1, 1, 1]


def test_what_fails_is_blocked_unless_the_spec_says_otherwise(
    night: Night, plain: dict[str, Any], caplog: Any
) -> None:
    ids = list(plain)
    ways = ["raise", "hang", "allow", "die", "nonsense"]
    rulings = dict(zip(ids, ways, strict=False))
    closed = night.run(more=by_row(rulings, timeout_sec=2.0))
    opened = night.run(more=by_row({ids[0]: "raise"}, on_error="allow"))
    rows = published(closed)
    for row, way in rulings.items():
        assert rows[row]["finish_reason"] == ("length" if way == "allow" else "blocked"), way
    assert rows[ids[5]]["text"] == plain[ids[5]]["text"], "it is asked again after each failure"
    assert published(opened)[ids[0]]["text"] == plain[ids[0]]["text"]
    assert "RuntimeError" in caplog.text
    assert plain[ids[0]]["text"] not in caplog.text


def test_a_policy_that_only_fails_is_not_asked_for_every_row(
    night: Night, plain: dict[str, Any], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    ids = list(plain)
    rulings = {**dict.fromkeys(ids, "hang"), "asked": str(asked)}
    done = night.run(more=by_row(rulings, timeout_sec=2.0))
    assert {row["finish_reason"] for row in published(done).values()} == {"blocked"}
    (by,) = logged(night, done)[0]["policies"]
    assert by["asked"] == ROWS
    assert set(asked.read_text().split()) == set(ids[:MOST_FAILURES])


def test_patterns_redact_block_and_hold_back(night: Night, plain: dict[str, Any]) -> None:
    words = {"any": r"[a-z]+"}
    of = {"use": "patterns", "patterns": words}
    redacted = published(night.run(more={"policies": [of | {"verdict": "redact"}]}))
    blocked = published(night.run(more={"policies": [of]}))
    none = {"use": "patterns", "patterns": {"none": "no such text"}}
    allowed = published(night.run(more={"policies": [none]}))
    assert {row["finish_reason"] for row in blocked.values()} == {"blocked"}
    assert all("[any]" in row["text"] for row in redacted.values())
    assert {k: row["text"] for k, row in allowed.items()} == {
        k: row["text"] for k, row in plain.items()
    }


def test_the_verifier_judges_and_its_time_is_the_row_s(night: Night) -> None:
    judge = {"use": "judge", "prompt": "Is this rude?\n\n{text}\n\nAnswer: "}
    first, again = (night.run(more={"policies": [judge]}) for _ in range(2))
    assert first.outputs == again.outputs, "a judge decides with the same bits"
    (by,) = logged(night, first)[0]["policies"]
    assert by["asked"] == ROWS
    for record in first.completions:
        assert record.finish_reason in (FinishReason.BLOCKED, FinishReason.LENGTH)
        assert record.ticks.overhead > 0
    spent = sum(c.cost_usd for c in first.completions)
    assert night.store.progress(first.job.job_id).cost_usd == pytest.approx(spent)


def test_a_judge_behind_a_pattern_that_blocks_all_is_asked_nothing(night: Night) -> None:
    any_text = {"use": "patterns", "patterns": {"any": "(?s)."}}
    judge = {"use": "judge", "prompt": "Is this rude? {text}"}
    done = night.run(more={"policies": [any_text, judge, judge]})
    assert {row["finish_reason"] for row in published(done).values()} == {"blocked"}
    assert [by["policy"] for by in logged(night, done)[0]["policies"]] == ["patterns"]


def test_a_policy_that_is_not_installed_fails_its_groups_by_name(night: Night) -> None:
    with pytest.raises(AssertionError, match="no row could be"):
        night.run("not installed", more={"policies": [{"use": "nobody-s"}]})
    (job,) = [job for job in night.store.list_jobs() if job.name == "not installed"]
    (_, _, _, error) = next(iter(night.store.failed_groups(job.job_id)))
    assert "no installed package offers policy `nobody-s`" in str(error)
    assert "by-row" in str(error)


def test_a_review_releases_and_blocks_in_a_second_revision(
    night: Night, plain: dict[str, Any]
) -> None:
    ids = list(plain)
    done = night.run(more=by_row(dict.fromkeys(ids[:3], "review")))
    first = published(done)
    assert [first[row]["text"] for row in ids[:3]] == [None] * 3
    assert manifest(done)["info"] | {"revision": 1, "in_review": 3} == manifest(done)["info"]
    places = night.store.reviews(done.job.job_id).pending
    assert places == [(plain[row]["row_index"], 0) for row in ids[:3]]
    again = night.review(done, {places[0]: Decided.RELEASED, places[1]: Decided.BLOCKED})
    with pytest.raises(UsageError, match="already released: a decision is final"):
        night.review(done, {places[0]: Decided.BLOCKED})
    with pytest.raises(UsageError, match="not held back for review"):
        night.review(done, {(7, 0): Decided.BLOCKED})
    assert again.state is JobState.DONE
    second = published(done)
    same = ("text", "token_ids", "finish_reason", "logprobs", "error")
    assert [second[ids[0]][n] for n in same] == [plain[ids[0]][n] for n in same]
    assert second[ids[1]]["error"] == "blocked by a reviewer"
    assert second[ids[1]]["finish_reason"] == "blocked"
    assert second[ids[2]]["finish_reason"] == "review"
    assert manifest(done)["info"] | {"revision": 2, "in_review": 1} == manifest(done)["info"]
    audit = make_auditor(night.settings, night.store).chain(done.job.job_id)
    assert not audit.findings
