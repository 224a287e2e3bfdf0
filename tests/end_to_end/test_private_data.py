"""Planted personal data is in no table, file, log or report of a tenant whose texts are not kept,
and wholly in its output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.jobs.cli.main import main
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.observe.tracing.logs import JsonFormatter
from specbatch.pipeline.operations.tools import make_exporter
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.encryption import is_encrypted
from specbatch.schemas.errors import UsageError
from specbatch.schemas.exports import ExportKind, ExportOrder, Selection
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import CompletionRecord, JobState
from specbatch.schemas.spec import spec_of
from specbatch.schemas.speculation import PastOutput
from support.databases import migrated
from support.html_page import Page
from support.planted import BREAKS, PLAIN, PLANTED, Site, masked_logs, planted_in, shown
from support.traces import read_traces

PRIVATE = [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY]
KINDS = set(PLANTED)


def url_of(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if database == "sqlite":
        return migrated(tmp_path / "store.db")
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    masked_logs(monkeypatch)
    return monkeypatch


def said_by(patch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> str:
    """What a command prints, on both streams."""
    patch.setattr(sys, "argv", ["specbatch", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    return str(captured.out + captured.err)


def finished(site: Site) -> tuple[str, str]:
    """Two nights, the second of which drafts from the first, and a job that is stopped; ids."""
    first = site.drain(site.submit("out", key=f"night of {PLANTED['EMAIL']}").job_id)
    assert first.state is JobState.PARTIAL
    second = site.drain(site.submit("again", breaks=False).job_id)
    stopped = site.submit("stopped").job_id
    for _ in range(2):
        message = next(message for message in site.store.due() if message.job_id == stopped)
        site.attempt(message)
    site.client.cancel(stopped, f"asked for by {PLANTED['EMAIL']}")
    assert site.drain(stopped).state is JobState.CANCELLED
    return first.job_id, second.job_id


def everything(site: Site, patch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> dict[str, str]:
    """All that is left outside the outputs, by where it is."""
    found: dict[str, str] = {}
    for where, what in site.tables():
        found[where] = found.get(where, "") + what + "\n"
    for name, data in site.workspace().items():
        found[f"file {name}"] = name + data.decode("latin-1")
    jobs = site.store.list_jobs()
    found["metrics"] = site.metrics()
    found["log"] = caplog.text
    found["log as JSON"] = "\n".join(map(JsonFormatter().format, caplog.records))
    site.close()
    found["traces"] = site.traces.read_text()
    database = Path(site.url.removeprefix("sqlite:///"))
    for path in database.parent.glob(f"{database.name}*") if "sqlite" in site.url else ():
        found[path.name] = path.read_bytes().decode("utf-8", "replace")
    found["jobs"] = said_by(patch, capsys, "jobs") + said_by(patch, capsys, "jobs", "--json")
    for job in jobs:
        for flags in ((), ("--json",)):
            shown = said_by(patch, capsys, "show", job.job_id, *flags)
            assert job.job_id in shown
            found[f"show {job.job_id} {flags}"] = shown
        made = site.folder / f"report-{job.job_id}.html"
        assert made.name in said_by(patch, capsys, "report", job.job_id, "--output", str(made))
        page = Page(made.read_text())
        found[f"report {job.job_id}"] = page.html + page.text + "".join(page.texts)
    found["settings"] = said_by(patch, capsys, "settings")
    return found


@pytest.mark.parametrize(
    ("database", "mode"),
    [
        ("sqlite", PrivacyMode.REDACTED),
        ("sqlite", PrivacyMode.HASH_ONLY),
        ("postgres", PrivacyMode.REDACTED),
        pytest.param("postgres", PrivacyMode.HASH_ONLY, marks=pytest.mark.long),
    ],
)
def test_personal_data_is_nowhere_but_in_the_output(
    database: str,
    mode: PrivacyMode,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    capsys: Any,
    caplog: Any,
) -> None:
    caplog.set_level(logging.DEBUG)
    site = Site(tmp_path / "site", url_of(database, request, tmp_path), mode, patch)
    first, second = finished(site)
    files = site.workspace()
    assert not [name for name in files if second in name], "what cannot be retried is deleted"
    assert [name for name in files if first in name], "a row of it may be done again"
    assert all(is_encrypted(data) for data in files.values())
    left = everything(site, patch, capsys, caplog)
    where = {place: planted_in(text) for place, text in left.items() if planted_in(text)}
    assert not where
    if mode is PrivacyMode.HASH_ONLY:
        assert not [place for place, text in left.items() if PLAIN in text and "site" not in place]
    for log in (left["log"], left["log as JSON"]):
        assert "Task raised unexpected" in log, "an error was met, and its traceback logged"
    spans = read_traces(site.traces)
    assert {"submit", "ingest", "propose", "verify", "record", "publish"} <= {s.name for s in spans}
    assert [s for s in spans if s.attributes.get("error.type") == "UnshownError"] == []
    assert [s for s in spans if s.attributes.get("error.type") == "ValueError"]
    assert not {"specbatch.job.name", "specbatch.tenant"} & {n for s in spans for n in s.attributes}
    label = "private" if mode is PrivacyMode.HASH_ONLY else "letters of [EMAIL]"
    assert f'specbatch_emitted_tokens_total{{job="{label}"' in left["metrics"]
    output = read_output(str(site.folder / "out")).to_pylist()
    assert {kind for row in output for kind in planted_in(f"{row['text']} {row['id']}")} == KINDS


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_under_full_the_same_search_finds_everything_and_exports_are_whole(
    database: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    capsys: Any,
    caplog: Any,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = url_of(database, request, tmp_path)
    site = Site(tmp_path / "site", url, PrivacyMode.FULL, patch)
    _, second = finished(site)
    for kind in (ExportKind.COMPLETIONS, ExportKind.CORRECTIONS):
        assert set(planted_in(exported(site, second, kind))) == KINDS
    left = everything(site, patch, capsys, caplog)
    assert set(planted_in(left["completions.text"])) >= KINDS
    assert set(planted_in(left["completions.token_ids"])) >= KINDS
    assert set(planted_in(left["completions.row_id"])) >= KINDS
    assert "EMAIL" in planted_in(left["log as JSON"])
    named = f'"letters of {PLANTED["EMAIL"]}"'  # the job's name is all that a trace quotes
    assert named in left["traces"]
    assert planted_in(left["traces"].replace(named, "")) == []
    assert PLAIN not in left["traces"]
    places = ("jobs.spec", "jobs.idempotency_key", "groups.last_error", "log", "jobs", "metrics")
    for place in places:
        assert "EMAIL" in planted_in(left[place]), place
    for place in ("rejected_rows.reason", "rejected_rows.row_id", "jobs.stop_reason"):
        assert planted_in(left[place]), place
    assert "PHONE" in planted_in(left["completions.tag"])
    assert "PHONE" in planted_in(left["metrics"]), "tags are labels"
    assert any(planted_in(text) for place, text in left.items() if place.startswith("show"))


def exported(site: Site, job_id: str, kind: ExportKind) -> str:
    """All that an export says, its metadata too, also of a job that runs."""
    to = site.folder / f"{kind}-{job_id}.parquet"
    chosen = Selection(min_rejections=0 if kind is ExportKind.CORRECTIONS else None)
    order = ExportOrder(kind, str(to), chosen, overwrite=True, so_far=True)
    make_exporter(site.settings, site.store).export(job_id, order)
    table = pq.read_table(to)
    return " ".join(map(shown, (table.schema.to_string(), *map(dict, table.to_pylist()))))


@pytest.mark.parametrize("mode", PRIVATE)
def test_exports_have_no_more_than_is_kept(
    mode: PrivacyMode, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "site", migrated(tmp_path / "s.db"), mode, patch)
    job_id = site.submit(breaks=False).job_id
    for _ in range(6):  # some groups are done, and the files of all are there
        site.attempt(next(message for message in site.store.due() if message.job_id == job_id))
    assert site.workspace()
    for kind in ExportKind:
        assert planted_in(exported(site, job_id, kind)) == []
    site.drain(job_id)
    for kind in ExportKind:
        said = exported(site, job_id, kind)
        assert planted_in(said) == []
        assert mode is PrivacyMode.REDACTED or PLAIN not in said
    site.close()


@dataclass(frozen=True)
class Drained:
    """A job under some mode, done."""

    rows: list[dict[str, Any]]  # of its output
    files: list[str]
    kept: list[CompletionRecord]  # by the store
    past: list[PastOutput]  # as the store gives them to who drafts for the next night


@pytest.fixture(scope="module")
def drained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[PrivacyMode, Drained]:
    """The same job under each mode."""
    return {mode: _drained(mode, tmp_path_factory.mktemp(mode)) for mode in PrivacyMode}


def _drained(mode: PrivacyMode, folder: Path) -> Drained:
    with pytest.MonkeyPatch.context() as patch:
        masked_logs(patch)
        site = Site(folder / "site", migrated(folder / "s.db"), mode, patch)
        job = site.drain(site.submit().job_id)
        rows = read_output(str(site.folder / "out")).to_pylist()
        kept = list(site.store.completions(job.job_id))
        vocabulary = str(job.report["vocabulary"])
        past = list(site.store.past_outputs("clinic", job.name, vocabulary, 10_000, "x"))
        files = sorted(path.name for path in (site.folder / "out").glob("*"))
        site.close()
    return Drained(rows, files, kept, past)


def _comparable(done: Drained) -> list[dict[str, Any]]:
    """Its rows without what is each site's own."""
    charged = {(c.row_index, c.sample_index): c for c in done.kept}
    rows = [dict(row) for row in done.rows]
    for row in rows:
        del row["verifier"], row["proposer"]  # folders
        cost = row.pop("cost_usd")  # was measured
        if record := charged.get((row["row_index"], row["sample_index"])):
            assert cost == record.cost_usd
        if row["error"] and BREAKS in str(row["error"]):
            row["error"] = "not kept"
    return rows


