"""A busy demo, scraped: two workers in three processes, and a store to compare with."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ledger.builders import Clock

from specbatch.jobs.schedules.attempt import Attempt, carry_out
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.observe.metrics import metric_names
from specbatch.pipeline.observe.metrics.meter import by_proposer, saved_usd
from specbatch.pipeline.observe.metrics.metric_names import METRICS, Kind, Metric, Scope
from specbatch.schemas.records import JobRow, Origin
from specbatch.schemas.schedules import RunState, ScheduleRun
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.schemas.speculation import AcceptanceCount
from specbatch.workers.app import make_app, make_enqueue
from support import demo
from support.scraping import Scrape, scrape
from support.servers import PrivateRedis, free_port
from support.workers import wait_until, worker

TAGS = ("news", "law", None)
ROWS = 12
TOO_LONG = {"type": "regex", "regex": "[a-z]{200}"}  # for any output of this job
WORDS = {"use": "patterns", "patterns": {"word": "^[a-z]+$"}, "verdict": "redact"}
REJECTED = 1
OF_STORE = {metric.name for metric in METRICS if metric.scope is Scope.STORE}
WHILE_VERIFIED = (metric_names.BREAKER_OPEN, metric_names.COLLAPSED)  # no value at other times
MODELS = ("--verifier", str(demo.VERIFIER), "--proposer", str(demo.DRAFT))
WORKERS = ("all", "verify")
PROCESSES = 3  # the first worker has a second one


@dataclass(frozen=True)
class Processes:
    """What all processes of a machine answer, added up as Prometheus would."""

    scrapes: list[Scrape]  # one by process

    @property
    def types(self) -> dict[str, str]:
        return self.scrapes[0].types

    def has(self, name: str) -> bool:
        return any(name in one.samples for one in self.scrapes)

    def total(self, name: str, **labels: str) -> float:
        values = [one.total(name, **labels) for one in self.scrapes]
        return max(values) if name in OF_STORE else sum(values)


@dataclass(frozen=True)
class Busy:
    """What is left of a run."""

    store: Store
    jobs: list[JobRow]
    scrapes: list[Processes]  # while it went on; the last one after its end

    @property
    def last(self) -> Processes:
        return self.scrapes[-1]

    def ever(self, metric: Metric) -> bool:
        """Whether some scrape had a value of it."""
        name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
        return any(one.has(name) for one in self.scrapes)


def write_input(folder: Path) -> Path:
    prompts = pq.read_table(demo.PROMPTS, columns=["prompt"]).column(0).to_pylist()[:ROWS]
    rows = [
        {"id": f"row-{i}", "prompt": prompt, "tag": tag}
        for i, (prompt, tag) in enumerate(zip(prompts, cycle(TAGS), strict=False))
    ]
    rows[0]["own"] = json.dumps({"response_format": TOO_LONG})
    rows.append({"id": "empty", "prompt": "", "tag": "law"})
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def submit(settings: Settings, store: Store, folder: Path, name: str, temperature: float) -> JobRow:
    spec = load_spec(
        {
            "name": name,
            "input": {"uri": str(folder / "prompts.jsonl"), "sampling_column": "own"},
            "output": {"uri": str(folder / name)},
            "verifier": str(demo.VERIFIER),
            "proposer": str(demo.DRAFT),
            "sampling": {"max_tokens": 24, "temperature": temperature, "n": 2, "seed": 3},
            "speculation": {"pregenerate": name == "warm"},
            "group_size": 2,
            "policies": [WORDS],
            "deadline_sec": 24 * 3600,
        }
    )
    client = make_client(settings, make_enqueue(make_app(settings)), store)
    return client.submit(spec)[0]


def learn_of_nights(url: str) -> None:
    """Nights of a job before this one, whose acceptance falls by 1 % each."""
    clock = Clock()
    clock.now = time.time() - 60 * 86_400.0
    store = SqlStore(url, clock=clock)
    for night in range(60):
        agreed = 7_000.0 * 0.99 ** max(0, night - 38)
        counts = [AcceptanceCount("ngram", None, agreed, 10_000.0)]
        store.learn_acceptance("default", "falling", counts)
        clock.advance(86_400.0)
    store.close()


def run_here(store: Store, settings: Settings, kind: str) -> None:
    """As the scheduler does a time of this kind."""
    waiting = ScheduleRun(kind, time.time(), RunState.QUEUED)
    store.note_schedule_run(waiting)
    claimed = store.claim_schedule_run(waiting)
    assert claimed is not None
    assert carry_out(settings, store, Attempt(claimed, kind, {})).state is RunState.DONE


def is_all(said: Processes, store: Store, jobs: list[JobRow]) -> bool:
    """Whether the figures of the store, which are read every few seconds, are the last ones."""
    tokens = sum(store.progress(job.job_id).completion_tokens for job in jobs)
    told = said.total("specbatch_emitted_tokens_total") >= tokens
    told = told and len(said.scrapes) == PROCESSES
    return (
        told
        and said.total("specbatch_workers") == len(WORKERS)
        and not said.total("specbatch_jobs")
    )


@pytest.fixture(scope="module")
def busy(redis_server: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    home = tmp_path_factory.mktemp("busy")
    write_input(home)
    ports = [free_port() for _ in WORKERS]
    environment = {
        "SPECBATCH_BROKER_URL": redis_server.url_of(redis_server.databases - 1),
        "SPECBATCH_WORKSPACE": str(home / "workspace"),
        "SPECBATCH_METRICS_ADDRESS": "127.0.0.1",
        "SPECBATCH_DRIFT_EVERY_STEPS": "5",
        "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
        "SPECBATCH_KV_CACHE_MIB": "32",
    }
    settings = Settings(
        broker_url=environment["SPECBATCH_BROKER_URL"],
        workspace=environment["SPECBATCH_WORKSPACE"],
    )
    store = make_store(settings)
    learn_of_nights(settings.store_url)
    jobs = [submit(settings, store, home, "cold", 0.0), submit(settings, store, home, "warm", 0.8)]
    run = ScheduleRun("nightly", time.time(), RunState.SUBMITTED, jobs[0].job_id)
    store.note_schedule_run(run)
    for kind in ("drift", "spend"):
        run_here(store, settings, kind)
    scrapes: list[Processes] = []

    def scrape_all() -> Processes:
        answers = []
        for port in ports:
            for one in (port, port + 1):
                with suppress(OSError):  # it has not started yet
                    answers.append(scrape(one))
        return Processes(answers)

    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                worker(
                    *(kind, *MODELS),
                    environment=environment | {"SPECBATCH_METRICS_PORT": str(port)},
                    cwd=home,
                    name=str(port),
                )
            )
            for kind, port in zip(WORKERS, ports, strict=True)
        ]

        def groups_done() -> int:
            return sum(store.progress(job.job_id).groups_done for job in jobs)

        def is_over() -> bool:
            if groups_done() > len(scrapes):
                scrapes.append(scrape_all())
            return all(store.get_job(job.job_id).state.is_final for job in jobs)

        def is_told() -> bool:
            scrapes.append(scrape_all())
            return is_all(scrapes[-1], store, jobs) or not scrapes.pop()

        wait_until("the jobs' end", is_over, workers)
        wait_until("what both counted last", is_told, workers)
        for one in workers:
            assert "Traceback" not in one.end()
    yield Busy(store, [store.get_job(job.job_id) for job in jobs], scrapes)
    store.close()


def test_counters_are_the_store_s_totals_to_the_last_token(busy: Busy) -> None:
    for job in busy.jobs:
        assert job.state == "partial"  # a row was set aside
        progress, said = busy.store.progress(job.job_id), busy.last
        records = list(busy.store.completions(job.job_id))

        def total(name: str, job: JobRow = job, said: Processes = said, **labels: str) -> float:
            return said.total(f"specbatch_{name}_total", job=job.name, **labels)

        assert total("emitted_tokens") == progress.completion_tokens > 0
        assert total("proposed_tokens") == progress.proposed > 0
        assert total("accepted_tokens") == progress.accepted > 0
        assert total("completions") == progress.completions == ROWS * 2
        assert total("cost_usd") == pytest.approx(progress.cost_usd, rel=1e-9)
        assert total("prompt_tokens") == sum(r.prompt_tokens for r in records) / 2
        origins = Counter(origin for record in records for origin in record.origins)
        for origin in Origin:
            assert total("emitted_tokens", origin=origin.name.lower()) == origins[origin]
        for tag in TAGS:
            mine = [record for record in records if record.tag == tag]
            label = tag or "(no tag)"
            assert total("proposed_tokens", tag=label) == sum(r.proposed for r in mine)
            assert total("accepted_tokens", tag=label) == sum(r.accepted for r in mine)
        assert total("emitted_tokens", origin="reused") == total("reused_completions") == 0
        assert total("malformed_outputs") == 2 == sum(bool(r.error) for r in records)
        assert total("malformed_outputs", tag=TAGS[0] or "(no tag)") == 2
        assert total("policy_verdicts", tag=TAGS[0] or "(no tag)", verdict="redact") == 2
        assert total("policy_verdicts") == 2, "of the row that has the wrong form"
        assert progress.rows_failed == 2, "one row has the wrong form, one no prompt"
        proposers = Counter[str]()
        for record in records:
            proposers.update(
                {name: accepted for name, (_, accepted) in by_proposer(record).items()}
            )
        for name, accepted in proposers.items():
            assert total("accepted_tokens", proposer=name) == accepted
        baseline = progress.cost_usd + saved_usd(records)
        assert total("baseline_cost_usd") == pytest.approx(baseline, rel=1e-6)


def test_every_documented_metric_is_there_and_no_other(busy: Busy) -> None:
    ours = {name for name in busy.last.types if name.startswith("specbatch_")}
    assert ours == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert busy.last.types[metric.name] == metric.kind.value
    missing = {metric.name for metric in METRICS if not busy.ever(metric)}
    assert missing <= {metric.name for metric in WHILE_VERIFIED}  # the last test waits for them


def test_what_engines_tell_fits_together(busy: Busy) -> None:
    said = busy.last
    passes = said.total("specbatch_engine_verifier_calls_total")
    assert passes == said.total("specbatch_engine_tokens_per_call_count") > 0
    assert passes == said.total("specbatch_engine_batch_fill_ratio_count")
    assert said.total("specbatch_engine_batch_fill_ratio_sum") <= passes
    drafted = said.total("specbatch_engine_speculation_depth_sum")
    assert drafted >= said.total("specbatch_proposed_tokens_total")
    requests = ROWS * 2 * len(busy.jobs)
    assert said.total("specbatch_time_to_first_token_seconds_count") >= requests
    assert 0 < said.total("specbatch_time_per_output_token_seconds_count") <= requests
    assert said.total("specbatch_drift_kl_nats_count", proposer="draft-model") > 0
    spent = sum(session.spent for session in busy.store.sessions()) / 1e7
    assert said.total("specbatch_engine_device_seconds_total") == pytest.approx(spent, rel=0.05)
    assert said.total("specbatch_engine_kv_blocks") > 0
    assert not said.total("specbatch_engine_kv_blocks", state="used")


def test_work_through_the_stages_is_counted(busy: Busy) -> None:
    said = busy.last
    groups = sum(busy.store.progress(job.job_id).groups_total for job in busy.jobs)
    for stage in ("verify", "record"):
        assert said.total("specbatch_queue_seconds_count", stage=stage) >= groups
        assert said.total("specbatch_compute_seconds_count", stage=stage) == groups
    assert said.total("specbatch_quarantined_rows_total") == REJECTED * len(busy.jobs)
    assert said.total("specbatch_sweeps_total") > 0
    assert said.total("specbatch_workers") == len(WORKERS)
    assert said.total("specbatch_store_up") == 1
    assert said.total("specbatch_jobs") == 0


def test_runs_deadlines_and_slow_falls_are_told(busy: Busy) -> None:
    said, job = busy.last, busy.jobs[0]
    assert job.finished_at is not None
    took = said.total("specbatch_schedule_duration_seconds", schedule="nightly")
    assert took == pytest.approx(job.finished_at - job.created_at)
    assert max(one.total("specbatch_jobs_at_risk") for one in busy.scrapes) == 0
    assert said.total("specbatch_acceptance_falls_slowly", job="falling", proposer="ngram") == 1
    assert said.has("specbatch_month_spend_usd")
    days = busy.store.acceptance_days("default", job.name)
    tested = sum(count.tested for count in days)
    assert 0 < sum(count.agreed for count in days) < tested
    assert {count.tag for count in days} == set(TAGS)


def test_gauges_of_jobs_that_are_verified_here_end_with_them(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    port = free_port()
    settings = Settings(
        broker_url=redis_server.url_of(redis_server.databases - 2),
        workspace=str(tmp_path / "workspace"),
    )
    environment = {
        "SPECBATCH_BROKER_URL": settings.broker_url,
        "SPECBATCH_WORKSPACE": settings.workspace,
        "SPECBATCH_METRICS_ADDRESS": "127.0.0.1",
        "SPECBATCH_METRICS_PORT": str(port),
    }
    store = make_store(settings)
    spec = load_spec(
        {
            "name": "long",
            "input": {"uri": str(demo.PROMPTS)},
            "output": {"uri": str(tmp_path / "long")},
            "verifier": str(demo.VERIFIER),
            "proposer": str(demo.DRAFT),
            "sampling": {"max_tokens": 200, "n": 8, "temperature": 0.8},
            "speculation": {"pregenerate": False},
            "group_size": 8,
        }
    )
    client = make_client(settings, make_enqueue(make_app(settings)), store)
    job = client.submit(spec)[0]
    names = {metric.name for metric in WHILE_VERIFIED}
    seen: set[str] = set()

    def look() -> Scrape | None:
        with suppress(OSError):  # it has not started yet
            return scrape(port)
        return None

    def are_there() -> bool:
        if said := look():
            seen.update(name for name in names if said.values_of(name, "job") == {"long"})
            seen.update(name for name in ("specbatch_groups",) if said.total(name))
        return seen == {*names, "specbatch_groups"}

    def are_gone() -> bool:
        said = look()
        return said is not None and not names & said.samples.keys()

    with worker("all", *MODELS, environment=environment, cwd=tmp_path) as one:
        wait_until("gauges of the job that is verified", are_there, [one])
        client.cancel(job.job_id)
        wait_until("their end", are_gone, [one])
        assert "Traceback" not in one.end()
    store.close()
