"""Inputs are read no faster than their groups are done, in memory that does not grow with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.inputs.columnar import ColumnarSource
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.stages import readings
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.records import JobRow, JobState, Stage
from support.databases import sqlite_store
from support.one_thread import OneThread, one_thread
from support.peak_memory import below

pytestmark = pytest.mark.pipeline  # starts processes

GROUPS = 20


@pytest.fixture
def store() -> Iterator[Store]:
    opened = sqlite_store()
    yield opened
    opened.close()


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    rows = range(GROUPS * 4)
    table = pa.table({"id": [f"row-{i}" for i in rows], "prompt": [f"prompt {i}" for i in rows]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=9)
    return tmp_path / "in.parquet"


def open_groups(bed: OneThread, job_id: str) -> int:
    progress = bed.client.progress(job_id)
    return progress.groups_total - progress.groups_done


def run(bed: OneThread, job_id: str) -> tuple[int, int]:
    """Do the job; how often reading paused, and the most groups that were open."""
    most, pauses, was_paused = 0, 0, False
    while bed.run(most=1):
        paused = bed.client.job(job_id).paused
        pauses += paused and not was_paused
        was_paused = paused
        most = max(most, open_groups(bed, job_id))
    assert bed.client.job(job_id).state is JobState.DONE
    return pauses, most


def test_reading_waits_for_groups_and_nothing_else_changes(
    store: Store, uri: Path, tmp_path: Path
) -> None:
    with one_thread(store, tmp_path, max_open_groups=4) as bed:
        pauses, most = run(bed, bed.submit(uri, tmp_path / "slow").job_id)
    with one_thread(store, tmp_path) as bed:
        assert run(bed, bed.submit(uri, tmp_path / "fast").job_id) == (0, GROUPS)
    assert pauses > 3
    assert most <= 4 + 3, "a batch more than it was asked to keep open"
    slow, fast = (read_output(str(tmp_path / name)) for name in ("slow", "fast"))
    measured = ["cost_usd", "acceptance_rate"]
    assert slow.drop_columns(measured) == fast.drop_columns(measured)


def test_the_last_groups_message_is_followed_by_that_for_reading_on(
    store: Store, uri: Path, tmp_path: Path
) -> None:
    """Nobody sleeps, nobody holds the input: without its message the job would stand still here."""
    with one_thread(store, tmp_path, max_open_groups=4) as bed:
        job_id = bed.submit(uri, tmp_path / "out").job_id
        bed.run(most=1)
        assert store.claim_job(job_id, Stage.INGEST, "another", 60.0) is None
        enqueued = {message.stage for message in bed.messages}
        while Stage.INGEST not in enqueued:
            assert bed.run(most=1)
            enqueued |= {message.stage for message in bed.messages}
        assert not bed.client.job(job_id).paused
        assert open_groups(bed, job_id) == 2


def test_a_reading_that_pauses_goes_on_without_reading_ids_again(
    store: Store, uri: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_again: list[Any] = []
    ids_until = ColumnarSource.ids_until
    monkeypatch.setattr(
        ColumnarSource, "ids_until", lambda *a: read_again.append(a) or ids_until(*a)
    )
    with one_thread(store, tmp_path, max_open_groups=4) as bed:
        run(bed, bed.submit(uri, tmp_path / "out").job_id)
    assert read_again == []


def test_another_worker_goes_on_from_the_cursor(store: Store, uri: Path, tmp_path: Path) -> None:
    with one_thread(store, tmp_path, max_open_groups=4) as first:
        job_id = first.submit(uri, tmp_path / "out").job_id
        first.run(most=1)
        assert first.client.job(job_id).paused
        with one_thread(store, tmp_path, max_open_groups=4) as second:
            second.messages.extend(first.messages)
            run(second, job_id)
            # What the first one kept of its reading is stale, and does no harm.
            first.do(Stage.INGEST, job_id)
    table = read_output(str(tmp_path / "out"))
    assert table["id"].to_pylist() == [f"row-{i}" for i in range(GROUPS * 4)]


def change_first(folder: Path) -> None:
    write_rows(folder / "a.jsonl", "changed")


def change_last(folder: Path) -> None:
    write_rows(folder / "c.jsonl", "changed")


def change_current(folder: Path) -> None:
    write_rows(folder / "b.jsonl", "changed")


def add(folder: Path) -> None:
    write_rows(folder / "d.jsonl", "d")


def remove(folder: Path) -> None:
    (folder / "c.jsonl").unlink()


def write_rows(path: Path, word: str) -> None:
    rows = [{"id": f"{word}{i}", "prompt": f"prompt {i}", "k": f"{word}{i}"} for i in range(16)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


@pytest.mark.parametrize("change", [change_first, change_current, change_last, remove])
def test_another_worker_reads_on_only_in_the_files_that_the_first_one_read(
    store: Store, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    ended = read_by_two_workers(store, tmp_path, change)
    assert ended.state is JobState.FAILED
    name = {"change_first": "a", "change_current": "b"}.get(change.__name__, "c")
    how = "is gone" if change is remove else "changed"
    said = f"{tmp_path}/in/{name}.jsonl {how} since this job began reading it"
    assert said in (ended.error or "")


def test_a_file_that_comes_while_a_job_reads_is_left_to_the_next_one(
    store: Store, tmp_path: Path
) -> None:
    """As if no worker had been restarted: the columns to be kept are read again at the end, too."""
    ended = read_by_two_workers(store, tmp_path, add, "k")
    assert (ended.state, ended.error) == (JobState.DONE, None)
    rows = read_output(str(tmp_path / "out")).to_pylist()
    assert {row["id"][0] for row in rows} == {"a", "b", "c"}
    assert len(rows) == 3 * 16
    assert all(row["k"] == row["id"] for row in rows)


def read_by_two_workers(
    store: Store, tmp_path: Path, change: Callable[[Path], None], *keep: str
) -> JobRow:
    """The second one resumes in `b`, after the change."""
    folder = tmp_path / "in"
    folder.mkdir()
    for word in "abc":
        write_rows(folder / f"{word}.jsonl", word)
    with one_thread(store, tmp_path, max_open_groups=6) as first:
        spec = first.spec(folder, tmp_path / "out")
        output = spec.output.model_copy(update={"keep_columns": keep})
        job_id = first.client.submit(spec.model_copy(update={"output": output}))[0].job_id
        first.run(most=1)
        assert first.client.job(job_id).paused
        change(folder)
        with one_thread(store, tmp_path, max_open_groups=6) as second:
            second.messages.extend(first.messages)
            second.run()
            return second.client.job(job_id)


def test_an_input_of_which_nothing_was_read_may_be_corrected(store: Store, tmp_path: Path) -> None:
    """Its columns are kept, too: they are those of the files as they are now."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["one", "two"], "k": [1, 2]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(60) + whole[64:])  # its columns are read, and no row
    with one_thread(store, tmp_path) as bed:
        spec = bed.spec(path, tmp_path / "out")
        output = spec.output.model_copy(update={"keep_columns": ("k",)})
        job_id = bed.client.submit(spec.model_copy(update={"output": output}))[0].job_id
        bed.run()
        assert "is damaged; write the file again" in (bed.client.job(job_id).error or "")
        path.write_bytes(whole)
        bed.client.retry(job_id)
        bed.run()
        assert bed.client.job(job_id).state is JobState.DONE
    assert read_output(str(tmp_path / "out"))["k"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "template"),
    [("simple", "Row {id}: {prompt}"), ("jinja", "Row {{ id }}: {{ prompt | upper }}")],
)
def test_templated_rows_are_the_same_after_an_interruption(
    store: Store, uri: Path, tmp_path: Path, kind: str, template: str
) -> None:
    """The reading of another worker renders what is left as the first one would have done."""
    inputs = {"uri": str(uri), "template": template, "template_kind": kind}
    with one_thread(store, tmp_path, max_open_groups=4) as first:
        job_id = first.submit(uri, tmp_path / "disturbed", input=inputs).job_id
        first.run(most=1)
        assert first.client.job(job_id).paused
        with one_thread(store, tmp_path, max_open_groups=4) as second:
            second.messages.extend(first.messages)
            run(second, job_id)
    with one_thread(store, tmp_path) as bed:
        run(bed, bed.submit(uri, tmp_path / "undisturbed", input=inputs).job_id)
    disturbed, undisturbed = (
        read_output(str(tmp_path / name)).drop_columns(["cost_usd", "acceptance_rate"])
        for name in ("disturbed", "undisturbed")
    )
    assert disturbed == undisturbed
    wanted = [f"Row row-{i}: {'prompt' if kind == 'simple' else 'PROMPT'} {i}" for i in range(80)]
    assert undisturbed["prompt_tokens"].to_pylist() == [len(text) for text in wanted]


