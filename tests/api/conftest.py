"""A working folder with a migrated database, and frames of the three libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from specbatch.schemas.settings import Settings
from support.databases import migrated

LIBRARIES = ("pandas", "polars", "pyarrow")
_MADE = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table}


def frame_of(library: str, columns: dict[str, Any]) -> Any:
    """A frame of a library with these columns."""
    return _MADE[library](columns)


def columns_of(frame: Any) -> dict[str, list[Any]]:
    """A frame's values, with None for every kind of null."""
    if isinstance(frame, pd.DataFrame):
        frame = pa.Table.from_pandas(frame, preserve_index=False)
    table = frame.to_arrow() if isinstance(frame, pl.DataFrame) else frame
    return dict(table.to_pydict())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose workspace has a database."""
    monkeypatch.chdir(tmp_path)
    migrated(tmp_path / "specbatch-data" / "specbatch.db")
    return tmp_path


def settings_of(folder: Path) -> Settings:
    """The settings of who works in the folder."""
    assert not [name for name in os.environ if name.startswith("SPECBATCH_DATABASE")]
    return Settings(workspace=str(folder / "specbatch-data"))
