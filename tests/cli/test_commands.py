"""`jobs`, `show`, `retry`, `settings` and `migrate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flags_of_a_job, run_in, undone, write
from rich.table import Table

from specbatch.jobs.cli.console import show_whole
from specbatch.jobs.cli.jobs import ShownState
from specbatch.jobs.cli.show import decision_lines, quarantine_lines
from specbatch.jobs.cli.worker import Kind, kinds_of
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.records import JobState, RejectedRow, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.speculation import ALL_PROPOSERS, Decision, DecisionAction
from support.databases import migrated
from support.models import TinyPair


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair
) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with two jobs that are done, and what was told of them."""
    folder = tmp_path_factory.mktemp("site")
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    order = ("submit-job", *flags_of_a_job(tiny_pair), "--local", "--json")
    told = [run_in(folder, *order, "--output", name, "--name", name) for name in ("one", "two")]
    assert [one.code for one in told] == [0, 0], told
    return folder, [one.json for one in told]


@pytest.fixture
def folder(
    site: tuple[Path, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working folder, with those jobs in it; what a test does there is undone."""
    with undone(site[0], tmp_path / "before", monkeypatch) as here:
        yield here


@pytest.fixture
def made(site: tuple[object, list[dict[str, Any]]]) -> dict[str, Any]:
    """What was told of the first of them."""
    return site[1][0]


def test_jobs_lists_whole_ids_newest_first(cli: Any) -> None:
    found = cli("jobs", "--json").json
    assert [Path(row["output"]).name for row in found] == ["two", "one"]
    table = cli("jobs")
    assert all(row["job"] in table.out for row in found)
    assert cli("jobs", "--state", "failed").out == "no jobs\n"
    assert len(cli("jobs", "--limit", 1, "--json").json) == 1


def test_show_takes_the_first_characters_of_an_id(cli: Any, made: dict[str, Any]) -> None:
    shown = cli("show", made["job"][:14], "--json")
    saved = ("saved_usd", "saved_low_usd", "saved_high_usd", "speedup", "drafted")
    pinned = ("numeric_class", "proposer", "model_fingerprint", "model_parts", "stages")
    told = {name: shown.json[name] for name in ("decisions", *saved, *pinned)}
    told |= {"rows_quarantined": 0, "audits": [], "waits_for": None, "in_review": []}
    told |= {"given_back": None, "workers": {}, "interrupted": False, "resume": None}
    told |= {"notifications": [], "system": None, "template": None, "drafting_switched_off": []}
    told |= {"tables": []}
    assert shown.json == made | told
    assert "progress: 12 of 12 prompts, 1 of 1 groups" in cli("show", made["job"]).out


def test_an_interrupted_job_is_listed_and_shown_as_one(
    cli: Any, job: Any, site: tuple[object, list[dict[str, Any]]]
) -> None:
    """A job that was begun, of which nobody holds anything."""
    cli("submit-job", *job, "--local", "--timeout", 0, "--name", "begun")
    store = make_store(Settings())
    job_id = store.get_job("begun").job_id
    if (work := store.claim_job(job_id, Stage.INGEST, "w", 60.0)) is not None:
        store.release(work.lease, "its worker is gone")
    store.close()
    resume = f"specbatch retry {job_id} --local"
    (listed,) = cli("jobs", "--state", "interrupted", "--json").json
    assert (listed["job"], listed["state"], listed["resume"]) == (job_id, "interrupted", resume)
    assert cli("jobs", "--state", "running", "--json").json == []
    shown = cli("show", "begun", "--json").json
    assert (shown["state"], shown["resume"]) == ("interrupted", resume)
    latest = cli("show", "latest").out
    assert "running" not in latest
    assert f"`{resume}` resumes it" in latest
    done = [row["job"] for row in cli("jobs", "--state", "done", "--json").json]
    assert done == [told["job"] for told in reversed(site[1])]


def test_each_state_of_a_job_may_be_asked_for() -> None:
    assert {*ShownState} == {*JobState, "interrupted"}


def test_retry_of_a_finished_job_has_nothing_to_do(cli: Any, made: dict[str, Any]) -> None:
    sentence = (
        f"job {made['job']} is done: nothing to retry; to do its rows again, submit a new job with "
        "another output"
    )
    for flags in ([], ["--local"], ["--local", "--quarantined"]):
        again = cli("retry", made["job"], *flags)
        assert (again.code, again.out.strip(), again.err) == (0, sentence, "")
    assert "nothing to cancel" in cli("cancel", made["job"]).out


def test_show_tells_the_last_decisions_about_drafts_and_json_all(
    cli: Any, made: dict[str, Any]
) -> None:
    job_id = made["job"]
    store = make_store(Settings())
    before = store.decisions(job_id)
    noted = [
        Decision(2e9 + i, DecisionAction.DISABLED, "ngram", f"reason {i}", 0.25, 0.5, 8)
        for i in range(24)
    ]
    noted.append(Decision(3e9, DecisionAction.OFF, ALL_PROPOSERS, "the [last] reason"))
    store.note_decisions(job_id, noted)
    store.close()
    shown = cli("show", job_id).out
    assert f"decisions about drafts ({len(before) + 5:,} earlier ones are in --json)" in shown
    lines = [line.strip() for line in shown.splitlines() if " UTC " in line]
    assert len(lines) == 20
    assert lines[0] == "2033-05-18 03:33:25 UTC  taken out ngram: reason 5"
    assert lines[-1] == "2065-01-24 05:20:00 UTC  off: the [last] reason"
    told = cli("show", job_id, "--json").json["decisions"]
    assert len(told) == len(before) + 25
    assert told[-2] == {
        "at": 2e9 + 23, "action": "taken out", "proposer": "ngram", "reason": "reason 23",
        "acceptance": 0.25, "break_even": 0.5, "sequences": 8,
    }  # fmt: skip


def test_a_job_without_decisions_has_no_line_for_them() -> None:
    assert decision_lines([]) == []
    (title, line) = decision_lines([Decision(0.0, DecisionAction.ON, ALL_PROPOSERS, "it pays")])
    assert title == "decisions about drafts:"
    assert line.endswith("on: it pays")


def test_quarantined_rows_are_grouped_with_a_few_examples() -> None:
    rows = [RejectedRow(i, None, "null_prompt", "the prompt is null") for i in range(5)]
    lines = quarantine_lines([RejectedRow(9, "a", "too_long", "it is"), *rows])
    assert lines[0] == "quarantined, null_prompt: 5"
    assert len(lines) == 1 + 3 + 1 + 1 + 1
    assert lines[-2] == "    row 9 (id a): it is"
    assert "from 0" in lines[-1], "it says what row numbers count"


def test_settings_are_printed_without_passwords(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "redis://u:secret@h/0")
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", "postgresql://u:secret@h/d")
    shown = cli("settings", "--json")
    assert shown.json["broker_url"] == "redis://u:***@h/0"
    assert "secret" not in shown.out + cli("settings").out


def test_a_settings_file_with_a_password_that_others_can_read_is_remarked_on(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "settings.toml"
    monkeypatch.setenv("SPECBATCH_SETTINGS", str(path))
    path.write_text('broker_url = "redis://u:secret@h/0"')
    path.chmod(0o644)
    shown = cli("settings", "--json")
    assert shown.json["broker_url"] == "redis://u:***@h/0"
    assert f"other users can read it: `chmod 600 {path}`" in shown.err
    path.chmod(0o600)
    assert cli("settings", "--json").err == ""
    path.write_text("lease_sec = 5.0")
    path.chmod(0o644)
    assert cli("settings", "--json").err == ""


def test_migrate_makes_the_store(cli: Any, folder: Path) -> None:
    (folder / "specbatch-data" / "specbatch.db").unlink()
    assert "is up to date" in cli("migrate").out.replace("\n", "")
    assert (folder / "specbatch-data" / "specbatch.db").is_file()


def test_a_worker_of_all_kinds_proposes_only_with_a_proposer() -> None:
    assert kinds_of(Kind.ALL, "v", "none") == ("ingest", "verify", "record")
    assert kinds_of(Kind.ALL, "v", "p") == ("ingest", "propose", "verify", "record")
    assert kinds_of(Kind.RECORD, None, None) == ("record",)


def test_no_figure_is_cut_short_on_a_narrow_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(box=None)
    cells = ["8c1d3a5e7f90b2c4d6e8a", "a nightly job with a name", "1,000,000/1,000,000"]
    for cell in cells:
        table.add_column(cell[:3], no_wrap=True)
    table.add_row(*cells)
    show_whole(table)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert all(cell in shown for cell in cells)


def test_retry_says_what_it_did_in_json_and_waits_for_nobody(cli: Any, job: Any) -> None:
    stopped = cli("submit-job", *job, "--local", "--json", "--deadline-sec", 0.001)
    job_id = stopped.json["job"]
    assert "--timeout needs --local" in cli("retry", job_id, "--timeout", 5).complaint
    sent = cli("retry", job_id, "--json")
    assert sent.code == 0
    assert sent.json["job"] == job_id
    assert sent.json["units"] > 0
    assert f"`specbatch retry {job_id} --local` does the work here" in sent.err.replace("\n", " ")
    refused = cli("retry", job_id, "--local", "--quarantined")
    assert "is still" in refused.complaint
