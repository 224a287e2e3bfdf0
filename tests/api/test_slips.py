"""A slip is one sentence of a public error, before anything slow is imported or stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from api.conftest import LIBRARIES

pytestmark = pytest.mark.pipeline  # starts processes

SLOW = {"torch", "transformers", "tokenizers", "safetensors", "celery"}
FRAMES = {*LIBRARIES, "numpy"}  # those that are not asked for
CALL = """
import json, sys
if sys.argv[1] == "pandas":
    import pandas; frame = pandas.DataFrame({"prompt": ["a"]})
elif sys.argv[1] == "polars":
    import polars; frame = polars.DataFrame({"prompt": ["a"]})
elif sys.argv[1] == "pyarrow":
    import pyarrow; frame = pyarrow.table({"prompt": ["a"]})
import specbatch
before = set(sys.modules)
for data, arguments in json.loads(sys.argv[2]):
    try:
        specbatch.run(data or frame, **arguments)
    except specbatch.SpecbatchError as error:
        kind = type(error).__name__
        assert getattr(specbatch, kind) is type(error)
        said = str(error)
    print(json.dumps([kind, said, sorted(set(sys.modules) - before)]), flush=True)
"""
WRONG = {
    "column": ({"prompt_column": "p"}, "InputError", "no column `p`; its columns are prompt"),
    "format": ({"format": "csw"}, "SpecError", "field `input.format`: must be 'auto',"),
    "file format": ({"format": "jsonl"}, "SpecError", "format jsonl is for files"),
    "model": ({"model": "./nowhere"}, "ModelError", "`./nowhere` does not exist"),
    "no model": ({"model": None}, "SpecError", "give model="),
    "draft model": ({"draft_model": "./nope"}, "ModelError", "`./nope` does not exist"),
    "option": ({"max_token": 3}, "SpecError", "did you mean `max_tokens`?"),
    "value": ({"temperature": -1}, "SpecError", "field `sampling.temperature`: must be at least 0"),
    "kept": ({"keep_columns": "all"}, "SpecError", "keep_columns is for jobs with output="),
    "setting": ({"settings": {"workspce": "x"}}, "UsageError", "did you mean `workspace`?"),
}


PATHS = [
    ("nope.parquet", {"output": "out"}, "InputError", "nope.parquet does not exist"),
    ("lines.jsonl", {}, "SpecError", "output= is missing"),
    ("lines.jsonl", {"output": "o", "prompt_column": "p"}, "InputError", "no field `p`"),
    ("lines.jsonl", {"output": "o", "model": "."}, "ModelError", "has no config.json"),
]


def slips(
    folder: Path, library: str, *wrong: tuple[str | None, dict[str, object]]
) -> list[tuple[str, str, set[str]]]:
    """Of each (file, or None: a frame; arguments): the error's class and words, and what it and
    those before it imported."""
    given = json.dumps([(data, {"model": "owner/model", **more}) for data, more in wrong])
    done = subprocess.run(
        [sys.executable, "-c", CALL, library, given],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(kind, said, set(modules)) for kind, said, modules in found]


def test_a_slip_with_a_frame_is_told_at_once(tmp_path: Path) -> None:
    told = slips(tmp_path, "pandas", *((None, arguments) for arguments, _, _ in WRONG.values()))
    for name, (found, said, modules) in zip(WRONG, told, strict=True):
        _, kind, words = WRONG[name]
        assert found == kind, name
        assert words in said.replace(f"{tmp_path}/", "./"), name
        assert "\n" not in said, name
        assert not SLOW & modules, name
        assert not FRAMES & modules, name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_no_other_library_of_frames_is_imported(tmp_path: Path, library: str) -> None:
    [(_, _, modules)] = slips(tmp_path, library, (None, {"prompt_column": "p"}))
    assert not FRAMES & modules


def test_a_slip_with_a_path_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a"}\n')
    told = slips(tmp_path, "none", *((data, arguments) for data, arguments, _, _ in PATHS))
    for (_, _, kind, words), (found, said, modules) in zip(PATHS, told, strict=True):
        assert (found, words in said) == (kind, True), said
        assert not SLOW & modules
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]
