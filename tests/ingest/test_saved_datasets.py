"""Datasets that Hugging Face's library has saved: all of their rows, in order, and no cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from datasets import Dataset, DatasetDict
from ingest.making import make_spec

from specbatch.jobs.cli.checks import check_input_here
from specbatch.pipeline.inputs.kept import kept_schema
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError

ROWS = 25
CHATS = [[{"role": "user", "content": f"say {i}"}] for i in range(ROWS)]


def dataset() -> Dataset:
    return Dataset.from_dict(
        {"id": [f"r{i}" for i in range(ROWS)], "prompt": CHATS, "label": list(range(ROWS))}
    )


def rows(uri: Path, **values: Any) -> list[Any]:
    source = open_source(make_spec(uri, input=values).input, Objects())
    source.check()
    assert source.format == "arrow"
    return [(row.id, row.prompt) for batch in source.read() for row in batch.rows]


def refusal(uri: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_source(make_spec(uri).input, Objects())
    with pytest.raises(InputError) as again:
        check_input_here(make_spec(uri).input)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 4, 12])
def test_a_saved_dataset_is_read_in_order(tmp_path: Path, shards: int) -> None:
    dataset().save_to_disk(tmp_path / "d", num_shards=shards)
    assert rows(tmp_path / "d") == [(f"r{i}", CHATS[i]) for i in range(ROWS)]
    check_input_here(make_spec(tmp_path / "d").input)


def test_columns_of_a_saved_dataset_can_be_kept(tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "d", num_shards=3)
    source = open_source(make_spec(tmp_path / "d").input, Objects())
    schema = kept_schema(source, ("label",))
    assert [v for batch in source.kept_rows(schema) for v in batch["label"].to_pylist()] == list(
        range(ROWS)
    )


def test_a_selection_is_saved_as_its_rows(tmp_path: Path) -> None:
    dataset().select([5, 3, 20]).save_to_disk(tmp_path / "d")
    assert [row_id for row_id, _ in rows(tmp_path / "d")] == ["r5", "r3", "r20"]


def test_caches_in_the_folder_are_not_rows(tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "d")
    (data,) = (tmp_path / "d").glob("data-*.arrow")
    (tmp_path / "d" / "cache-1234.arrow").write_bytes(data.read_bytes())
    assert len(rows(tmp_path / "d")) == ROWS


def test_a_dictionary_of_splits_is_refused_and_names_them(tmp_path: Path) -> None:
    DatasetDict({"train": dataset(), "test": dataset()}).save_to_disk(tmp_path / "d")
    folder = tmp_path / "d"
    assert refusal(folder) == (
        f"input folder {folder} is a DatasetDict with the splits train, test; name one of them, "
        f"for example {folder}/train"
    )
    assert len(rows(folder / "test")) == ROWS


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DatasetDict({"train": dataset()}).save_to_disk(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert refusal(Path()) == (
        "input folder . is a DatasetDict with the splits train; name one of them, for example train"
    )


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    dataset().save_to_disk(folder, num_shards=3)
    (folder / "data-00001-of-00003.arrow").unlink()
    assert refusal(folder) == (
        f"{folder}/data-00001-of-00003.arrow is missing, and {folder}/state.json names it; "
        "save the dataset again"
    )
    for state, words in {
        b"{}": "names no data files; save the dataset again",
        b"[]": "is not JSON; save the dataset again",
        orjson.dumps({"_data_files": [{"filename": "../x.arrow"}]}): "../x.arrow is missing",
        orjson.dumps({"_data_files": []}): f"the dataset at {folder} has no files",
        orjson.dumps({"_data_files": [{"filename": "data-00000-of-00003.arrow"}] * 2}): (
            f"{folder}/state.json names data-00000-of-00003.arrow 2 times; save the dataset again"
        ),
    }.items():
        (folder / "state.json").write_bytes(state)
        assert words in refusal(folder)
