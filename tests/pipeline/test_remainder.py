"""A stopped job keeps its finished rows, and what it leaves can be submitted as it is: together the
outputs are those of the undisturbed job, bit for bit and in its order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import S3
from ledger.builders import Clock

from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.pipeline.engines.state.accounting import OVERHEAD
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.spec_input import build_spec
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.stages import input_files
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import DueWork, JobRow, JobState, Stage
from support.databases import sqlite_store
from support.one_thread import OneThread, one_thread

ROWS = 30
# What a row is, whoever did it; the rest is measured.
DECIDED = ("id", "sample_index", "text", "token_ids", "finish_reason", "prompt_tokens", "seed")


@pytest.fixture
def store() -> Iterator[Store]:
    opened = sqlite_store()
    yield opened
    opened.close()


@pytest.fixture
def bed(store: Store, tmp_path: Path) -> Iterator[OneThread]:
    with one_thread(store, tmp_path, max_sequences=6) as bed:
        yield bed


OWN: list[dict[str, Any] | None] = [
    None,
    {"max_tokens": 3},
    {"n": 3, "max_tokens": 5},
    {"stop": ["a", "e"], "max_tokens": 40},
    {"logit_bias": {"7": 2.5, "12": -1.0}, "temperature": 0.5},
    {"bad_words": [[1, 2], [3]], "stop_token_ids": [5], "top_p": 0.5, "seed": 11},
    {"logprobs": True, "top_logprobs": 2, "min_tokens": 2},
]


def write_input(path: Path, rows: int = ROWS) -> Path:
    """Rows with ids, tags, seeds and values of their own; some of them bad."""
    prompts = [f"say {'so ' * (i % 5)}{i}" for i in range(rows)]
    prompts[5] = ""
    prompts[rows - 4] = ""
    table = {
        "key": [f"row-{i}" if i != rows - 2 else "row-1" for i in range(rows)],
        "prompt": prompts,
        "label": [None if i % 3 else f"tag {i % 2}" for i in range(rows)],
        "own": [json.dumps(own) if (own := OWN[i % len(OWN)]) else None for i in range(rows)],
        "number": [i * 1000 if i % 4 else None for i in range(rows)],
    }
    pq.write_table(pa.table(table), path, row_group_size=7)
    return path


COLUMNS = {
    "id_column": "key",
    "tag_column": "label",
    "sampling_column": "own",
    "seed_column": "number",
}


def submit(bed: OneThread, uri: str | Path, output: str | Path, **values: Any) -> JobRow:
    inputs = {"uri": str(uri), **COLUMNS}
    spec = bed.spec(uri, output, sampling={"max_tokens": 8, "seed": 5}, input=inputs, **values)
    return bed.client.submit(spec)[0]


def decided(output: str | Path) -> dict[tuple[str, int], tuple[Any, ...]]:
    """What the output's finished rows say, by id and sample, in its order; quarantined ones too."""
    rows = read_output(str(output)).to_pylist()
    return {
        (row["id"], row["row_index"] if row["finish_reason"] == "error" else row["sample_index"]): (
            *(str(row[name]) for name in DECIDED),
            row["logprobs"] is None,
        )
        for row in rows
        if row["finish_reason"] != "cancelled"
    }


def remainder_spec(output: str | Path, job_id: str, folder: Path) -> Path:
    """The spec file, where a user would have it."""
    if "://" not in str(output):
        return Path(output) / f"remainder-{job_id}.yaml"
    path = folder / "fetched.yaml"
    path.write_bytes(Objects().get_bytes(f"{output}/remainder-{job_id}.yaml"))
    return path


@contextmanager
def stopping_at_step(bed: OneThread, job_id: str, step: int) -> Iterator[None]:
    """The job is cancelled in the middle of the engine's step of that number."""
    do_step, steps = StandInEngine.step, [0]

    def cancelling(engine: StandInEngine) -> Any:
        done = do_step(engine)
        steps[0] += 1
        if steps[0] == step:
            bed.client.cancel(job_id, "cancelled by a test")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInEngine, "step", cancelling)
        yield


def finish_the_rest(bed: OneThread, output: str | Path, job_id: str, folder: Path) -> str:
    """Submit the remainder as it is; where its output lies."""
    spec = build_spec(remainder_spec(output, job_id, folder), {})
    rest, created = bed.client.submit(spec)
    assert created
    bed.run()
    assert bed.client.job(rest.job_id).state is JobState.DONE
    return rest.output_uri


