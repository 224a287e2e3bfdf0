"""What is exported of a job is what the store has of it, and enough for those who read it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from ledger.builders import JOB

from specbatch.pipeline.operations.export import BATCH_ROWS, Exporter, _page_rows, in_batches
from specbatch.pipeline.outputs import corrections, export_columns
from specbatch.pipeline.outputs.corrections import Corrections
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import (
    JobNotFoundError,
    ObjectError,
    OutputError,
    StoreError,
    UsageError,
)
from specbatch.schemas.exports import Exported, ExportKind, ExportOrder, Selection
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import NO_PROVENANCE, Ticks
from specbatch.schemas.records import CompletionRecord, FinishReason
from support.databases import sqlite_store
from support.exported import ROWS, ExportedJob, exported_job
from support.traced import SOURCES, TracedToken, traced
from support.tree import ROOT

Export = Callable[..., tuple[Exported, list[dict[str, Any]]]]


@pytest.fixture
def made(tmp_path: Path) -> ExportedJob:
    return exported_job(sqlite_store(), tmp_path / "work")


@pytest.fixture
def export(made: ExportedJob, tmp_path: Path) -> Export:
    """`export("tokens", ...)`: what came of it, and the rows of its file."""

    def call(kind: str, objects: Objects | None = None, **chosen: Any) -> Any:
        exporter = Exporter(made.store, objects or Objects(), Objects())
        to = str(tmp_path / f"{kind}.parquet")
        order = ExportOrder(ExportKind(kind), to, Selection(**chosen), overwrite=True)
        done = exporter.export(JOB, order)
        return done, pq.read_table(to).to_pylist()

    return call


def rejections(tokens: list[TracedToken], proposer: str | None = None) -> list[TracedToken]:
    return [
        token
        for token in tokens
        if token.rejected_token is not None and proposer in (None, token.proposer)
    ]


def test_completions_come_with_everything_that_is_kept(made: ExportedJob, export: Export) -> None:
    done, rows = export("completions")
    assert done.rows == len(rows) == len(made.completions) == 32
    ticks = {f"{kind}_ticks" for kind in Ticks.__slots__}
    for row, record in zip(rows, made.completions, strict=True):
        for name, value in row.items():
            if name == "job_id":
                assert value == JOB
            elif name == "completion_tokens":
                assert value == len(record.token_ids)
            elif name in ticks:
                assert value == getattr(record.ticks, name.removesuffix("_ticks"))
            else:
                owner = record.provenance if hasattr(NO_PROVENANCE, name) else record
                kept = getattr(owner, name)
                assert value == (list(kept) if isinstance(kept, tuple) else kept), name


def test_of_what_is_not_kept_columns_are_null(made: ExportedJob) -> None:
    whole = made.completions[0]
    gone = replace(whole.provenance, rejected=())
    purged = replace(whole, row_id="", token_ids=(), logprobs=(), text="", provenance=gone)
    hashed = replace(whole, token_ids=(-1,) * len(whole.token_ids), text="")
    empty = replace(whole, token_ids=(), logprobs=(), origins=(), text="", provenance=gone)
    rows = export_columns.completion_batch(JOB, [whole, purged, hashed, empty]).to_pylist()
    nulls = [{name for name, value in row.items() if value is None} for row in rows]
    lost = {"row_id", "text", "token_ids", "logprobs", "rejected"}
    assert nulls[1] - nulls[0] == lost
    assert nulls[2] - nulls[0] == {"text"}
    assert rows[2]["token_ids"] == [-1] * len(whole.token_ids)
    assert rows[3]["text"] == ""  # of a completion without tokens it is all there is
    for name in ("origins", "steps", "pass_ticks", "completion_tokens", "verify_ticks"):
        assert rows[1][name] == rows[0][name]


def test_tokens_are_those_that_came_about(made: ExportedJob, export: Export) -> None:
    _, rows = export("tokens")
    naive = [
        (record.row_index, record.sample_index, token.position, token.token_id, token.origin)
        for record in made.completions
        for token in made.tokens[record.row_index, record.sample_index]
    ]
    names = ("row_index", "sample_index", "position", "token_id", "origin")
    assert [tuple(row[name] for name in names) for row in rows] == naive


def test_corrections_have_prompts_tokens_and_where_drafts_were_wrong(
    made: ExportedJob, export: Export
) -> None:
    done, rows = export("corrections", min_rejections=0)
    assert [(row["row_index"], row["sample_index"]) for row in rows] == sorted(made.tokens)
    assert done.left_out == {}
    assert done.remarks == ()
    for row in rows:
        tokens = made.tokens[row["row_index"], row["sample_index"]]
        wrong = rejections(tokens)
        assert tuple(row["prompt_ids"]) == made.prompts[row["row_index"]].prompt_ids
        assert row["token_ids"] == [token.token_id for token in tokens]
        assert row["logprobs"] == [token.logprob for token in tokens]
        assert row["rejected_positions"] == [token.position for token in wrong]
        assert row["rejected_tokens"] == [token.rejected_token for token in wrong]
        assert row["rejected_proposers"] == [token.proposer for token in wrong]
        assert row["draft_positions"] == [token.draft_position for token in wrong]
        assert len(row["weights"]) == len(tokens)
        lost = dict(zip(row["rejected_positions"], row["lost_tokens"], strict=True))
        assert row["weights"] == [lost.get(token.position, 1) for token in tokens]


def test_what_rejections_cost_is_what_was_drafted_and_not_accepted(
    made: ExportedJob, export: Export
) -> None:
    _, rows = export("corrections", min_rejections=0)
    for row, record in zip(rows, made.completions, strict=True):
        assert sum(row["lost_tokens"]) <= record.proposed - record.accepted
        is_cut = record.origins[-1] == 1  # then the rest of the last draft was never looked at
        assert is_cut or sum(row["lost_tokens"]) == record.proposed - record.accepted


@pytest.mark.parametrize("fewest", [1, 3])
def test_corrections_have_at_least_so_many_rejections(
    made: ExportedJob, export: Export, fewest: int
) -> None:
    done, rows = export("corrections", min_rejections=fewest)
    enough = [key for key in sorted(made.tokens) if len(rejections(made.tokens[key])) >= fewest]
    assert [(row["row_index"], row["sample_index"]) for row in rows] == enough
    left = len(made.tokens) - len(enough)
    assert done.left_out == ({corrections.FEW_REJECTIONS: left} if left else {})


def test_one_rejection_is_asked_for_unless_told_otherwise(export: Export) -> None:
    assert export("corrections")[1] == export("corrections", min_rejections=1)[1]


def test_corrections_of_one_tag(made: ExportedJob, export: Export) -> None:
    done, rows = export("corrections", tag="de", min_rejections=0)
    assert {row["tag"] for row in rows} == {"de"}
    assert done.left_out == {corrections.OTHER_TAG: len(made.completions) - len(rows)}


@pytest.mark.parametrize("proposer", [*SOURCES, "nobody"])
def test_corrections_of_one_proposer(made: ExportedJob, export: Export, proposer: str) -> None:
    done, rows = export("corrections", proposer=proposer, min_rejections=0)
    asked = [
        key
        for key, tokens in sorted(made.tokens.items())
        if any(token.proposer == proposer for token in tokens)
    ]
    assert [(row["row_index"], row["sample_index"]) for row in rows] == asked
    assert done.left_out.get(corrections.OTHER_PROPOSER, 0) == len(made.tokens) - len(asked)
    for row in rows:
        wrong = rejections(made.tokens[row["row_index"], row["sample_index"]], proposer)
        assert row["rejected_positions"] == [token.position for token in wrong]
        assert set(row["rejected_proposers"]) <= {proposer}


def test_completions_that_teach_nothing_are_left_out_and_counted(made: ExportedJob) -> None:
    good = made.completions[0]
    masked = (-1, *good.token_ids[1:])
    emptied = replace(good.provenance, rejected=())
    others = [
        replace(good, finish_reason=FinishReason.ERROR),
        replace(good, finish_reason=FinishReason.CANCELLED),
        replace(good, token_ids=masked),
        replace(good, token_ids=(), logprobs=(), provenance=emptied),
        replace(good, provenance=NO_PROVENANCE),
    ]
    chooser = Corrections(JOB, Selection(min_rejections=0))
    batch = chooser.batch([good, *others, good], [(1,)] * 6 + [(1, -1)])
    assert batch.num_rows == 1
    assert {reason: n for reason, n in chooser.left_out.items() if n} == {
        corrections.ENDED_BADLY: 2,
        corrections.MASKED_TOKENS: 2,
        corrections.TOKENS_GONE: 1,
        corrections.UNTRACED: 1,
    }


def test_prompts_that_are_gone_are_null_and_told(made: ExportedJob, export: Export) -> None:
    (made.workspace / "prompts-1.arrow").unlink()
    done, rows = export("corrections", min_rejections=0)
    gone = [row for row in rows if row["row_index"] in range(6, 12)]
    assert len(gone) == 12
    assert {row["prompt_ids"] for row in gone} == {None}
    assert all(row["prompt_ids"] for row in rows if row not in gone)
    (remark,) = done.remarks
    assert remark.startswith("12 rows have no prompt: the job's files are no longer in ")


@pytest.mark.parametrize("mode", [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY])
def test_prompts_that_are_kept_for_the_work_alone_are_not_exported(
    tmp_path: Path, mode: PrivacyMode
) -> None:
    made = exported_job(sqlite_store(), tmp_path / "work", ended=False, privacy=mode)
    to = tmp_path / "c.parquet"
    order = ExportOrder(ExportKind.CORRECTIONS, str(to), so_far=True)
    done = Exporter(made.store, Objects(), Objects()).export(JOB, order)
    assert set(pq.read_table(to).column("prompt_ids").to_pylist()) == {None}
    assert f"{done.rows:,} rows have no prompt: what is kept of the job is {mode}" in done.remarks


def test_an_export_is_in_the_log_before_anything_is_written(
    made: ExportedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter(made.store, Objects(), Objects())
    order = ExportOrder(ExportKind.TOKENS, f"{tmp_path}/t.parquet")
    exporter.export(JOB, order)
    entry = list(made.store.log(JOB))[-1]
    assert entry.kind == EntryKind.EXPORTED
    assert orjson.loads(entry.payload) == {"what": "tokens", "to": order.to}

    def refuse(*_: object) -> None:
        raise StoreError("the log cannot be written")

    monkeypatch.setattr(made.store, "note_action", refuse)
    with pytest.raises(StoreError, match="the log cannot be written"):
        exporter.export(JOB, replace(order, to=f"{tmp_path}/u.parquet"))
    assert not (tmp_path / "u.parquet").exists()


class OutOfReach(Objects):
    """A store that answers nothing."""

    def head(self, uri: str) -> ObjectInfo | None:
        if uri.endswith(".arrow"):
            raise ObjectError(f"cannot look at {uri}: no route")
        return super().head(uri)


def test_prompts_that_are_damaged_or_out_of_reach_are_not_taken_for_gone(
    made: ExportedJob, export: Export
) -> None:
    with pytest.raises(ObjectError, match="no route"):
        export("corrections", objects=OutOfReach())
    (made.workspace / "prompts-2.arrow").write_bytes(b"x" * made.files[2].size_bytes)
    with pytest.raises(ObjectError, match="SHA-256"):
        export("corrections")


def test_costs_are_exact_and_add_up(made: ExportedJob, export: Export) -> None:
    _, rows = export("costs")
    for row, record in zip(rows, made.completions, strict=True):
        ticks = sum(row[f"{kind}_ticks"] for kind in Ticks.__slots__)
        assert row["ticks"] == ticks == record.ticks.total
        units = ticks * record.price_microusd + record.ahead_ticks * record.ahead_price_microusd
        assert row["cost_units"] == units
        assert row["cost_usd"] == pytest.approx(units / 3.6e16, rel=1e-12)
    total = sum(row["cost_units"] for row in rows)
    assert total == sum(export_columns.cost_units(c) or 0 for c in made.completions) > 0


def test_costs_of_before_ticks_were_kept_are_what_the_store_has(made: ExportedJob) -> None:
    record = replace(
        made.completions[0], ticks=Ticks(), ahead_ticks=0, compute_sec=2.0, cost_usd=0.5
    )
    (row,) = export_columns.cost_batch(JOB, [record]).to_pylist()
    assert (row["cost_units"], row["cost_usd"]) == (None, 0.5)


def test_time_has_every_slice_of_every_session(made: ExportedJob, export: Export) -> None:
    _, rows = export("time")
    slices = list(made.store.time_slices(JOB))
    assert len(rows) == len(slices) == 6
    for row, slice_ in zip(rows, slices, strict=True):
        told = (row["session_id"], row["group_index"], row["generation"], row["stage"])
        assert told == (slice_.session_id, *slice_.attempt[1:])
        assert [row[f"{kind}_ticks"] for kind in Ticks.__slots__] == [
            getattr(slice_.ticks, kind) for kind in Ticks.__slots__
        ]
        assert row["ticks"] == slice_.ticks.total
        assert row["price_microusd"] == slice_.device.price_microusd
        assert row["cost_units"] == slice_.ticks.total * slice_.device.price_microusd
        assert (row["kept"], row["in_flight"]) == (slice_.kept, slice_.in_flight)
        assert (row["device"], row["region"], row["tenure"]) == (
            slice_.device.kind, slice_.device.region, slice_.device.tenure,
        )  # fmt: skip
    assert {row["device"] for row in rows} == {"cpu", "h200"}


def test_each_file_says_where_it_is_from(made: ExportedJob, export: Export, tmp_path: Path) -> None:
    export("corrections", proposer="small", tag="de", min_rejections=2)
    about = pq.read_schema(tmp_path / "corrections.parquet").metadata
    job = made.store.get_job(JOB)
    expected = {
        "export": "corrections", "export_version": "1", "job": JOB, "job_name": job.name,
        "tenant": job.tenant, "spec_sha256": job.spec_digest, "job_state": "partial",
        "min_rejections": "2", "proposer": "small", "tag": "de",
    }  # fmt: skip
    assert about == {f"specbatch_{k}".encode(): v.encode() for k, v in expected.items()}


def test_a_job_that_goes_on_is_exported_only_when_asked(tmp_path: Path) -> None:
    made = exported_job(sqlite_store(), tmp_path / "work", ended=False)
    exporter = Exporter(made.store, Objects(), Objects())
    order = ExportOrder(ExportKind.COSTS, str(tmp_path / "c.parquet"))
    with pytest.raises(UsageError, match=r"is still running: .* --so-far"):
        exporter.export(JOB, order)
    done = exporter.export(JOB, replace(order, so_far=True))
    assert done.rows == len(made.completions)
    assert done.remarks == (f"job {JOB} is still running: these are the rows finished so far",)


def test_unknown_jobs_and_taken_places_are_told_before_anything_is_read(
    made: ExportedJob, tmp_path: Path
) -> None:
    exporter = Exporter(made.store, Objects(), Objects())
    order = ExportOrder(ExportKind.COSTS, str(tmp_path / "c.parquet"))
    with pytest.raises(JobNotFoundError):
        exporter.export("unknown-job", order)
    (tmp_path / "c.parquet").write_text("something else")
    with pytest.raises(OutputError, match="exists already"):
        exporter.export(JOB, order)


def test_only_corrections_are_chosen_from() -> None:
    with pytest.raises(UsageError, match="choose corrections; tokens are exported whole"):
        ExportOrder(ExportKind.TOKENS, "out", Selection(tag="de"))


@pytest.mark.parametrize("kind", ExportKind)
def test_the_same_job_gives_the_same_bytes(
    made: ExportedJob, export: Export, kind: ExportKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export(kind)[0].files
    assert export(kind)[0].files == first
    # However its completions came to the store.
    again = exported_job(sqlite_store(), made.workspace)
    monkeypatch.setattr(made, "store", again.store)
    assert export(kind)[0].files == first


def test_progress_is_told_in_completions(made: ExportedJob, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    exporter = Exporter(made.store, Objects(), Objects())
    order = ExportOrder(ExportKind.TOKENS, str(tmp_path / "t.parquet"))
    exporter.export(JOB, order, lambda read, total: heard.append((read, total)))
    assert heard[-1] == (len(made.completions), len(made.completions))


def test_long_completions_are_read_fewer_at_a_time(made: ExportedJob) -> None:
    known = replace(made.store.progress(JOB), completions=100)
    assert _page_rows(replace(known, completions=0, completion_tokens=0)) == BATCH_ROWS
    assert _page_rows(replace(known, completion_tokens=100 * 64)) == BATCH_ROWS
    assert _page_rows(replace(known, completion_tokens=100 * 8192)) == 32
    assert _page_rows(replace(known, completion_tokens=100 * 10**7)) == 1


def test_batches_end_by_rows_or_tokens() -> None:
    def of(tokens: int) -> CompletionRecord:
        record = traced(random.Random(0), 0)[0]
        return replace(record, token_ids=(1,) * tokens)

    batches = list(in_batches(map(of, [1, 1, 1, 50, 9, 9, 1]), rows=3, tokens=10))
    assert [[len(r.token_ids) for r in batch] for batch in batches] == [
        [1, 1, 1],
        [50],
        [9, 9],
        [1],
    ]
    assert list(in_batches(iter(()))) == []


def peaks(folder: Path, kind: ExportKind, completions: int) -> list[int]:
    done = subprocess.run(
        [
            sys.executable, Path(__file__).with_name("exporting_memory.py"),
            folder, kind, str(completions),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT / '.typing'}:{ROOT / 'tests'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.pipeline  # starts processes
@pytest.mark.parametrize("kind", [ExportKind.TOKENS, ExportKind.CORRECTIONS])
def test_four_times_the_completions_take_no_more_memory(tmp_path: Path, kind: ExportKind) -> None:
    # All of the larger job's completions would take some 120 MiB more.
    small, large = peaks(tmp_path, kind, 32_000)
    assert large - small < 40


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in ExportKind if kind is not ExportKind.TIME])
def test_memory_stays_where_it_is_over_a_million_completions(
    tmp_path: Path, kind: ExportKind
) -> None:
    small, large = peaks(tmp_path, kind, 1_000_000)
    assert large - small < 64


def test_rows_of_groups_that_failed_and_quarantined_ones_are_not_there(export: Export) -> None:
    _, rows = export("completions")
    missing = set(range(ROWS)) - {row["row_index"] for row in rows}
    assert missing == {3, 15, *range(18, 24)}