def test_of_many_readings_that_pause_the_oldest_are_forgotten(
    store: Store, uri: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "MOST_PAUSED", 2)
    with one_thread(store, tmp_path, max_open_groups=1) as bed:
        jobs = [bed.submit(uri, tmp_path / f"out-{n}").job_id for n in range(4)]
        bed.run(most=4)
        assert list(bed.context.paused._paused) == jobs[2:]
        bed.run()
        assert {bed.client.job(job_id).state for job_id in jobs} == {JobState.DONE}


def test_readings_that_pause_keep_few_processes(store: Store, uri: Path, tmp_path: Path) -> None:
    with one_thread(store, tmp_path, max_open_groups=1) as bed:
        before = set(below(os.getpid()))
        jobs = [bed.submit(uri, tmp_path / f"out-{n}").job_id for n in range(5)]
        bed.run(most=5)
        assert all(bed.client.job(job_id).paused for job_id in jobs)
        assert len(set(below(os.getpid())) - before) <= 2 + 1, "and the one they are forked from"
        bed.run()
        assert {bed.client.job(job_id).state for job_id in jobs} == {JobState.DONE}
    for n in range(5):
        ids = read_output(str(tmp_path / f"out-{n}"))["id"].to_pylist()
        assert ids == [f"row-{i}" for i in range(GROUPS * 4)]