def check_both(bed: OneThread, uri: str, root: str, folder: Path, job_id: str) -> None:
    """The stopped job and its remainder against the undisturbed one."""
    whole = submit(bed, uri, f"{root}/whole")
    bed.run()
    assert bed.client.job(whole.job_id).state is JobState.PARTIAL, "three rows are bad"
    expected = decided(f"{root}/whole")
    rest_uri = finish_the_rest(bed, f"{root}/out", job_id, folder)
    first, rest = decided(f"{root}/out"), decided(rest_uri)
    assert not first.keys() & rest.keys()
    assert {**first, **rest} == expected
    order = list(expected)
    assert [key for key in order if key in rest] == list(rest), "in the order of the input"
    tags = {r["id"]: r["tag"] for r in bed_rows(bed, whole.job_id)}
    assert all(tags[r["id"]] == r["tag"] for r in bed_rows(bed, job_id))


def bed_rows(bed: OneThread, job_id: str) -> list[dict[str, Any]]:
    return [{"id": c.row_id, "tag": c.tag} for c in bed.store.completions(job_id)]


def check_files(bed: OneThread, output: str, job_id: str, reason: str) -> int:
    """What lies beside the output; the number of rows that are left."""
    manifest = read_manifest(output)
    assert [file.name for file in manifest.remainder] == [
        f"remainder-{job_id}.parquet",
        f"remainder-{job_id}.yaml",
    ]
    assert manifest.info["stopped"] == reason
    rows = [r for r in read_output(output).to_pylist() if r["finish_reason"] == "cancelled"]
    assert {row["error"] for row in rows} == {reason}
    assert bed.client.job(job_id).state is JobState.CANCELLED
    left = manifest.remainder[0].rows
    assert len({row["id"] for row in rows}) == left
    return left


@pytest.mark.parametrize("step", [1, 4, 9])
def test_a_job_stopped_within_a_group_leaves_the_rest(
    bed: OneThread, tmp_path: Path, step: int
) -> None:
    uri = str(write_input(tmp_path / "in.parquet"))
    job = submit(bed, uri, tmp_path / "out")
    with stopping_at_step(bed, job.job_id, step):
        bed.run()
    left = check_files(bed, str(tmp_path / "out"), job.job_id, "cancelled by a test")
    assert 0 < left < ROWS
    progress = bed.client.progress(job.job_id)
    assert progress.completions == len(list(bed.store.completions(job.job_id)))
    kept = bed.store.kept_rows(job.job_id)
    assert progress.rows_done == len(kept) + 4 * progress.groups_done + 3
    assert kept or step != 4, "by then rows of three tokens were finished"
    check_both(bed, uri, str(tmp_path), tmp_path, job.job_id)


def test_a_job_stopped_while_its_input_is_read_leaves_what_was_not_read(
    store: Store, tmp_path: Path
) -> None:
    """Reading waits for groups, so most of the input is in none."""
    uri = str(write_input(tmp_path / "in.parquet"))
    with one_thread(store, tmp_path, max_open_groups=2) as bed:
        job = submit(bed, uri, tmp_path / "out")
        bed.run(most=3)  # reading, and one group verified and recorded
        assert bed.client.job(job.job_id).paused
        bed.client.cancel(job.job_id, "cancelled by a test")
        bed.run()
        left = check_files(bed, str(tmp_path / "out"), job.job_id, "cancelled by a test")
        assert left > ROWS // 2
        table = read_output(str(tmp_path / "out"))
        rows = set(table["row_index"].to_pylist())
        assert rows == set(range(ROWS)), "unread rows are told too, and bad ones by their reason"
        assert table["error"].to_pylist().count("empty_prompt: the prompt is empty") == 2
        check_both(bed, uri, str(tmp_path), tmp_path, job.job_id)


def test_a_job_stopped_before_anything_was_done_leaves_everything(
    bed: OneThread, tmp_path: Path
) -> None:
    uri = str(write_input(tmp_path / "in.parquet"))
    job = submit(bed, uri, tmp_path / "out")
    bed.client.cancel(job.job_id, "cancelled by a test")
    bed.run()
    left = check_files(bed, str(tmp_path / "out"), job.job_id, "cancelled by a test")
    assert left == ROWS - 3
    check_both(bed, uri, str(tmp_path), tmp_path, job.job_id)


