"""What schedules run besides jobs, on a job that drafted: each does as its command."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli.conftest import Cli
from ledger.builders import Clock
from sqlalchemy import text

from specbatch.jobs.cli.cost import saved_line
from specbatch.jobs.cli.main import main
from specbatch.jobs.schedules.kinds import KINDS, Outcome
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.operations.spending import usd
from specbatch.pipeline.outputs.token_table import token_table
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.records import JobRow
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from specbatch.schemas.speculation import AcceptanceCount
from specbatch.schemas.timekeeping import Device, NewSession, SessionTime
from support.databases import sqlite_store
from support.models import TinyPair

TAGS = ["de", "fr", None]
DAY = 86_400.0
KEY = ("SPECBATCH_ENCRYPTION_KEY", "A" * 43 + "=")


def submit(pair: TinyPair, name: str) -> None:
    flags = ["--input", "prompts.parquet", "--output", name, "--max-tokens", 12, "--local"]
    flags += ["--verifier", pair.verifier, "--proposer", pair.draft, "--name", name]
    flags += ["--temperature", 0.8, "--depth", 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specbatch", "submit-job", *map(str, flags)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> Path:
    """A folder with two finished jobs over the same rows; of one no texts are kept."""
    folder = tmp_path_factory.mktemp("upkeep")
    prompts = [f"def f{i}(x):" for i in range(9)]
    table = pa.table({"id": [str(i) for i in range(9)], "prompt": prompts, "tag": TAGS * 3})
    pq.write_table(table, folder / "prompts.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(*KEY)
        submit(tiny_pair, "open")
        patch.setenv("SPECBATCH_PRIVACY", "hash-only")
        submit(tiny_pair, "hidden")
    return folder


@pytest.fixture
def store(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Of that folder, which is the working folder; what a test does there is undone."""
    shutil.copytree(site, tmp_path / "before")
    monkeypatch.chdir(site)
    monkeypatch.setenv(*KEY)
    with closing(make_store(Settings())) as found:
        yield found
    shutil.rmtree(site)
    shutil.copytree(tmp_path / "before", site)


def job_of(store: Store, name: str) -> JobRow:
    (job,) = [job for job in store.list_jobs() if job.name == name]
    return job


def run(kind: str, store: Store, **options: Any) -> Outcome:
    of = KINDS[kind]
    return of.run(of.options.model_validate(options), Settings(), store, time.time())


# --- mismatches -----------------------------------------------------------------------------
def test_the_refused_are_counted_by_token_and_tag_and_private_ones_by_the_tag_s_digest(
    cli: Cli, store: Store
) -> None:
    said = cli("mismatches", "--top", 1000, "--json").json
    records = {
        name: list(store.completions(job_of(store, name).job_id)) for name in ("open", "hidden")
    }
    table = token_table(records["open"])
    wanted = Counter(table.rejected[table.is_rejection].tolist())
    assert {one["token_id"]: one["count"] for one in said["tokens"]} == wanted
    assert all(one["text"] is not None for one in said["tokens"])
    both = [*records["open"], *records["hidden"]]
    refused = token_table(both).is_rejection.sum()
    assert said["refused"] == refused > wanted.total() > 0
    by_tag = {one["tag"]: (one["refused"], one["proposed"]) for one in said["tags"]}
    tags = {record.tag for record in both}  # those of the private job are digests
    assert by_tag.keys() == tags > set(TAGS)
    for tag in tags:
        of = [record for record in both if record.tag == tag]
        rejections = int(token_table(of).is_rejection.sum())
        assert by_tag[tag] == (rejections, sum(record.proposed for record in of))
    assert sum(one["share"] for one in said["tags"]) == pytest.approx(1.0)
    assert (said["jobs"], said["without_texts"]) == (2, 1)


def test_the_most_refused_come_first_and_the_run_says_how_many(cli: Cli, store: Store) -> None:
    said = cli("mismatches", "--top", 2)
    first = said.out.splitlines()[0]
    assert run("mismatches", store, top=2).summary == first
    of = cli("mismatches", "--json").json
    untested = of["proposed"] - of["accepted"] - of["refused"]
    assert untested > 0
    assert first == (
        f"of {of['proposed']:,} tokens proposed in 2 jobs {of['accepted']:,} were accepted, "
        f"{of['refused']:,} refused, and {untested:,} behind those not tested"
    )
    rows = [line.split() for line in said.out.splitlines() if line.split()[1].endswith("%")]
    assert len(rows) == 4
    assert int(rows[0][0]) >= int(rows[1][0])
    assert "1 of the jobs do not keep all texts" in said.err


def test_of_purged_jobs_nothing_is_counted(cli: Cli, store: Store) -> None:
    for name in ("open", "hidden"):
        assert cli("purge", "--job", job_of(store, name).job_id).code == 0
    said = cli("mismatches", "--json").json
    assert (said["refused"], said["tokens"], said["tags"]) == (0, [], [])
    assert cli("mismatches", "--tenant", "nobody").out == "no draft was refused in 0 jobs\n"


# --- audit ----------------------------------------------------------------------------------
def test_a_sample_of_last_night_s_jobs_is_audited_and_kept(store: Store) -> None:
    found = run("audit", store, jobs=5, sample=0.5)
    assert found.summary == (  # of the private one no prompt is kept
        "2 of 2 ended jobs audited, 5 completions replayed, 5 could not be; all is well"
    )
    (record,) = store.audits(job_of(store, "open").job_id)
    assert (record.sampled, record.differing, record.intact) == (5, 0, True)


