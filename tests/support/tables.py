"""Delta and Iceberg tables in a test's folder, as their own libraries write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

CATALOG = "nights"  # of Iceberg


def delta(folder: Path, *commits: list[dict[str, Any]], **more: Any) -> Path:
    """A Delta table with a commit of each list of rows."""
    for rows in commits:
        write_deltalake(folder, pa.Table.from_pylist(rows), mode="append", **more)
    return folder


def prompts(*ids: str) -> list[dict[str, Any]]:
    return [{"id": one, "prompt": f"say {one}"} for one in ids]


def rows_of(folder: Path, version: int | None = None) -> list[dict[str, Any]]:
    """The rows of a Delta table, as its library reads them."""
    found: list[dict[str, Any]] = DeltaTable(folder, version=version).to_pyarrow_table().to_pylist()
    return found


def iceberg_catalog(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A catalog in SQLite, which pyiceberg's own configuration names."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.utils.config import Config

    folder.mkdir(parents=True, exist_ok=True)
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it reads them when imported
    catalog = load_catalog(CATALOG, **properties(folder))
    catalog.create_namespace_if_not_exists("lake")
    return catalog


def properties(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def environment(folder: Path) -> dict[str, str]:
    """The same for processes."""
    prefix = f"PYICEBERG_CATALOG__{CATALOG.upper()}__"
    return {f"{prefix}{name.upper()}": value for name, value in properties(folder).items()}


def iceberg(catalog: Any, name: str, *commits: list[dict[str, Any]]) -> str:
    """An Iceberg table with a snapshot of each list of rows; how a spec names it."""
    for rows in commits:
        data = pa.Table.from_pylist(rows)
        catalog.create_table_if_not_exists(f"lake.{name}", schema=data.schema).append(data)
    return f"iceberg://{CATALOG}/lake.{name}"
