"""`specbatch results`: the first rows, from where they are; and what is not kept is said."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import JOB

from specbatch.jobs.cli import results as command
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.observe.terminal.plain_console import PlainConsole
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.settings import Settings
from support.exported import REFUSED, ExportedJob, exported_job
from support.workers import BIN

COMPLETIONS = 32  # of `exported_job`, and two rows that were refused


def in_store(folder: Path, has_ended: bool = True, **job: Any) -> ExportedJob:
    store = make_store(Settings())
    try:
        where = folder / "specbatch-data" / "jobs" / JOB
        return exported_job(store, where, has_ended, output_uri=str(folder / "out"), **job)
    finally:
        store.close()


def publish(folder: Path, kind: Any = "parquet", rows_per_part: int | None = None) -> None:
    store = make_store(Settings())
    try:
        writer = OutputWriter(Objects(), str(folder / "out"), JOB, rows_per_part, kind)
        writer.write(store.completions(JOB), store.rejected(JOB))
    finally:
        store.close()


def as_objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_output_is_read_part_by_part(cli: Any, folder: Path, kind: str) -> None:
    made = in_store(folder)
    publish(folder, kind, rows_per_part=5)
    done = cli("results", JOB, "--json", "--head", 100)
    assert (done.code, done.err) == (0, "")
    rows = as_objects(done.out)
    assert len(rows) == COMPLETIONS + len(REFUSED)
    found = [(row["row_index"], row["sample_index"]) for row in rows]
    assert found == sorted(found)
    texts = {(row["row_index"], row["sample_index"]): row["text"] for row in rows}
    assert all(texts[c.row_index, c.sample_index] == c.text for c in made.completions)
    assert [row["row_index"] for row in rows if row["error"]] == list(REFUSED)
    assert len(as_objects(cli("results", JOB[:9], "--json").out)) == 10


def test_what_is_printed_is_a_line_per_row(cli: Any, folder: Path) -> None:
    in_store(folder)
    publish(folder)
    head, *lines = cli("results", JOB, "--head", 8).out.splitlines()
    assert head.split() == ["id", "sample_index", "finish_reason", "text"]
    assert len(lines) == 8
    assert lines[0].startswith("row-0 ")
    refused = cli("results", JOB, "--failed").out.splitlines()
    assert len(refused) == 1 + len(REFUSED)
    assert all("null_prompt: it is null" in line for line in refused[1:])


def test_columns_are_chosen_by_name(cli: Any, folder: Path) -> None:
    in_store(folder)
    publish(folder)
    flags = ("--column", "row_index", "--column", "token_ids")
    rows = as_objects(cli("results", JOB, "--json", "--head", 2, *flags).out)
    assert [list(row) for row in rows] == [["row_index", "token_ids"]] * 2
    head, line = cli("results", JOB, "--head", 1, *flags).out.splitlines()
    assert head.split() == ["row_index", "token_ids"]
    assert json.loads(line.split()[1]) == rows[0]["token_ids"]
    refused = cli("results", JOB, "--column", "nope")
    assert refused.code == 2
    assert refused.complaint.startswith(f"there is no column `nope` in {folder / 'out/data'}: ")
    assert "finish_reason" in refused.complaint


def test_text_is_cut_to_the_width_of_a_terminal_and_nowhere_else(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(folder)
    publish(folder)
    whole = cli("results", JOB, "--column", "id", "--column", "token_ids", "--head", 30).out
    assert max(map(len, whole.splitlines())) > 40
    monkeypatch.setattr(command, "out", PlainConsole(width=40, force_terminal=True))
    cut = cli("results", JOB, "--column", "id", "--column", "token_ids", "--head", 30).out
    assert "…" in cut
    assert len(cut.splitlines()) == len(whole.splitlines())


def test_a_running_job_is_read_from_the_store(cli: Any, folder: Path) -> None:
    in_store(folder, has_ended=False)
    done = cli("results", JOB, "--json", "--head", 100)
    assert f"job {JOB} is running, " in done.err
    assert "rows are finished: they are read from the store" in done.err.replace("\n", " ")
    rows = as_objects(done.out)
    assert len(rows) == COMPLETIONS + len(REFUSED)
    refused = cli("results", JOB, "--column", "number").complaint
    assert "columns of the input are only in a published output" in refused


def test_the_store_has_a_column_of_scores_where_a_job_has_them(cli: Any, folder: Path) -> None:
    in_store(folder, has_ended=False, spec={"output": {"best_by": {"use": "ours"}}})
    rows = as_objects(cli("results", JOB, "--json", "--head", 100).out)
    assert len(rows) == COMPLETIONS + len(REFUSED)
    assert {list(row)[-1] for row in rows} == {"score"}


def test_an_output_that_is_gone_or_another_jobs_is_said(cli: Any, folder: Path) -> None:
    in_store(folder)
    done = cli("results", JOB)
    assert done.code == 0
    told = done.err.replace("\n", " ")
    assert f"the output of job {JOB} is no longer in {folder / 'out'}; rows are read" in told
    OutputWriter(Objects(), str(folder / "out"), "another").write([], [])
    told = cli("results", JOB).err.replace("\n", " ")
    assert f"{folder / 'out'} holds the output of job another now; rows are read" in told


def test_a_damaged_part_is_named(cli: Any, folder: Path) -> None:
    in_store(folder)
    publish(folder)
    part = folder / "out" / "data" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    part.write_bytes(data[:-9])
    assert f"{part} is {len(data) - 9:,} bytes long" in cli("results", JOB).complaint
    data[-20:] = bytes(20)
    part.write_bytes(data)
    damaged = cli("results", JOB)
    assert damaged.code == 4
    assert "part-00000.parquet of the output is damaged" in damaged.complaint


@pytest.mark.parametrize("mode", [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY])
def test_what_privacy_does_not_keep_is_said_and_the_output_is_complete(
    cli: Any, folder: Path, mode: PrivacyMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", "A" * 43 + "=")
    in_store(folder, privacy=mode)
    told = cli("results", JOB).err.replace("\n", " ")
    assert f"its privacy is {mode}" in told
    publish(folder)
    assert cli("results", JOB).err == ""


def test_a_purged_job_says_when_its_texts_went(cli: Any, folder: Path) -> None:
    in_store(folder)
    assert cli("purge", "--job", JOB).code == 0
    done = cli("results", JOB, "--json", "--head", 100)
    assert f"texts and token ids of job {JOB} are gone: it was purged on 20" in done.err.replace(
        "\n", " "
    )
    rows = [row for row in as_objects(done.out) if not row["error"]]
    assert len(rows) == COMPLETIONS
    assert {row["text"] for row in rows} == {None}
    assert all(row["finish_reason"] for row in rows)


@pytest.mark.pipeline  # starts processes
def test_a_reader_that_has_enough_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `specbatch results JOB --json | head -1`."""
    monkeypatch.setenv("SPECBATCH_STORE_MODE", "umask")
    in_store(folder)
    publish(folder)
    piped = f"{BIN / 'specbatch'} results {JOB} --json --head 1000 | head -c 10"
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {piped}"],
            cwd=folder, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (len(done.stdout), done.stderr) == (10, "")


def test_kept_columns_of_a_real_job_are_shown(cli: Any, job: list[object], tiny_pair: Any) -> None:
    assert tiny_pair
    ran = cli("submit-job", *job, "--local", "--keep-columns", "number", "--json")
    assert ran.code == 0
    rows = as_objects(cli("results", "latest", "--json", "--column", "number").out)
    assert rows == [{"number": number} for number in range(10)]
    shown = cli("results", ran.json["job"], "--head", 3).out.splitlines()
    assert [line.split()[0] for line in shown] == ["id", "row-0", "row-1", "row-2"]