def test_a_changed_tag_fails_the_run(store: Store) -> None:
    job = job_of(store, "open")
    engine = make_engine(Settings().store_url)
    with engine.begin() as conn:
        conn.execute(
            text("UPDATE completions SET tag = 'es' WHERE row_index = 3 AND job_id = :job"),
            {"job": job.job_id},
        )
    engine.dispose()
    found = run("audit", store, jobs=5, sample=0)
    assert not found.is_well
    assert f"look at {job.job_id}" in found.summary
    assert run("audit", store, days=1e-9).summary == (
        "0 of 0 ended jobs audited, 0 completions replayed; all is well"
    )


# --- drift and spend ------------------------------------------------------------------------
def test_what_drift_finds_is_a_figure_of_the_store_for_two_days() -> None:
    clock = Clock()
    clock.now = 20_000.5 * DAY
    store = sqlite_store(clock)
    for night in range(80):
        falling = 7_000.0 * 0.99 ** max(0, night - 55)
        for name, agreed in (("nightly", falling), ("steady", 7_000.0)):
            counts = [AcceptanceCount("ngram", None, agreed, 10_000.0)]
            store.learn_acceptance("default", name, counts)
        clock.advance(DAY)
    assert store.figures().slow_falls == {}, "nobody has looked"
    found = run("drift", store)
    assert found.summary == "of 2 acceptances 1 fall slowly: nightly (ngram)"
    keep(store, clock, found)
    assert store.figures().slow_falls == {("nightly", "ngram"): True, ("steady", "ngram"): False}
    clock.advance(2 * DAY + 1)
    assert store.figures().slow_falls == {}


def keep(store: Store, clock: Clock, found: Outcome) -> None:
    """As an attempt that ends does."""
    waiting = ScheduleRun("upkeep", clock.now, RunState.QUEUED)
    store.note_schedule_run(waiting)
    claimed = store.claim_schedule_run(waiting)
    assert claimed is not None
    row = ScheduleRun(
        *(waiting.schedule, waiting.logical_at, RunState.DONE),
        reason=found.summary, started_at=claimed.started_at, found=found.found,
    )  # fmt: skip
    assert store.hold_schedule_run(row)


def test_spend_is_what_sessions_leased_and_above_a_limit_the_exit_code_is_3(
    cli: Cli, store: Store
) -> None:
    assert store.sessions(), "the jobs' own"
    store.begin_session(NewSession("idle", "w", Device("gpu", "", "", 7_200_000), 18_000_000_000))
    store.report_time(SessionTime("idle", 18_000_000_000, idle=18_000_000_000), {})  # half an hour
    said = cli("spend", "--json")
    assert said.code == 0
    assert said.json["to_date_usd"] == pytest.approx(3.6, abs=0.01)
    assert (said.json["forecast_usd"], said.json["over"]) == (None, False)
    over = cli("spend", "--limit", 3)
    assert (over.code, "limit $3.00: above it" in over.out) == (3, True)
    found = run("spend", store, limit_usd=3.0)
    assert found.is_well, "the alert tells"
    assert found.found is not None
    assert found.found["spend"]["limit"] == 3.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "$0.00"), (0.00042, "$0.00042"), (0.5, "$0.50"), (1234.5, "$1,234.50")],
)
def test_small_sums_have_digits(value: float, shown: str) -> None:
    assert usd(value) == shown


def test_a_loss_is_a_negative_saving_inside_its_interval() -> None:
    saved = Savings(-0.0001, -0.0025, 0.0024, 1.0, 0.98, 9)
    assert saved_line(saved, is_drafted=True) == (
        "saved against depth 0: -$0.000100 (0.98×), 95 % interval -$0.002500 to $0.002400"
    )


# --- figures --------------------------------------------------------------------------------
def test_the_figures_are_those_of_the_jobs_week_by_week(cli: Cli, store: Store) -> None:
    said = cli("figures", "--days", 10, "--json").json
    before, now = said["weeks"]
    whole = cli("cost", "--json").json["figures"]
    progress = [store.progress(job.job_id) for job in store.list_jobs()]
    assert (before["jobs"], now["jobs"]) == (0, 2)
    assert (before["tokens"], before["acceptance"], before["usd"]) == (0, None, 0.0)
    assert {**now, "from": None} == {**said["whole"], "from": None}
    assert now["tokens"] == whole["tokens"] > 0
    assert now["usd_per_1k_tokens"] == pytest.approx(whole["usd_per_1k_tokens"])
    accepted, proposed = sum(p.accepted for p in progress), sum(p.proposed for p in progress)
    assert now["acceptance"] == accepted / proposed
    assert said["month"]["to_date_usd"] > 0


def test_the_figures_are_a_table_that_ends_with_the_month(cli: Cli, store: Store) -> None:
    said = cli("figures")
    heading, *weeks, whole, saved, month = said.out.splitlines()
    assert heading.split()[:3] == ["from", "(UTC)", "jobs"]
    assert len(weeks) == 5
    assert whole.split()[:2] == ["all", str(len(store.list_jobs()))]
    assert "saved against depth 0" in saved or "against depth 0" in saved
    assert " so far" in month