@pytest.mark.parametrize("mode", PRIVATE)
def test_the_output_is_the_one_of_a_tenant_that_keeps_everything(
    mode: PrivacyMode, drained: Mapping[PrivacyMode, Drained]
) -> None:
    whole, private = _comparable(drained[PrivacyMode.FULL]), _comparable(drained[mode])
    failed = {row["row_index"] for row in whole if row["error"] == "not kept"}
    assert len(failed) == 1
    for one, other in zip(whole, private, strict=True):
        if one["row_index"] in failed:
            assert other["error"]
            one["error"] = other["error"]
        assert one == other
    assert drained[PrivacyMode.FULL].files == drained[mode].files


def test_redacted_keeps_what_has_nothing_personal_in_it(
    drained: Mapping[PrivacyMode, Drained],
) -> None:
    done = drained[PrivacyMode.REDACTED]
    kept = {record.row_index: record for record in done.kept}
    mail = kept[0]
    assert mail.text == "Ähm, write to [EMAIL], please — EMAIL!"
    gone = [place for place, token in enumerate(mail.token_ids) if token == NOT_KEPT]
    begin = len("Ähm, write to ".encode())
    assert gone == list(range(begin, begin + len(PLANTED["EMAIL"])))
    assert len(mail.logprobs) == len(mail.token_ids) == len(mail.origins)
    quiet = next(record for record in kept.values() if record.row_id == "quiet")
    assert quiet.text == PLAIN
    assert NOT_KEPT not in quiet.token_ids
    hashed = next(r for r in kept.values() if r.text == PLAIN and r.row_id != "quiet")
    assert len(hashed.row_id) == 32
    assert hashed.tag == "tag [PHONE]"
    stopped = next(record for record in kept.values() if record.row_id == "stops")
    assert stopped.text == "One that "
    assert done.past
    assert all(NOT_KEPT not in output.token_ids for output in done.past)


def test_without_a_key_nothing_is_submitted(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "site", migrated(tmp_path / "s.db"), PrivacyMode.REDACTED, patch)
    keyless = site.settings.model_copy(update={"encryption_key": ""})
    client = make_client(keyless, lambda _: None, site.store)
    with pytest.raises(UsageError, match="'clinic' are kept redacted, which needs SPECBATCH_ENC"):
        client.submit(site.spec("out"))
    assert site.store.list_jobs() == []
    job = site.submit()
    site.close()
    keyless_store = make_store(keyless)
    with pytest.raises(UsageError, match=f"the spec of job {job.job_id} is encrypted: set SPECB"):
        spec_of(keyless_store.get_job(job.job_id))
    keyless_store.close()
