"""OpenLineage hears of jobs: real events of its own client, at an HTTP endpoint on this host."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator, ValidationError
from ledger.builders import Clock
from pydantic import ValidationError as PydanticError

from specbatch.pipeline.runtime.lineage import Lineage, make_lineage
from specbatch.pipeline.runtime.lineage_events import (
    FACET,
    SCHEMA_FILE,
    column_lineage,
    dataset_name,
    input_place,
)
from specbatch.pipeline.runtime.notifier import TAKEN_SEC, Notifier, retry_sec
from specbatch.schemas import lineage
from specbatch.schemas.errors import ObjectError, SpecError
from specbatch.schemas.lineage import MOST_FIELDS, InputFacts, OutputFacts, parent_in
from specbatch.schemas.notifications import Event
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from support.openlineage import unset
from support.openlineage_rules import RULES, checked
from support.stand_ins import Site
from support.tree import ROOT
from support.webhooks import Receiver, receiving

DOCS = "https://docs.example.com/specbatch"
PROMPTS = ["The secret of Anna Karenina", "What Boris told nobody", "A third prompt of theirs"]
PARENT = "airflow/nightly.load/01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f10"


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of this machine's own OpenLineage, and nothing is left of a test's."""
    monkeypatch.chdir(tmp_path)
    with unset():
        yield


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url.removesuffix("/hook"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, lineage=True)
    yield made
    made.close()


def notifier(site: Site, **more: Any) -> Notifier:
    told = make_lineage(DOCS)
    assert told is not None
    return Notifier(site.store, {lineage.TARGET: told}, clock=site.clock, **more)


