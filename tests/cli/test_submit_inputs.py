"""`submit-job --local` over inputs of every kind: the same rows, the same completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from datasets import Dataset

from support.web_stores import WebStore, serving, web


def write_csv(folder: Path, table: pa.Table) -> str:
    pa.csv.write_csv(table, folder / "rows.csv")
    return "rows.csv"


def write_tsv(folder: Path, table: pa.Table) -> str:
    options = pa.csv.WriteOptions(delimiter="\t")
    with pa.CompressedOutputStream(str(folder / "rows.tsv.gz"), "gzip") as file:
        pa.csv.write_csv(table, file, options)
    return "rows.tsv.gz"


def write_arrow(folder: Path, table: pa.Table) -> str:
    (folder / "in").mkdir()
    for number, kind in enumerate((pa.ipc.new_file, pa.ipc.new_stream)):
        with kind(str(folder / "in" / f"{number}.arrow"), table.schema) as writer:
            writer.write_table(table.slice(6 * number, 6), max_chunksize=4)
    return "in"


def write_dataset(folder: Path, table: pa.Table) -> str:
    Dataset(table).save_to_disk(folder / "saved", num_shards=3)
    return "saved"


WRITERS: dict[str, Callable[[Path, pa.Table], str]] = {
    "csv": write_csv, "tsv": write_tsv, "arrow": write_arrow, "dataset": write_dataset,
}  # fmt: skip


def test_every_format_gives_the_completions_that_parquet_gives(
    cli: Any, job: Any, folder: Path
) -> None:
    table = pq.read_table(folder / "prompts.parquet")
    table = table.append_column("topic", pa.array([f"t{i}" for i in range(12)]))
    pq.write_table(table, folder / "prompts.parquet")
    flags = [*job, "--local", "--json", "--keep-columns", "topic"]
    assert cli("submit-job", *flags).code == 0
    expected = read(folder / "out")
    assert expected["topic"] == [f"t{i}" for i in range(12)]
    for name, write in WRITERS.items():
        done = cli("submit-job", *flags, "--input", write(folder, table), "--output", name)
        assert done.code == 0
        assert read(folder / name) == expected


def test_an_input_on_the_web_is_read_and_its_end_is_the_same(
    cli: Any, job: Any, folder: Path
) -> None:
    flags = [*job, "--local", "--json"]
    assert cli("submit-job", *flags).code == 0
    with serving(WebStore(ranges=False, tags="none"), web) as store:
        store.files["/prompts.parquet"] = (folder / "prompts.parquet").read_bytes()
        uri = f"{store.url}/prompts.parquet"
        assert cli("submit-job", *flags, "--input", uri, "--output", "other").code == 0
        store.token = "nobody has it"
        refused = cli("submit-job", *flags, "--input", uri, "--output", "third")
    assert refused.code == 2
    assert "the server denied access (403); put login and password" in refused.complaint
    assert read(folder / "other") == read(folder / "out")


def test_an_output_on_a_store_that_is_only_read_is_refused(cli: Any, job: Any) -> None:
    refused = cli("submit-job", *job, "--local", "--output", "gs://bucket/out")
    assert refused.code == 2
    assert "gs:// is for inputs alone: use a folder or s3://" in refused.complaint


def read(output: Path) -> dict[str, list[Any]]:
    """The output's columns that do not depend on the machine's speed."""
    table = pq.read_table(output / "data")
    names = [n for n in ("id", "text", "token_ids", "seed", "topic") if n in table.column_names]
    return {name: table[name].to_pylist() for name in names}