def test_a_remainder_on_s3_is_a_job_as_well(store: Store, tmp_path: Path, s3: S3) -> None:
    local = write_input(tmp_path / "in.parquet")
    s3.client().upload_file(str(local), s3.bucket, "in/prompts.parquet")
    uri = f"{s3.uri}/in/prompts.parquet"
    work = f"{s3.uri}/work"
    with one_thread(store, tmp_path, work, 6, max_open_groups=3) as bed:
        job = submit(bed, uri, f"{s3.uri}/out")
        with stopping_at_step(bed, job.job_id, 4):
            bed.run()
        check_files(bed, f"{s3.uri}/out", job.job_id, "cancelled by a test")
        check_both(bed, uri, s3.uri, tmp_path, job.job_id)


def test_a_retry_does_the_rest_and_takes_the_remainder_away(bed: OneThread, tmp_path: Path) -> None:
    """Rows that were kept are not done again."""
    uri = str(write_input(tmp_path / "in.parquet"))
    whole = submit(bed, uri, tmp_path / "whole")
    bed.run()
    job = submit(bed, uri, tmp_path / "out")
    with stopping_at_step(bed, job.job_id, 4):
        bed.run()
    kept = {(c.row_index, c.sample_index): c for c in bed.store.completions(job.job_id)}
    assert kept
    bed.client.retry(job.job_id)
    bed.run()
    assert bed.client.job(job.job_id).state is JobState.PARTIAL
    assert decided(tmp_path / "out") == decided(tmp_path / "whole")
    after = {(c.row_index, c.sample_index): c for c in bed.store.completions(job.job_id)}
    assert {key: after[key] for key in kept} == kept
    one, other = (bed.client.progress(j.job_id) for j in (job, whole))
    assert (one.completions, one.completion_tokens) == (other.completions, other.completion_tokens)
    assert not read_manifest(str(tmp_path / "out")).remainder
    assert not list((tmp_path / "out").glob("remainder-*"))


def test_an_input_that_went_away_costs_the_remainder_and_not_the_output(
    store: Store, tmp_path: Path
) -> None:
    uri = write_input(tmp_path / "in.parquet")
    with one_thread(store, tmp_path, max_open_groups=2) as bed:
        job = submit(bed, uri, tmp_path / "out")
        bed.run(most=3)
        bed.client.cancel(job.job_id)
        uri.unlink()
        bed.run()
        ended = bed.client.job(job.job_id)
        assert ended.state is JobState.CANCELLED
        assert "the rest of the input is not in the remainder" in (ended.error or "")
        manifest = read_manifest(str(tmp_path / "out"))
        assert manifest.completions > 0
        assert manifest.remainder[0].rows > 0, "the groups that were read are in it"


