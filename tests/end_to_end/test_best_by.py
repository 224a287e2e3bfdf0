"""Whole jobs that publish the best of several completions by what a judge or a scorer says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from end_to_end.test_drafting import ROWS, Done, Night
from end_to_end.test_policies import manifest

from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.pipeline.outputs.best import best_of_each
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.stages import verify
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import CompletionRecord, FinishReason, JobState
from specbatch.schemas.spec import JobSpec, load_spec
from support.databases import migrated
from support.packages import install
from support.planted import PLANTED, Site, masked_logs, planted_in

SEVERAL: dict[str, Any] = {"n": 3, "temperature": 0.9, "max_tokens": 16}
JUDGE = {"use": "judge", "prompt": "Is this a correct answer to {prompt}? {text}\nAnswer: "}
MODULE = """
import os, time
from specbatch import PolicyInput


def of_text(given: PolicyInput, ways: dict = {}, mark: str = "") -> float:
    what = ways.get(given.row_id)
    if what == "raise":
        raise RuntimeError(given.text)
    if what == "hang":
        time.sleep(3600)
    if what == "die":
        os._exit(1)
    if what == "nan":
        return float("nan")
    if what == "nonsense":
        return given.text
    return given.text.count(mark) if mark else sum(map(ord, given.text)) % 1000 / 8
"""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package that offers scorer `of-text`."""
    lines = {"specbatch.scorers": "of-text = our_scorers:of_text"}
    with pytest.MonkeyPatch.context() as patch:
        install(patch, tmp_path_factory.mktemp("site-packages"), "our_scorers", MODULE, lines)
        yield


