"""Writes a data set as vLLM's `speculators` reads it, whose trainer makes EAGLE-style heads.

A row of JSONL has `input_ids`, prompt and completion, and `loss_mask`, 1 where the token is the
verifier's: what its `prepare-data` takes as already rendered. Its own part gets the hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from specbatch.pipeline.learning.checkpoints import replace_file
from specbatch.pipeline.learning.datasets import DataSet, Example
from specbatch.schemas.errors import OutputError

TRAIN, HELD_OUT, ABOUT = "train.jsonl", "held-out.jsonl", "dataset.json"


def write(data: DataSet, out: Path) -> dict[str, Any]:
    """Write both parts and what they are; return that. Raises `OutputError`."""
    parts = {TRAIN: data.train, HELD_OUT: (*data.choosing, *data.judging)}
    about = {
        "data": data.digest,
        "verifier": data.verifier,
        "jobs": [job.job_id for job in data.jobs],
        "files": {name: len(examples) for name, examples in parts.items()},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, examples in parts.items():
            _put(out / name, b"".join(map(_row, examples)))
        _put(out / ABOUT, orjson.dumps(about, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise OutputError(f"no data set can be written to {out}: {error.strerror}") from None
    return about


def _row(one: Example) -> bytes:
    mask = [0] * one.prompt_tokens + [1] * one.completion_tokens
    row = {"input_ids": one.ids.tolist(), "loss_mask": mask}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _put(path: Path, data: bytes) -> None:
    replace_file(path, lambda file: file.write(data))