def submit(site: Site, prompts: list[str] | None = None, **more: Any) -> str:
    if prompts is not None:
        rows = [{"id": f"r{i}", "prompt": p, "topic": "t"} for i, p in enumerate(prompts)]
        (site.folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec: dict[str, Any] = {
        "name": "nightly",
        "input": {"uri": "in.jsonl"},
        "output": {"uri": "out", "keep_columns": ["topic"]},
        "verifier": site.model,
        "sampling": {"max_tokens": 12, "temperature": 0.8, "seed": 5},
    }
    return site.client.submit(load_spec(spec | more).resolved(site.folder))[0].job_id


def work(site: Site, *kinds: Stage) -> None:
    site.work(site.worker("host:1", site.host()), *kinds)


def said(receiver: Receiver) -> list[dict[str, Any]]:
    """The events, each checked against OpenLineage's rules."""
    return [checked(json.loads(body)) for _, body in receiver.got]


def kinds(receiver: Receiver) -> list[str]:
    return [event["eventType"] for event in said(receiver)]


# --- what a job tells -----------------------------------------------------------------------
def test_a_job_is_told_from_its_start_to_its_end(site: Site, receiver: Receiver) -> None:
    job_id = submit(site, PROMPTS)
    work(site, Stage.INGEST)
    assert notifier(site).send_due() == 1
    work(site)
    assert notifier(site).send_due() == 1
    assert notifier(site).send_due() == 0
    assert set(receiver.paths) == {"/api/v1/lineage"}
    start, end = said(receiver)
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == end["run"]["runId"]
    assert UUID(start["run"]["runId"]).version == 7
    assert start["job"]["namespace"] == "default"
    assert start["job"]["name"] == "nightly"
    for event in (start, end):
        (read,) = event["inputs"]
        assert (read["namespace"], read["name"]) == ("file", str(site.folder / "in.jsonl"))
        fields = [field["name"] for field in read["facets"]["schema"]["fields"]]
        assert fields == ["id", "prompt", "topic"]
        size = (site.folder / "in.jsonl").stat().st_size
        assert read["inputFacets"]["inputStatistics"]["size"] == size
    (written,) = end["outputs"]
    assert (written["namespace"], written["name"]) == ("file", str(site.folder / "out/data"))
    parts = list((site.folder / "out/data").iterdir())
    figures = written["outputFacets"]["outputStatistics"]
    assert (figures["rowCount"], figures["fileCount"]) == (len(PROMPTS), len(parts))
    assert figures["size"] == sum(path.stat().st_size for path in parts)
    names = [field["name"] for field in written["facets"]["schema"]["fields"]]
    assert names == site.output().schema.names
    progress = site.store.progress(job_id)
    facet = end["run"]["facets"][FACET]
    assert facet["job"] == {"id": job_id, "tenant": "default", "state": "done"}
    assert facet["tokens"]["completion"] == progress.completion_tokens > 0
    job = site.store.get_job(job_id)
    assert facet["models"]["verifier"]["fingerprint"] == job.model_fingerprint
    assert facet["numerics"]["class"] == job.numeric_class
    assert facet["cost"]["usd"] == round(progress.cost_usd, 6)


def test_the_facet_of_our_own_is_as_its_schema_says(site: Site, receiver: Receiver) -> None:
    submit(site, PROMPTS)
    work(site)
    notifier(site).send_due()
    schema = json.loads((ROOT / "docs" / SCHEMA_FILE).read_text())
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for event in said(receiver):
        facet = event["run"]["facets"][FACET]
        checker.validate({FACET: facet})
        place, _, pointer = facet["_schemaURL"].partition("#/")
        assert place == schema["$id"]
        assert pointer.split("/")[1] in schema["$defs"]
    without = {name: value for name, value in facet.items() if name != "tokens"}
    assert not checker.is_valid({FACET: without})


def test_an_event_without_what_openlineage_requires_is_told_from_ours(
    site: Site, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests check each event that they get by these rules."""
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", PARENT)
    submit(site, PROMPTS)
    work(site)
    notifier(site).send_due()
    *_, end = said(receiver)
    found = set(end["run"]["facets"]) | set(end["job"]["facets"])
    assert found == {"processing_engine", "parent", "tags", "jobType", FACET}
    required = ["eventType", "eventTime", "producer", "schemaURL", "run", "job"]
    for name in required:
        assert not RULES.is_valid({key: value for key, value in end.items() if key != name})
    for facet in end["run"]["facets"].values():
        url = facet.pop("_schemaURL")
        assert not RULES.is_valid(end)
        facet["_schemaURL"] = url
    assert RULES.is_valid(end)
    assert not RULES.is_valid({**end, "eventType": "DONE"})
    no_times = [
        "yesterday",
        "2026-13-01T00:00:00Z",
        "2026-01-01T00:00:00",
        "2026-01-01T00:00:00Z\n",
    ]
    for time in no_times:
        assert not RULES.is_valid({**end, "eventTime": time})
    for uri in ("docs", "https://h/a b", "https://h/ü", "https://h/%2", "https://h/#a#b"):
        assert not RULES.is_valid({**end, "producer": uri})
    for run_id in ("7", PARENT[-36:].replace("-", "") + "----"):
        assert not RULES.is_valid({**end, "run": {**end["run"], "runId": run_id}})


def test_a_facet_of_another_version_is_told_from_that_which_the_rules_are_of(
    site: Site, receiver: Receiver
) -> None:
    submit(site, PROMPTS)
    work(site)
    notifier(site).send_due()
    *_, end = said(receiver)
    for facet in (end["job"]["facets"]["jobType"], end["run"]["facets"][FACET]):
        url = facet["_schemaURL"]
        facet["_schemaURL"] = url.replace("-0-", "-9-", 1)
        assert not RULES.is_valid(end)
        facet["_schemaURL"] = url
    assert RULES.is_valid(end)
    del end["inputs"][0]["facets"]["schema"]["fields"][0]
    with pytest.raises(ValidationError, match="no schema facet has"):
        checked(end)


def test_columns_of_the_output_name_those_that_they_come_from(
    site: Site, receiver: Receiver
) -> None:
    submit(site, PROMPTS)
    work(site)
    notifier(site).send_due()
    (written,) = said(receiver)[-1]["outputs"]
    found = written["facets"]["columnLineage"]["fields"]
    comes_from = {name: [f["field"] for f in of["inputFields"]] for name, of in found.items()}
    assert comes_from["text"] == comes_from["prompt_tokens"] == ["prompt"]
    assert comes_from["id"] == comes_from["seed"] == ["id"]
    assert comes_from["topic"] == ["topic"]
    assert not comes_from.keys() & {"row_index", "cost_usd", "verifier"}
    assert {f["name"] for of in found.values() for f in of["inputFields"]} == {
        str(site.folder / "in.jsonl")
    }


def test_a_wide_input_has_in_its_schema_all_columns_that_the_lineage_names(
    site: Site, receiver: Receiver
) -> None:
    row: dict[str, Any] = {"": 0} | {f"x{i}": i for i in range(MOST_FIELDS)}
    row |= {"id": "r0", "how": {"temperature": 0.5}, "prompt": "What now", "note": "n", "other": 1}
    (site.folder / "in.jsonl").write_text(json.dumps(row))
    read = {"uri": "in.jsonl", "sampling_column": "how"}
    submit(site, input=read, output={"uri": "out", "keep_columns": ["note"]})
    work(site)
    notifier(site).send_due()
    *_, end = said(receiver)
    fields = [field["name"] for field in end["inputs"][0]["facets"]["schema"]["fields"]]
    assert fields == [*list(row)[:MOST_FIELDS], "prompt", "id", "how", "note"]
    columns = end["outputs"][0]["facets"]["columnLineage"]["fields"]
    (*_, how) = columns["text"]["inputFields"]
    assert how["field"] == "how"
    assert how["transformations"] == [{"type": "INDIRECT", "subtype": "CONDITIONAL"}]


def test_no_event_has_a_text_of_a_prompt_or_of_an_output(site: Site, receiver: Receiver) -> None:
    job_id = submit(site, PROMPTS)
    work(site)
    notifier(site).send_due()
    sent = b"".join(body for _, body in receiver.got).decode()
    texts = [*PROMPTS, *(c.text for c in site.store.completions(job_id) if len(c.text) > 3)]
    assert len(texts) > len(PROMPTS)
    assert not [text for text in texts if text in sent or json.dumps(text)[1:-1] in sent]


def test_a_job_that_cannot_begin_tells_its_start_and_that_it_failed(
    site: Site, receiver: Receiver
) -> None:
    job_id = submit(site)  # there is no input
    work(site)
    assert notifier(site).send_due() == 1
    assert kinds(receiver) == ["START", "FAIL"]
    message = said(receiver)[-1]["run"]["facets"]["errorMessage"]["message"]
    assert message == f"job {job_id} failed; `specbatch show {job_id}` says why"
    assert said(receiver)[-1]["outputs"][0]["facets"] == {}


def test_a_job_that_is_stopped_is_aborted(site: Site, receiver: Receiver) -> None:
    job_id = submit(site, PROMPTS)
    work(site, Stage.INGEST)
    site.client.cancel(job_id, "for Boris")
    work(site)
    assert site.state(job_id) is JobState.CANCELLED
    notifier(site).send_due()
    assert kinds(receiver) == ["START", "ABORT"]
    assert "Boris" not in json.dumps(said(receiver))


def test_a_job_that_is_resumed_after_its_end_is_another_run(site: Site, receiver: Receiver) -> None:
    job_id = submit(site)
    work(site)
    notifier(site).send_due()
    submit(site, PROMPTS, output={"uri": "elsewhere"})  # now the input is there
    site.clock.advance(60.0)
    retried_at = site.clock()
    site.client.retry(job_id)
    work(site)
    notifier(site).send_due()
    mine = [e for e in said(receiver) if e["run"]["facets"][FACET]["job"]["id"] == job_id]
    assert [e["eventType"] for e in mine] == ["START", "FAIL", "START", "COMPLETE"]
    runs = [e["run"]["runId"] for e in mine]
    assert runs[0] == runs[1] != runs[2] == runs[3]
    assert mine[2]["eventTime"].startswith(_time(retried_at))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()[:19]


# --- an endpoint that is slow or away -------------------------------------------------------
def test_a_start_that_was_refused_is_told_before_the_end(
    site: Site, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = submit(site, PROMPTS)
    receiver.answers = [404]
    work(site, Stage.INGEST)
    assert notifier(site).send_due() == 0
    assert "OpenLineage does not take the event: HTTP status 404" in caplog.text
    assert receiver.url.removesuffix("/hook") not in caplog.text
    work(site)
    assert site.state(job_id) is JobState.DONE, "the job does not wait for the endpoint"
    assert notifier(site).send_due() == 1
    assert kinds(receiver) == ["START", "START", "COMPLETE"]
    site.clock.advance(retry_sec(1) or 0.0)
    assert notifier(site).send_due() == 0, "the start needs no attempt of its own any more"
    assert kinds(receiver) == ["START", "START", "COMPLETE"]


def test_an_end_waits_for_the_process_that_tells_the_start(site: Site, receiver: Receiver) -> None:
    submit(site, PROMPTS)
    work(site, Stage.INGEST)
    (start,) = site.store.due_notifications([lineage.TARGET])
    assert site.store.take_notification(start, TAKEN_SEC)  # by another process, which is slow
    work(site)
    assert notifier(site).send_due() == 0
    assert kinds(receiver) == []
    site.store.note_sent(start)
    site.clock.advance(retry_sec(1) or 0.0)
    assert notifier(site).send_due() == 1
    assert kinds(receiver) == ["COMPLETE"]


def test_an_end_waits_also_for_a_later_attempt_at_the_start(site: Site, receiver: Receiver) -> None:
    submit(site, PROMPTS)
    receiver.answers = [404]
    work(site, Stage.INGEST)
    notifier(site).send_due()
    site.clock.advance(retry_sec(1) or 0.0)
    (start,) = site.store.due_notifications([lineage.TARGET])
    assert site.store.take_notification(start, TAKEN_SEC)  # by another process, which is slow
    work(site)
    assert notifier(site).send_due() == 0
    assert kinds(receiver) == ["START"]


def test_who_sends_the_end_has_taken_the_start(site: Site, receiver: Receiver) -> None:
    job_id = submit(site, PROMPTS)
    work(site)
    start, end = sorted(site.store.due_notifications([lineage.TARGET]), key=lambda one: one.number)
    taken: list[bool] = []
    receiver.before = lambda: taken.append(site.store.take_notification(start, TAKEN_SEC))
    receiver.answers = [404]
    job = site.store.get_job(job_id)
    with pytest.raises(ObjectError, match="404"):
        Lineage(DOCS).tell(end, job, site.store)
    assert not site.store.due_notifications([lineage.TARGET], job_id=job_id)[1:], "it is put off"
    Lineage(DOCS).tell(end, job, site.store)
    assert taken == [False, False, False], "no other process can tell it meanwhile or later"
    assert kinds(receiver) == ["START", "START", "COMPLETE"]
    told, _ = site.store.notifications_of(job_id)
    assert (told.attempts, told.error) == (2, None)
    assert told.sent_at is not None


def test_a_start_that_was_given_up_is_told_with_the_end(site: Site, receiver: Receiver) -> None:
    submit(site, PROMPTS)
    work(site, Stage.INGEST)
    (start,) = site.store.due_notifications([lineage.TARGET])
    site.store.take_notification(start, TAKEN_SEC)
    site.store.note_not_sent(start, "HTTP status 404", None)
    work(site)
    assert notifier(site).send_due() == 1
    assert kinds(receiver) == ["START", "COMPLETE"]


def test_an_end_that_was_refused_is_told_again(site: Site, receiver: Receiver) -> None:
    submit(site, PROMPTS)
    work(site)
    receiver.answers = [200, 403]
    assert notifier(site).send_due() == 1
    site.clock.advance(retry_sec(1) or 0.0)
    assert notifier(site).send_due() == 1
    assert kinds(receiver) == ["START", "COMPLETE", "COMPLETE"]
    first, second = said(receiver)[1:]
    assert first == second


def test_a_process_does_not_wait_long_for_an_endpoint_that_hangs(
    site: Site, receiver: Receiver
) -> None:
    asked, released = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        released.wait(60)

    receiver.before = hang
    submit(site, PROMPTS)
    work(site)
    sender = notifier(site, last_sec=0.01)
    sender.start()
    assert asked.wait(60)
    sender.close()
    assert not released.is_set(), "it ended before the endpoint answered"
    released.set()
    sender._thread.join(60)
    assert kinds(receiver) == ["START", "COMPLETE"], "what was begun ends in the background"


# --- the switch -----------------------------------------------------------------------------
def test_without_configuration_nothing_is_queued_or_told(tmp_path: Path) -> None:
    assert make_lineage(DOCS) is None
    site = Site(tmp_path)
    job_id = submit(site, PROMPTS)
    work(site)
    assert site.store.notifications_of(job_id) == []
    assert not site.store.get_job(job_id).report.keys() & {lineage.INPUT, lineage.OUTPUT}
    site.close()


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OPENLINEAGE_URL": "http://h"}, True),
        ({"OPENLINEAGE_URL": ""}, False),
        ({"OPENLINEAGE_URL": "http://h", "OPENLINEAGE_DISABLED": "True"}, False),
        ({"OPENLINEAGE_CONFIG": str(ROOT / "mkdocs.yml")}, True),
        ({"OPENLINEAGE_CONFIG": "/not/there/openlineage.yml"}, False),
        ({"OPENLINEAGE__TRANSPORT__TYPE": "http"}, True),
        ({"OPENLINEAGE_NAMESPACE": "mine"}, False),
    ],
)
def test_openlineages_own_configuration_is_the_switch(
    environment: Mapping[str, str], is_on: bool
) -> None:
    assert lineage.is_configured(environment) == is_on


def test_its_file_is_found_in_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "openlineage.yml").write_text("transport: {type: noop}\n")
    assert lineage.is_configured({})


def test_where_its_client_is_missing_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(lineage, "is_installed", lambda: False)
    assert make_lineage(DOCS) is None
    assert "pip install 'specbatch[lineage]'" in caplog.text


def test_a_target_of_a_file_cannot_take_its_place() -> None:
    assert Lineage(DOCS).events == (
        *(Event.STARTED, Event.DONE, Event.PARTIAL, Event.FAILED, Event.CANCELLED),
    )
    with pytest.raises(SpecError, match=r"field `notify\.0`"):
        load_spec({"notify": [lineage.TARGET]})
    assert Settings().docs_url == DOCS


@pytest.mark.parametrize(
    ("url", "is_taken"),
    [
        ("http://docs", True),
        ("https://[::1]:8080/a%20b/c", True),
        ("https://docs/a?version=1", False),
        ("https://docs/#/a", False),
        ("https://docs/ü", False),
        ("https://docs/{version}", False),
        ("file:///docs", False),
    ],
)
def test_the_place_of_the_documentation_can_stand_before_the_name_of_a_schema(
    url: str, is_taken: bool
) -> None:
    with nullcontext() if is_taken else pytest.raises(PydanticError, match="docs_url"):
        assert Settings(docs_url=url).docs_url == url


# --- the run that a job is a part of --------------------------------------------------------
def test_the_environment_names_the_parent_and_the_spec_wins(
    site: Site, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", PARENT)
    other = "dagster/load/01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f11"
    submit(site, PROMPTS)
    submit(site, output={"uri": "other"}, lineage_parent=other)
    work(site)
    notifier(site).send_due()
    parents = {
        (of["run"]["runId"], of["job"]["namespace"], of["job"]["name"])
        for event in said(receiver)
        for of in [event["run"]["facets"]["parent"]]
    }
    assert parents == {
        ("01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f10", "airflow", "nightly.load"),
        ("01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f11", "dagster", "load"),
    }


def test_another_try_asks_for_the_same_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(site, PROMPTS)
    spec = load_spec(dict(site.store.get_job(job_id).spec))
    named = spec.model_copy(update={"lineage_parent": PARENT})
    assert named.digest() == spec.digest()
    first, _ = site.client.submit(spec, "the key")
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", PARENT)
    second, created = site.client.submit(spec, "the key")
    assert (second.job_id, created) == (first.job_id, False)


def test_a_variable_that_names_no_run_is_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", "nightly")
    job_id = submit(site, PROMPTS)
    assert site.store.get_job(job_id).spec["lineage_parent"] is None
    assert "OPENLINEAGE_PARENT_ID is not NAMESPACE/JOB NAME/RUN ID" in caplog.text


@pytest.mark.parametrize(
    ("text", "parent"),
    [
        (PARENT, ("airflow", "nightly.load", "01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f10")),
        (f"a/b/c/{PARENT[-36:]}", ("a", "b/c", PARENT[-36:])),
        ("a/b/c", None),
        (f"a/{PARENT[-36:]}", None),
        (f"a/b/{'-' * 36}", None),
        (f"a/b/{PARENT[-36:].upper()}", ("a", "b", PARENT[-36:].upper())),
        (f"a/b/{PARENT[-36:].replace('-', '')}----", None),
        (None, None),
    ],
)
def test_a_parent_is_a_namespace_a_name_and_a_run(
    text: str | None, parent: tuple[str, str, str] | None
) -> None:
    assert parent_in(text) == parent


# --- names ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("/data/in.parquet", ("file", "/data/in.parquet")),
        ("file:///data/in", ("file", "/data/in")),
        ("s3://bucket/a/b.parquet", ("s3://bucket", "a/b.parquet")),
        ("s3://bucket", ("s3://bucket", "/")),
        ("gs://bucket/a/", ("gs://bucket", "a")),
        ("https://host/a.csv", ("https://host", "a.csv")),
    ],
)
def test_data_sets_are_named_as_openlineage_names_them(uri: str, name: tuple[str, str]) -> None:
    assert dataset_name(uri) == name


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("/data/day=*/part-[0-9].parquet", "/data"),
        ("s3://bucket/a/*.jsonl", "s3://bucket/a"),
        ("s3://bucket/a.jsonl", "s3://bucket/a.jsonl"),
        ("/*.csv", "/"),
    ],
)
def test_of_a_glob_the_folder_is_named(uri: str, place: str) -> None:
    assert input_place(uri) == place


def test_a_seed_column_and_a_column_of_sampling_values_count_too() -> None:
    read = InputFacts((), ("a", "b"), None, "s", "how", 1, 1, "v")
    written = OutputFacts((("text", "string"), ("seed", "int64"), ("id", "string")), (), 1, 1, 1)
    found = column_lineage(("file", "/in"), read, written)
    assert sorted(found) == ["seed", "text"]
    text = [(f.field, f.transformations[0].type) for f in found["text"].inputFields]
    assert text == [("a", "DIRECT"), ("b", "DIRECT"), ("s", "INDIRECT"), ("how", "INDIRECT")]
    assert [f.field for f in found["seed"].inputFields] == ["s"]


def test_time_of_the_store_is_the_time_of_the_events(site: Site, receiver: Receiver) -> None:
    clock: Clock = site.clock
    submit(site, PROMPTS)
    began = clock()
    work(site, Stage.INGEST)
    clock.advance(100.0)
    work(site)
    notifier(site).send_due()
    start, end = said(receiver)
    assert start["eventTime"].startswith(_time(began))
    assert end["eventTime"].startswith(_time(clock()))
