"""Opens an input of a test as a job would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ingest.making import make_spec

from specbatch.pipeline.inputs.contract import RawRow, Source
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError
from specbatch.schemas.records import SourcePosition


def opened(
    uri: str | Path,
    objects: Objects | None = None,
    memory_bytes: int = 768 << 20,
    **values: Any,
) -> Source:
    return open_source(make_spec(uri, input=values).input, objects or Objects(), memory_bytes)


def rows(source: Source, start: SourcePosition | None = None) -> list[RawRow]:
    return [row for batch in source.read(start) for row in batch.rows]


def refusal(uri: str | Path, **values: Any) -> str:
    """The message with which opening and checking an input ends."""
    with pytest.raises(InputError) as caught:
        opened(uri, **values).check()
    return str(caught.value)