def test_a_remainder_has_no_rows_of_an_input_that_changed(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    uri = write_input(folder / "a.parquet")
    with one_thread(store, tmp_path, max_open_groups=2) as bed:
        job = submit(bed, folder, tmp_path / "out")
        bed.run(most=3)
        bed.client.cancel(job.job_id)
        write_input(uri, rows=12)
        bed.run()
        ended = bed.client.job(job.job_id)
    assert ended.state is JobState.CANCELLED
    assert f"{uri} changed since this job began reading it" in (ended.error or "")


def test_an_input_out_of_reach_for_a_while_is_waited_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last attempt: then what is there is published."""
    uri = write_input(tmp_path / "in.parquet")
    away = ObjectError(f"cannot read {uri}: no answer", passing=True)
    with one_thread(store, tmp_path, max_open_groups=2) as bed:
        jobs = [submit(bed, uri, tmp_path / name) for name in ("soon", "never")]
        bed.run(most=2)
        for job in jobs:
            bed.client.cancel(job.job_id)
        bed.messages.clear()
        for job, attempts in zip(jobs, (1, 2), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(input_files, "open_source", Mock(side_effect=away))
                for _ in range(attempts):
                    bed.do(Stage.PUBLISH, job.job_id)
                    assert not bed.client.job(job.job_id).state.is_final
                if job is jobs[0]:
                    patch.undo()
                bed.do(Stage.PUBLISH, job.job_id)
        soon, never = (bed.client.job(job.job_id) for job in jobs)
        assert (soon.state, soon.error) == (JobState.CANCELLED, None)
        assert never.state is JobState.CANCELLED
        assert "is not in the remainder: cannot read" in (never.error or "")


def test_a_deadline_stops_the_work_on_a_group_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the store's clock; the lease_keeper looks."""
    clock = Clock()
    store = sqlite_store(clock)
    with one_thread(store, tmp_path, max_sequences=6) as bed:
        job = submit(bed, write_input(tmp_path / "in.parquet"), tmp_path / "out", deadline_sec=60.0)
        do_step, steps = StandInEngine.step, [0]

        def slow(engine: StandInEngine) -> Any:
            steps[0] += 1
            clock.advance(20.0)
            bed.lease_keeper.check_cancelled()
            return do_step(engine)

        monkeypatch.setattr(StandInEngine, "step", slow)
        bed.run()
        reason = bed.client.job(job.job_id).stop_reason or ""
        assert reason.startswith("its deadline of 1970-01-12")
        assert steps[0] <= 4, "within a step of the deadline"
        assert check_files(bed, str(tmp_path / "out"), job.job_id, reason)


def test_a_budget_stops_a_job_by_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group has got on when it is spent."""
    store = sqlite_store()
    with one_thread(store, tmp_path, max_sequences=6) as bed:
        budget = 10 / 3600  # at a dollar per hour: ten seconds of the device
        values = {"budget_usd": budget, "group_size": 64}
        job = submit(bed, write_input(tmp_path / "in.parquet"), tmp_path / "out", **values)
        do_step, spent = StandInEngine.step, [0.0]

        def dear(engine: StandInEngine) -> Any:
            done = do_step(engine)
            for sequence in engine._running:
                sequence.time[OVERHEAD] += TICKS_PER_SEC // 2
                spent[0] += 0.5
            bed.lease_keeper.check_cancelled()
            return done

        monkeypatch.setattr(StandInEngine, "step", dear)
        bed.run()
        reason = bed.client.job(job.job_id).stop_reason or ""
        assert reason.startswith("its budget of $")
        assert spent[0] < 10 + 2 * 6 * 0.5, "within a step of the budget"
        check_files(bed, str(tmp_path / "out"), job.job_id, reason)


def test_the_spec_of_a_remainder_keeps_all_but_the_limits(bed: OneThread, tmp_path: Path) -> None:
    values = {"deadline_sec": 1e6, "budget_usd": 5.0, "priority": "low", "tenant": "legal"}
    job = submit(bed, write_input(tmp_path / "in.parquet"), tmp_path / "out", **values)
    bed.client.cancel(job.job_id, "cancelled by\nsomebody: {odd}")
    bed.run()
    path = remainder_spec(tmp_path / "out", job.job_id, tmp_path)
    assert "deadline_sec" not in yaml.safe_load(path.read_text())
    spec = build_spec(path, {})
    assert (spec.priority, spec.tenant, spec.sampling.seed) == ("low", "legal", 5)
    assert (spec.deadline_sec, spec.budget_usd) == (None, None)
    assert spec.output.uri == str(tmp_path / "out-remainder")
    assert spec.input.uri == str(tmp_path / "out" / f"remainder-{job.job_id}.parquet")


def test_a_stopped_remainder_leaves_one_of_its_own(bed: OneThread, tmp_path: Path) -> None:
    uri = str(write_input(tmp_path / "in.parquet"))
    job = submit(bed, uri, tmp_path / "out")
    bed.client.cancel(job.job_id)
    bed.run()
    spec = build_spec(remainder_spec(tmp_path / "out", job.job_id, tmp_path), {})
    second, _ = bed.client.submit(spec)
    bed.run(most=3)
    bed.client.cancel(second.job_id)
    bed.run()
    last = finish_the_rest(bed, second.output_uri, second.job_id, tmp_path)
    whole = submit(bed, uri, tmp_path / "whole")
    bed.run()
    assert bed.client.job(whole.job_id).state is JobState.PARTIAL
    parts = [decided(uri) for uri in (tmp_path / "out", second.output_uri, last)]
    together = {key: row for part in parts for key, row in part.items()}
    assert sum(map(len, parts)) == len(together)
    assert together == decided(tmp_path / "whole")


def test_a_message_for_a_group_may_find_another_one_next(bed: OneThread, tmp_path: Path) -> None:
    """The longest goes first, whichever message comes; each finds one, and one too many none."""
    prompts = [f"{'long ' * (i // 4)}{i}" for i in range(16)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    job = bed.submit(tmp_path / "in.parquet", tmp_path / "out")
    bed.run(most=1)
    assert [message.group_index for message in bed.messages] == [0, 1, 2, 3]
    claimed: list[int | None] = []
    advance: Callable[..., None] = bed.store.advance

    def noting(lease: Any, *args: Any, **kwargs: Any) -> None:
        claimed.append(lease.group_index)
        advance(lease, *args, **kwargs)

    bed.store.advance = noting  # type: ignore[method-assign]  # a spy
    bed.messages.append(DueWork(job.job_id, Stage.VERIFY, 0, bed.model))
    bed.run()
    assert claimed == [3, 2, 1, 0]
    assert bed.client.job(job.job_id).state is JobState.DONE
