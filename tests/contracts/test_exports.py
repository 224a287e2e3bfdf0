"""A job is exported to the same bytes from either database."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger.builders import JOB, Clock

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.export import Exporter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.exports import ExportKind, ExportOrder, WrittenFile
from support.databases import sqlite_store
from support.exported import exported_job


def exported(store: Store, folder: Path) -> dict[ExportKind, tuple[WrittenFile, ...]]:
    exporter = Exporter(store, Objects(), Objects())
    orders = [ExportOrder(kind, str(folder / kind)) for kind in ExportKind]
    return {order.kind: exporter.export(JOB, order).files for order in orders}


@pytest.fixture
def expected(clock: Clock, tmp_path: Path) -> dict[ExportKind, tuple[WrittenFile, ...]]:
    """From SQLite, of another run of the same job."""
    made = exported_job(sqlite_store(clock), tmp_path / "work")
    return exported(made.store, tmp_path / "expected")


def test_both_databases_give_the_same_files(
    store: Store, tmp_path: Path, expected: dict[ExportKind, tuple[WrittenFile, ...]]
) -> None:
    made = exported_job(store, tmp_path / "work")
    files = exported(made.store, tmp_path / "exported")
    assert files == expected
    assert all(file.rows for kind in files for file in files[kind])