@pytest.mark.parametrize("paused", [True, False], ids=["while it pauses", "before it is read"])
def test_all_who_read_an_input_do_so_within_the_memory_that_is_set(
    store: Store, uri: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    """Also when a stopped job is published, with what was never read."""
    told: list[Any] = []
    init = ColumnarSource.__init__

    def noted(self: ColumnarSource, *arguments: Any) -> None:
        told.append(arguments[4])
        init(self, *arguments)

    monkeypatch.setattr(ColumnarSource, "__init__", noted)
    with one_thread(store, tmp_path, max_open_groups=1, reader_bytes=300 << 20) as bed:
        job_id = bed.submit(uri, tmp_path / "out").job_id
        bed.run(most=1 if paused else 0)
        bed.client.cancel(job_id)
        bed.run()
        assert bed.client.job(job_id).state is JobState.CANCELLED
    assert told
    assert set(told) == {300 << 20}


def test_a_batch_file_stopped_while_its_reading_pauses_has_its_files(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TextTokenizer, "render", lambda _, messages, *__, **___: messages[0]["content"]
    )
    path = tmp_path / "batch.jsonl"
    bodies = [{"messages": [{"role": "user", "content": f"hello {i}"}]} for i in range(20)]
    lines = [{"custom_id": f"{i}", "body": body} for i, body in enumerate(bodies)]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))

    def rows() -> list[int]:
        return [file.rows for file in read_manifest(str(tmp_path / "out")).openai_files]

    with one_thread(store, tmp_path, max_open_groups=2) as bed:
        job_id = bed.submit(path, tmp_path / "out").job_id
        bed.run(most=3)  # reading, and one group verified and recorded
        assert bed.client.job(job_id).paused
        bed.client.cancel(job_id)
        bed.run()
        job = bed.client.job(job_id)
        assert (job.state, job.report["input_format"]) == (JobState.CANCELLED, "openai")
        assert job.report["verifier_sha256"], "so that what is finished can be replayed"
        done, others = rows()
        assert done > 0
        assert done + others == 20
        bed.client.retry(job_id)
        bed.run()
        assert rows() == [20, 0]


@pytest.mark.parametrize("wanted", ["openai", "auto"])
def test_a_batch_file_stopped_before_it_is_read_has_its_files(
    store: Store, tmp_path: Path, wanted: str
) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(orjson.dumps({"custom_id": "a", "body": {"messages": []}}))
    with one_thread(store, tmp_path) as bed:
        inputs = {"uri": str(path), "format": wanted}
        job_id = bed.submit(path, tmp_path / "out", input=inputs).job_id
        bed.client.cancel(job_id)
        bed.run()
        assert bed.client.job(job_id).state is JobState.CANCELLED
    manifest = read_manifest(str(tmp_path / "out"))
    assert [file.name for file in manifest.openai_files] == ["output.jsonl", "errors.jsonl"]


@pytest.mark.parametrize("method", ["open", "head"])
def test_an_input_out_of_reach_for_a_while_costs_an_attempt_and_not_the_job(
    store: Store, uri: Path, tmp_path: Path, method: str
) -> None:
    away = [True]

    class Flaky(Objects):
        """Once it does not answer."""

        def open(self, uri: str, version: str | None = None) -> Any:
            return self._answer("open", super().open, uri, version)

        def head(self, uri: str) -> Any:
            return self._answer("head", super().head, uri)

        def _answer(self, name: str, ask: Any, uri: str, *more: Any) -> Any:
            if name == method and uri.endswith("in.parquet") and away:
                away.clear()
                raise ObjectError(f"cannot read {uri}: no answer", passing=True)
            return ask(uri, *more)

    with one_thread(store, tmp_path, objects=Flaky()) as bed:
        job_id = bed.submit(uri, tmp_path / "out").job_id
        bed.run()
        assert not away
        assert bed.client.job(job_id).state is JobState.RUNNING
        assert [message.stage for message in store.due()] == [Stage.INGEST], (
            "the sweeper enqueues it"
        )
        bed.do(Stage.INGEST, job_id)
        bed.run()
        assert bed.client.job(job_id).state is JobState.DONE


