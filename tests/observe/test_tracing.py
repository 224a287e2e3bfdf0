"""What a trace tells of work that goes well, fails, is fenced, is shared out, or is left."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import LEASE_SEC

from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.bootstrap import make_client, open_tracing
from specbatch.pipeline.observe.tracing.context import (
    attempt_span_id,
    current_work,
    is_chosen,
    root_span_id_of,
    trace_id_of,
)
from specbatch.pipeline.observe.tracing.otel import MOST_CLOSE_SEC, OtelTracing
from specbatch.pipeline.observe.tracing.span_names import ATTRIBUTES, EVENTS
from specbatch.pipeline.observe.tracing.tracing import NO_SPAN, UNTRACED, TraceOptions, Tracing
from specbatch.pipeline.stages import spans
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.errors import EngineError, FencedError, MissingExtraError
from specbatch.schemas.records import CLAIMABLE, JobState, Lease, Stage
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import spec_of
from support.servers import free_port
from support.stand_ins import Site
from support.traces import CONSUMER, ERROR, Receiver, read_traces, receiver

LEASE = Lease("0123456789abcdef", 3, Stage.VERIFY, 7, "host:1", 1)
PROMPTS = [f"secret prompt {i}" for i in range(8)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


def all_of(file: Path) -> TraceOptions:
    return TraceOptions(f"file:{file}", groups=1.0, requests=1.0, broker="redis")


def attempt(tracing: Tracing, lease: Lease, error: Exception | None = None) -> None:
    try:
        with tracing.attempt(lease):
            if error is not None:
                raise error
    except type(error or ValueError):
        assert error is not None


# --- ids and choices ------------------------------------------------------------------------------
def test_ids_follow_from_the_job_and_are_never_zero() -> None:
    jobs = [f"job{i}" for i in range(500)]
    assert len({trace_id_of(job) for job in jobs}) == len({root_span_id_of(j) for j in jobs}) == 500
    assert all(0 < trace_id_of(job) < 2**128 and 0 < root_span_id_of(job) < 2**64 for job in jobs)
    assert trace_id_of("job1") == trace_id_of("job1")
    spans = {attempt_span_id("j", g, n) for g in (None, *range(20)) for n in range(20)}
    assert len(spans) == 21 * 20


def test_a_share_is_chosen_the_same_everywhere_and_larger_ones_have_smaller_ones() -> None:
    few = {g for g in range(20_000) if is_chosen(0.05, "job", g)}
    more = {g for g in range(20_000) if is_chosen(0.2, "job", g)}
    assert 850 < len(few) < 1150
    assert few < more
    assert all(is_chosen(1.0, "job", g) for g in range(2000))
    assert not any(is_chosen(0.0, "job", g) for g in range(2000))


# --- a job ----------------------------------------------------------------------------------------
def job_of(site: Site, tracing: Tracing, prompts: list[str] = PROMPTS, size: int = 4) -> str:
    job_id = site.submit(prompts, group_size=size)
    site.work(site.worker("host:1", site.host(), tracing=tracing))
    return job_id


def test_a_job_is_told_stage_by_stage_with_its_counts(site: Site, file: Path) -> None:
    tracing = open_tracing(all_of(file))
    job_id = job_of(site, tracing)
    tracing.close()
    spans = read_traces(file)
    attempts = [span for span in spans if span.name != "request"]
    assert Counter(span.name for span in attempts) == {
        "ingest": 1, "verify": 2, "record": 2, "publish": 1,
    }  # fmt: skip
    done = list(site.store.completions(job_id))
    (first,) = [
        s for s in attempts if s.name == "verify" and s.attributes["specbatch.group.index"] == 0
    ]
    mine = [record for record in done if record.row_index < 4]
    assert first.kind == CONSUMER
    assert first.attributes["gen_ai.usage.input_tokens"] == sum(r.prompt_tokens for r in mine)
    assert first.attributes["gen_ai.usage.output_tokens"] == sum(len(r.token_ids) for r in mine)
    assert first.attributes["specbatch.rows"] == 4
    assert first.attributes["messaging.system"] == "redis"
    assert first.attributes["messaging.destination.name"].startswith("verify.")
    requests = Counter(span.request for span in spans if span.request)
    assert requests == {f"{job_id}/{row}/0": 3 for row in range(8)}  # no propose stage here
    assert all(set(span.attributes) <= set(ATTRIBUTES) for span in spans)
    text = file.read_text()
    assert not [prompt for prompt in PROMPTS if prompt in text]
    assert not [record for record in done if len(record.text) > 3 and record.text in text]


def test_of_a_job_the_first_group_and_a_share_are_told(site: Site, file: Path) -> None:
    tracing = open_tracing(TraceOptions(f"file:{file}", groups=0.3, requests=0.3))
    job_id = job_of(site, tracing, [f"prompt {i}" for i in range(60)], size=2)
    tracing.close()
    spans = read_traces(file)
    chosen = {0} | {g for g in range(30) if is_chosen(0.3, job_id, g)}
    assert 1 < len(chosen) < 30
    for stage in ("verify", "record"):
        told = {s.attributes["specbatch.group.index"] for s in spans if s.name == stage}
        assert told == chosen
    asked = {
        f"{job_id}/{row}/0"
        for row in range(60)
        if row // 2 in chosen and (row == 0 or is_chosen(0.3, f"{job_id}/{row}/0"))
    }
    assert {span.request for span in spans if span.request} == asked
    assert Counter(span.name for span in spans)["request"] == 3 * len(asked)


def test_with_a_share_of_none_only_failures_and_the_job_itself_are_told(
    site: Site, file: Path
) -> None:
    tracing = open_tracing(TraceOptions(f"file:{file}", groups=0.0, requests=0.0))
    job_of(site, tracing)
    attempt(tracing, LEASE, EngineError("bad"))
    tracing.close()
    assert Counter(span.name for span in read_traces(file)) == {
        "ingest": 1, "publish": 1, "verify": 1,
    }  # fmt: skip


# --- what goes wrong ------------------------------------------------------------------------------
class Breaks(StandInHost):
    """An engine that fails the first time."""

    failed = False

    def service(self, spec: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise EngineError(f"cannot go on with {PROMPTS[0]}")
        return super().service(spec)


def test_a_failed_attempt_and_the_one_after_it_are_seen(site: Site, file: Path) -> None:
    tracing = open_tracing(all_of(file))
    job_id = site.submit(PROMPTS, group_size=8)
    host = site.host()
    host.__class__ = Breaks
    site.work(site.worker("host:1", host, tracing=tracing))
    tracing.close()
    assert site.state(job_id) is JobState.DONE
    bad, good = sorted(
        (s for s in read_traces(file) if s.name == "verify"), key=lambda s: s.begun_ns
    )
    assert bad.status == ERROR
    assert bad.said == EngineError.__doc__
    assert bad.attributes["error.type"] == "EngineError"
    assert bad.attributes["specbatch.outcome"] == "failed"
    assert (bad.attributes["specbatch.attempt"], good.attributes["specbatch.attempt"]) == (1, 2)
    assert good.status != ERROR
    assert good.links == (bad.span_id,)
    assert bad.parent_id == good.parent_id == f"{root_span_id_of(job_id):016x}"
    assert PROMPTS[0] not in file.read_text()


class Slow(StandInHost):
    """An engine during whose work somebody else takes the group."""

    meanwhile: Any = None

    def service(self, spec: Any) -> Any:
        self.meanwhile()
        return super().service(spec)


def test_a_fenced_attempt_is_a_span_with_an_error(site: Site, file: Path) -> None:
    tracing = open_tracing(all_of(file))
    job_id = site.submit(PROMPTS, group_size=8)
    lease_keeper = site.lease_keeper()
    host = site.host()
    host.__class__ = Slow

    def taken_over() -> None:
        site.clock.advance(2 * LEASE_SEC)
        assert site.store.claim_group(job_id, 0, Stage.VERIFY, "other:2", LEASE_SEC)
        lease_keeper.beat()

    host.meanwhile = taken_over  # type: ignore[attr-defined]  # it is a `Slow` now
    context = site.worker("host:1", host, lease_keeper, tracing)
    run_stage(context, Stage.INGEST, job_id, None)
    run_stage(context, Stage.VERIFY, job_id, 0)
    tracing.close()
    (span,) = [s for s in read_traces(file) if s.name == "verify"]
    assert span.status == ERROR
    assert span.said == FencedError.__doc__
    assert span.attributes["specbatch.outcome"] == "fenced"
    assert [name for name, _ in span.events] == ["lease lost"]
    assert site.store.get_job(job_id).state is JobState.RUNNING


def test_a_stopped_job_is_an_event_and_no_error(site: Site, file: Path) -> None:
    tracing = open_tracing(all_of(file))
    job_id = site.submit(PROMPTS, group_size=8)
    lease_keeper = site.lease_keeper()
    host = site.host()
    host.__class__ = Slow

    def stopped() -> None:
        site.client.cancel(job_id)
        lease_keeper.check_cancelled()

    host.meanwhile = stopped  # type: ignore[attr-defined]  # it is a `Slow` now
    context = site.worker("host:1", host, lease_keeper, tracing)
    run_stage(context, Stage.INGEST, job_id, None)
    run_stage(context, Stage.VERIFY, job_id, 0)
    tracing.close()
    (span,) = [s for s in read_traces(file) if s.name == "verify"]
    assert [name for name, _ in span.events] == ["job stopped"]
    assert span.status != ERROR


def test_a_killed_workers_attempt_is_named_by_the_next_one(site: Site, file: Path) -> None:
    """It sends nothing; that it was there is seen by attempt, link and queue time."""
    tracing = open_tracing(all_of(file))
    job_id = site.submit(PROMPTS, group_size=8)
    context = site.worker("host:1", site.host(), tracing=tracing)
    run_stage(context, Stage.INGEST, job_id, None)
    dead = site.store.claim_group(job_id, 0, Stage.VERIFY, "dead:2", LEASE_SEC)
    assert dead is not None
    site.clock.advance(LEASE_SEC + 5)
    site.work(context)
    tracing.close()
    (span,) = [s for s in read_traces(file) if s.name == "verify"]
    assert span.attributes["specbatch.attempt"] == 2
    assert span.attributes["specbatch.queue_sec"] == pytest.approx(5)
    assert span.links == (f"{attempt_span_id(job_id, 0, dead.lease.token):016x}",)


def test_an_attempt_that_outlives_its_worker_is_told_once(file: Path) -> None:
    tracing = open_tracing(all_of(file))
    with tracing.attempt(LEASE) as span:
        tracing.close()
        span.note({"specbatch.rows": 1})
        span.event("split")
    (told,) = read_traces(file)
    assert told.status == ERROR
    assert told.attributes["specbatch.outcome"] == "left"
    assert told.events == ()


def test_a_worker_that_ends_gives_attempts_a_moment_to_end(file: Path) -> None:
    tracing = open_tracing(all_of(file))
    assert isinstance(tracing, OtelTracing)
    closing = threading.Thread(target=tracing.close)
    with tracing.attempt(LEASE):
        closing.start()
        while tracing._users:
            time.sleep(0.001)
    closing.join(30)
    (told,) = read_traces(file)
    assert told.attributes["specbatch.outcome"] == "kept"


def test_a_split_is_an_event_and_what_cannot_be_told_is_logged(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = open_tracing(all_of(file))
    broken: Any = None
    with tracing.attempt(LEASE) as span:
        spans.split(span, 1_000_000, 3)
        spans.verified(span, broken, [], [])
    tracing.close()
    (told,) = read_traces(file)
    assert told.events == (
        ("split", {"specbatch.split.group.index": 1_000_000, "specbatch.rows": 3}),
    )
    assert told.attributes["specbatch.outcome"] == "kept"
    assert "could not write this to the trace" in caplog.text


# --- submissions ----------------------------------------------------------------------------------
def settings_of(tmp_path: Path, **values: Any) -> Settings:
    return Settings(workspace=str(tmp_path / "work"), **values)


def submitted(site: Site, settings: Settings, key: str | None = None) -> str:
    client = make_client(settings, lambda _: None, site.store)
    job = site.store.get_job(site.submit(PROMPTS))
    return client.submit(spec_of(job), key)[0].job_id


def test_a_submission_is_the_root_and_a_second_one_lies_under_it(
    site: Site, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACEPARENT", raising=False)
    settings = settings_of(tmp_path, traces=f"file:{file}", broker_url="amqps://broker//")
    job_id = submitted(site, settings, "night of anna@example.org")
    assert submitted(site, settings, "night of anna@example.org") == job_id
    first, second = read_traces(file)
    assert first.trace_id == second.trace_id == f"{trace_id_of(job_id):032x}"
    assert first.span_id == f"{root_span_id_of(job_id):016x}"
    assert (first.parent_id, second.parent_id) == ("", first.span_id)
    assert [s.attributes["specbatch.job.created"] for s in (first, second)] == [True, False]
    assert first.attributes["messaging.system"] == "rabbitmq"
    assert first.links == ()
    assert "anna" not in file.read_text()
    assert current_work() is not None


def test_a_callers_own_span_is_linked(site: Site, file: Path, tmp_path: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider().get_tracer("caller").start_as_current_span("dag") as theirs:
        job_id = submitted(site, settings_of(tmp_path, traces=f"file:{file}"))
    (span,) = read_traces(file)
    assert span.links == (f"{theirs.get_span_context().span_id:016x}",)
    assert span.trace_id == f"{trace_id_of(job_id):032x}"


# --- where spans go -------------------------------------------------------------------------------
def test_an_otlp_endpoint_gets_spans_over_http(
    otlp: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a-secret-of-ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    tracing = open_tracing(TraceOptions("otlp", groups=1.0, requests=1.0))
    attempt(tracing, LEASE)
    attempt(tracing, LEASE, ValueError("words of a prompt"))
    tracing.close()
    good, bad = otlp.spans
    assert good.trace_id.hex() == bad.trace_id.hex() == f"{trace_id_of(LEASE.job_id):032x}"
    assert good.parent_span_id.hex() == f"{root_span_id_of(LEASE.job_id):016x}"
    assert good.span_id.hex() == f"{attempt_span_id(LEASE.job_id, 3, 7):016x}"
    said = {pair.key: pair.value for pair in bad.attributes}
    assert said["error.type"].string_value == "ValueError"
    assert said["specbatch.group.index"].int_value == 3
    assert (bad.status.code, bad.status.message) == (ERROR, "")
    assert otlp.paths[0] == "/v1/traces"
    assert otlp.headers[0]["authorization"] == "Bearer a-secret-of-ours"
    process = {pair.key: pair.value.string_value for pair in otlp.resources[0].attributes}
    assert process["service.name"] == "specbatch"
    assert process["deployment.environment.name"] == "test"


def test_an_endpoint_that_is_away_is_named_once_and_work_goes_on(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    tracing = open_tracing(TraceOptions("otlp", groups=1.0, requests=1.0))
    job_id = job_of(site, tracing)
    begun = time.monotonic()
    tracing.close()
    assert time.monotonic() - begun < MOST_CLOSE_SEC + 1
    assert site.state(job_id) is JobState.DONE
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([line for line in said if "traces are lost" in line]) == 1
    assert all("trace" in line for line in said), said
    assert len(said) <= 2  # and that the last ones are not sent


def test_an_endpoint_that_comes_back_is_named_too(
    otlp: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    otlp.status = 400
    tracing = open_tracing(TraceOptions("otlp", groups=1.0, requests=1.0))
    assert isinstance(tracing, OtelTracing)
    for status in (400, 400, 200, 200):
        otlp.status = status
        attempt(tracing, LEASE)
        tracing.flush()
    tracing.close()
    assert len(otlp.spans) == 2
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("traces are lost, work continues")
    assert second == "traces are sent again; 2 spans were lost"


def test_a_folder_that_cannot_be_written_to_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    tracing = open_tracing(all_of(tmp_path / "taken" / "traces.jsonl"))
    attempt(tracing, LEASE)
    tracing.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "traces are lost" in said
    assert str(tmp_path / "taken") in said


def test_users_of_one_process_share_what_sends(file: Path) -> None:
    first, second = open_tracing(all_of(file)), open_tracing(all_of(file))
    assert first is second
    threads = threading.active_count()
    first.close()
    attempt(second, LEASE)
    assert threading.active_count() == threads
    second.close()
    assert len(read_traces(file)) == 1
    assert open_tracing(TraceOptions("", 1.0, 1.0)) is UNTRACED


# --- without it -----------------------------------------------------------------------------------
def test_without_the_packages_one_sentence_says_what_to_install(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, OtelTracing.__module__)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    client = make_client(settings_of(tmp_path, traces="otlp"), lambda _: None, site.store)
    with pytest.raises(MissingExtraError, match=r"opentelemetry.sdk.*'specbatch\[observe\]'"):
        client.submit(spec_of(site.store.get_job(site.submit(PROMPTS))))
    assert len(site.store.list_jobs()) == 1


def test_nobody_is_told_where_nobody_asked() -> None:
    with UNTRACED.attempt(LEASE) as span:
        assert span is NO_SPAN
    assert not span.is_on


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "observing.md"


def test_every_name_is_documented_and_every_documented_one_is_there() -> None:
    text = DOCUMENT.read_text()
    for name in (*ATTRIBUTES, *EVENTS, *map(str, CLAIMABLE), "submit", "request"):
        assert f"`{name}`" in text, name
    (code,) = re.findall(r"python -c '(.*)' JOB", text)
    done = subprocess.run([sys.executable, "-c", code, LEASE.job_id], capture_output=True)
    assert done.stdout.decode().strip() == f"{trace_id_of(LEASE.job_id):032x}"
    documented = {
        word for word in text.split("`") if word.startswith("specbatch.") and " " not in word
    }
    assert documented <= set(ATTRIBUTES)