@pytest.fixture(scope="module")
def night(package: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:  # noqa: ARG001 - it is installed first
    """With a worker that does all jobs of this file's."""
    night = Night(tmp_path_factory.mktemp("night"))
    with night.worker(draft=None):
        yield night
    night.store.close()


@pytest.fixture(scope="module")
def plain(night: Night) -> Done:
    """The likeliest of several."""
    return night.run(sampling=SEVERAL, keep_best=1)


def of_text(**options: Any) -> dict[str, Any]:
    return {"use": "of-text", "options": options}


def expected(text: str) -> float:
    return sum(map(ord, text)) % 1000 / 8


def published(done: Done) -> list[dict[str, Any]]:
    folder = Path(done.job.output_uri.removeprefix("file://"))
    rows: list[dict[str, Any]] = pq.read_table(folder / "data").to_pylist()
    return rows


def scores(records: list[CompletionRecord]) -> list[tuple[int, int, float | None]]:
    return [(r.row_index, r.sample_index, r.score) for r in records]


def best_samples(done: Done, keep: int) -> list[tuple[int, int]]:
    """By score alone."""
    rows: dict[int, list[CompletionRecord]] = {}
    for record in done.completions:
        rows.setdefault(record.row_index, []).append(record)
    found = []
    for row, records in sorted(rows.items()):
        ranked = sorted(records, key=lambda r: -1.0 if r.score is None else -r.score)
        found += [(row, one.sample_index) for one in sorted_by_sample(ranked[:keep])]
    return found


def sorted_by_sample(records: list[CompletionRecord]) -> list[CompletionRecord]:
    return sorted(records, key=lambda r: r.sample_index)


def test_the_verifier_picks_and_its_time_is_the_row_s(night: Night, plain: Done) -> None:
    done, again = (night.run(sampling=SEVERAL, keep_best=1, best_by=JUDGE) for _ in range(2))
    assert done.outputs == plain.outputs, "which are published changes nothing else"
    assert scores(done.completions) == scores(again.completions), "a judge has the same bits"
    values = [record.score for record in done.completions]
    assert len(values) == 3 * ROWS
    assert all(value is not None and 0 < value < 1 for value in values)
    assert len(set(values)) > ROWS, "an answer that is forced has a probability all the same"
    rows = published(done)
    assert [(r["row_index"], r["sample_index"]) for r in rows] == best_samples(done, 1)
    known = {(r.row_index, r.sample_index): r for r in done.completions}
    for row in rows:
        record = known[row["row_index"], row["sample_index"]]
        assert (row["score"], row["text"]) == (record.score, record.text)
    before = {(r.row_index, r.sample_index): r for r in plain.completions}
    assert all(r.score is None for r in before.values())
    assert all(r.ticks.overhead > before[place].ticks.overhead for place, r in known.items())
    spent = sum(record.cost_usd for record in done.completions)
    assert night.store.progress(done.job.job_id).cost_usd == pytest.approx(spent)
    assert "score" not in published(plain)[0]
    info = manifest(done)["info"]
    assert (info["keep_best"], info["best_by"]) == (1, JUDGE)
    assert "best_by" not in manifest(plain)["info"]
    assert (done.job.report["scored"], done.job.report["unscored"]) == (3.0 * ROWS, 0.0)


def test_a_package_s_scorer_picks_what_it_scores_highest(night: Night) -> None:
    done = night.run(sampling=SEVERAL, keep_best=2, best_by=of_text())
    for record in done.completions:
        assert record.score == expected(record.text)
    rows = [(r["row_index"], r["sample_index"]) for r in published(done)]
    assert rows == best_samples(done, 2)
    assert manifest(done)["info"]["best_by"] == {"use": "of-text"}


def test_what_fails_has_no_score_and_ranks_by_its_log_probability(
    night: Night, caplog: Any
) -> None:
    two = SEVERAL | {"n": 2}  # so that never three in a row fail
    plain = night.run(sampling=two, keep_best=1)
    ids = list(dict.fromkeys(record.row_id for record in plain.completions))
    ways = dict(zip(ids[::2], ["raise", "nan", "nonsense", "die"], strict=True))
    done = night.run(sampling=two, keep_best=1, best_by=of_text(ways=ways))
    by_likelihood = {row["id"]: row for row in published(plain)}
    for row in published(done):
        if row["id"] in ways:
            assert row["score"] is None
            assert row["sample_index"] == by_likelihood[row["id"]]["sample_index"]
        else:
            assert row["score"] == expected(row["text"])
    (said,) = [r.getMessage() for r in caplog.records if "gave no score" in r.getMessage()]
    assert f"scorer `of-text` gave no score to {2 * len(ways)} completions of job" in said
    assert done.completions[0].text not in caplog.text
    assert done.job.report["unscored"] == 2.0 * len(ways)


def test_a_scorer_that_only_hangs_is_not_asked_for_every_completion(
    night: Night, plain: Done
) -> None:
    ways = dict.fromkeys([record.row_id for record in plain.completions], "hang")
    slow = of_text(ways=ways) | {"timeout_sec": 0.2}
    done = night.run(sampling=SEVERAL, keep_best=1, best_by=slow)
    same = [(row["row_index"], row["sample_index"]) for row in published(plain)]
    assert [(row["row_index"], row["sample_index"]) for row in published(done)] == same
    assert {row["score"] for row in published(done)} == {None}


def test_a_scorer_that_is_not_installed_fails_its_groups_by_name(night: Night) -> None:
    with pytest.raises(AssertionError, match="no row could be"):
        night.run(name="unscored", sampling=SEVERAL, keep_best=1, best_by={"use": "nobody-s"})
    (job,) = (job for job in night.store.list_jobs() if job.name == "unscored")
    (_, _, _, error) = next(iter(night.store.failed_groups(job.job_id)))
    assert "no installed package offers scorer `nobody-s`" in str(error)
    assert "of-text" in str(error)
    assert not list(night.store.completions(job.job_id))


def test_a_text_is_scored_as_it_would_be_published_and_not_if_it_is_kept_back(
    night: Night,
) -> None:
    marks = of_text(mark="[vowels]")
    of = {"use": "patterns", "verdict": "redact", "patterns": {"vowels": "[aeiou]+"}}
    redacted = night.run(sampling=SEVERAL, keep_best=1, best_by=marks, more={"policies": [of]})
    blocked = night.run(
        sampling=SEVERAL, keep_best=1, best_by=marks,
        more={"policies": [{"use": "patterns", "patterns": {"rare": "[bv]"}}]},
    )  # fmt: skip
    for record in redacted.completions:
        assert record.score == record.text.count("[vowels]")
    assert max(record.score or 0 for record in redacted.completions) > 1
    kept_back = {r.finish_reason is FinishReason.BLOCKED for r in blocked.completions}
    assert kept_back == {True, False}
    for record in blocked.completions:
        assert (record.score is None) == record.is_withheld


def test_only_rows_with_more_completions_than_are_kept_are_scored(night: Night) -> None:
    prompts = pq.read_table(night.folder / "prompts.parquet")
    own = [f'{{"n": {1 + row % 3}}}' for row in range(ROWS)]
    pq.write_table(prompts.append_column("own", [own]), night.folder / "own.parquet")
    inputs = {"uri": str(night.folder / "own.parquet"), "sampling_column": "own"}
    short = {"temperature": 0.9, "max_tokens": 16}
    done = night.run(sampling=short, keep_best=2, best_by=of_text(), more={"input": inputs})
    assert {(r.row_index % 3, r.score is None) for r in done.completions} == {
        (0, True),
        (1, True),
        (2, False),
    }


def test_what_a_retry_scores_is_the_same(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt at the group dies when everything is scored."""
    write, seen = verify.write_results, list[list[CompletionRecord]]()

    def dying(records: Any, *more: Any) -> bytes:
        seen.append(list(records))
        if len(seen) == 1:
            raise ObjectError("the disk is gone")
        return write(records, *more)

    monkeypatch.setattr(verify, "write_results", dying)
    done = night.run(sampling=SEVERAL, keep_best=1, best_by=JUDGE)
    first, second = (sorted(scores(records)) for records in seen)
    assert first == second == scores(done.completions)
    assert all(score is not None for _, _, score in first)


# --- texts that are not kept ----------------------------------------------------------------------
class Scored(Site):
    """Whose jobs publish one of two completions."""

    ahead = True  # drafts are written beforehand

    def spec(self, output: str, breaks: bool = True) -> JobSpec:
        values = super().spec(output, breaks).model_dump(mode="json")
        asked = of_text(ways={PLANTED["EMAIL"]: "raise"}, mark=PLANTED["EMAIL"])
        values["output"] |= {"keep_best": 1, "best_by": asked}
        values["speculation"]["pregenerate"] = self.ahead
        return load_spec(values)


@pytest.mark.parametrize("mode", list(PrivacyMode))
def test_scores_stay_where_texts_are_not_kept(
    mode: PrivacyMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    masked_logs(monkeypatch)
    caplog.set_level(logging.INFO)
    site = Scored(tmp_path / "site", migrated(tmp_path / "s.db"), mode, monkeypatch)
    job = site.drain(site.submit("out", breaks=False).job_id)
    assert job.state in (JobState.DONE, JobState.PARTIAL)
    rows = read_output(str(site.folder / "out")).to_pylist()
    good = [row for row in rows if row["error"] is None and row["finish_reason"] == "stop"]
    kept = {(r.row_index, r.sample_index): r for r in site.store.completions(job.job_id)}
    assert max(row["score"] or 0 for row in good) >= 1, "texts are scored whole"
    for row in good:
        assert row["score"] == kept[row["row_index"], row["sample_index"]].score
        named = row["score"] is None or row["score"] == row["text"].count(PLANTED["EMAIL"])
        assert named
    said = read_manifest(str(site.folder / "out")).info["best_by"]
    if mode is PrivacyMode.FULL:
        assert said["options"]["mark"] == PLANTED["EMAIL"]
    else:
        assert said == {"use": "of-text"}
        left = [*site.tables(), *((n, d.decode("latin-1")) for n, d in site.workspace().items())]
        assert [place for place, text in left if planted_in(text)] == []
        assert not planted_in(caplog.text)
    site.close()


def test_what_a_stopped_job_keeps_is_scored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked_logs(monkeypatch)
    site = Scored(tmp_path / "site", migrated(tmp_path / "s.db"), PrivacyMode.FULL, monkeypatch)
    site.ahead = False
    job_id = site.submit("out", breaks=False).job_id
    do_step, finished = StandInEngine.step, list[Any]()

    def cancelling(engine: StandInEngine) -> Any:
        done = do_step(engine)
        before = len(finished)
        finished.extend(c for c in done if c.request_id.startswith(job_id))
        if before < 4 <= len(finished):
            site.client.cancel(job_id, "cancelled by a test")
            site.worker.lease_keeper.check_cancelled()
        return done

    monkeypatch.setattr(StandInEngine, "step", cancelling)
    assert site.drain(job_id).state is JobState.CANCELLED
    records = list(site.store.completions(job_id))
    assert records
    assert all(r.score is not None for r in records if r.finish_reason is FinishReason.STOP)
    remainder = next((site.folder / "out").glob("remainder-*.yaml")).read_text()
    assert "best_by" in remainder
    best = [(r.row_index, r.sample_index) for r in best_of_each(records, 1)]
    rows = read_output(str(site.folder / "out")).to_pylist()
    assert [place for row in rows if (place := (row["row_index"], row["sample_index"])) in best]
    site.close()