# --- memory ---------------------------------------------------------------------------------

PROGRAM = """
import resource, sys
from functools import lru_cache
from pathlib import Path
from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.stages.context import KnownJobs, StageContext
from specbatch.pipeline.stages.draft_models import DraftModels
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.stages.ingest import ingest
from specbatch.pipeline.runtime.sweeper import Requeuer
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.schemas.records import Artefact, Stage, StageTiming
from specbatch.schemas.spec import load_spec

MOST_OPEN, LEASE_SEC, NO_TIME = 32, 600.0, StageTiming(0.0)
uri, model, folder = sys.argv[1:]

class Short:
    "A tokenizer that takes no time, whatever the text."
    vocab_size = 257
    def encode_batch(self, texts, special):
        return [(len(text) % 250, 1, 2) for text in texts]

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

store = open_store(f"sqlite:///{folder}/store.db")
lease_keeper, done = LeaseKeeper(store, LEASE_SEC), Artefact("nowhere", "0", 0)
objects, models, silent = Objects(), lru_cache(inspect_model), lambda work: None
context = StageContext(
    store=store, objects=objects, lease_keeper=lease_keeper,
    enqueue=silent, owner="me", lease_sec=LEASE_SEC,
    price_microusd=1_000_000, jobs=KnownJobs(store),
    tokenizers=Tokenizers(lambda ref: Short(), models),
    drafting=Drafting(store, objects), draft_models=DraftModels(store),
    requeuer=Requeuer(store, silent, 3 * LEASE_SEC),
    models=models, max_open_groups=MOST_OPEN, max_attempts=3, reader_bytes=768 << 20,
)
spec = load_spec({
    "input": {"uri": uri}, "output": {"uri": f"{folder}/out"}, "verifier": model,
    "speculation": {"depth": "off"},
})
job, _ = Client(store, lambda message: None, f"{folder}/work").submit(spec)

def end_groups(count):
    for _ in range(count):
        work = store.claim_next(Stage.VERIFY, model, "me", LEASE_SEC)
        store.advance(work.lease, Stage.RECORD, done, NO_TIME)
        index = work.lease.group_index
        lease = store.claim_group(job.job_id, index, Stage.RECORD, "me", LEASE_SEC).lease
        store.commit_group(lease, [], NO_TIME, {})

ingest(context, job.job_id)
before, pauses = peak_mib(), 0
while store.get_job(job.job_id).stage is Stage.INGEST:
    assert store.get_job(job.job_id).paused
    pauses += 1
    progress = store.progress(job.job_id)
    open_groups = progress.groups_total - progress.groups_done
    assert MOST_OPEN <= open_groups < MOST_OPEN + 16, open_groups
    end_groups(open_groups - MOST_OPEN // 2)
    ingest(context, job.job_id)
progress = store.progress(job.job_id)
lease_keeper.close()
print(progress.rows_total, progress.groups_total, pauses, round(peak_mib() - before))
"""

ROW_BYTES = 8192


@pytest.mark.parametrize(
    "megabytes", [200, pytest.param(5000, marks=pytest.mark.long)], ids=["200-MB", "5-GB"]
)
def test_reading_holds_a_row_group_at_a_time(tmp_path: Path, megabytes: int) -> None:
    rows_per_row_group = 1024  # 8 MiB
    row_groups = megabytes * 10**6 // (rows_per_row_group * ROW_BYTES)
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    with pq.ParquetWriter(tmp_path / "in.parquet", schema, **options) as writer:
        for number in range(row_groups):
            ids = [f"{number}-{i}" for i in range(rows_per_row_group)]
            prompts = [row_id.ljust(ROW_BYTES, "x") for row_id in ids]
            writer.write_table(pa.table({"id": ids, "prompt": prompts}, schema=schema))
    size = (tmp_path / "in.parquet").stat().st_size
    assert size > 0.95 * megabytes * 10**6
    model = stand_in_model.write_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "in.parquet"), str(model), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, groups, pauses, grown_mib = map(int, done.stdout.split())
    assert rows == row_groups * rows_per_row_group
    assert groups == rows // 64
    assert pauses >= (groups - 32) // (16 + 16)
    assert grown_mib < 100, "as much as some row groups and buffers, and not the file"
