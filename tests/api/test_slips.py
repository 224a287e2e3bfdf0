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
CALL = """
import json, os, sys
library = sys.argv[1]
if library == "pandas":
    import pandas; frame = pandas.DataFrame({"prompt": ["a"]})
elif library == "polars":
    import polars; frame = polars.DataFrame({"prompt": ["a"]})
elif library == "pyarrow":
    import pyarrow; frame = pyarrow.table({"prompt": ["a"]})
else:
    frame = library
import specbatch
before = set(sys.modules)
for arguments in json.loads(sys.argv[2]):
    if os.fork():  # each slip is the first of its process
        _, status = os.wait()
        assert status == 0, arguments
        continue
    try:
        specbatch.run(frame, **arguments)
    except specbatch.SpecbatchError as error:
        kind = type(error).__name__
        assert getattr(specbatch, kind) is type(error)
        said = str(error)
    print(json.dumps([kind, said, sorted(set(sys.modules) - before)]), flush=True)
    os._exit(0)
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


def slips(folder: Path, data: str, *wrong: dict[str, object]) -> list[tuple[str, str, set[str]]]:
    """Of each: the error's class and words, and what was imported to find it."""
    given = json.dumps([{"model": "owner/model", **arguments} for arguments in wrong])
    done = subprocess.run(
        [sys.executable, "-c", CALL, data, given],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(kind, said, set(modules)) for kind, said, modules in found]


def test_a_slip_with_a_frame_is_told_at_once(tmp_path: Path) -> None:
    told = slips(tmp_path, "pandas", *(arguments for arguments, _, _ in WRONG.values()))
    for name, (found, said, modules) in zip(WRONG, told, strict=True):
        _, kind, words = WRONG[name]
        assert found == kind, name
        assert words in said.replace(f"{tmp_path}/", "./"), name
        assert "\n" not in said, name
        assert not SLOW & modules, name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_other_library_of_frames_is_imported(tmp_path: Path, library: str) -> None:
    [(_, _, modules)] = slips(tmp_path, library, {"prompt_column": "p"})
    assert not {*LIBRARIES, "numpy"} & modules


@pytest.mark.parametrize(
    ("data", "arguments", "kind", "words"),
    [
        ("nope.parquet", {"output": "out"}, "InputError", "nope.parquet does not exist"),
        ("lines.jsonl", {}, "SpecError", "output= is missing"),
        ("lines.jsonl", {"output": "o", "prompt_column": "p"}, "InputError", "no field `p`"),
        ("lines.jsonl", {"output": "o", "model": "."}, "ModelError", "has no config.json"),
    ],
)
def test_a_slip_with_a_path_is_told_at_once(
    tmp_path: Path, data: str, arguments: dict[str, object], kind: str, words: str
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a"}\n')
    [(found, said, modules)] = slips(tmp_path, data, arguments)
    assert (found, words in said) == (kind, True), said
    assert not SLOW & modules
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]
