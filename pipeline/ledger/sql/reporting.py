"""The part of `SqlStore` that reports and `top` read."""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.pipeline.ledger.sql import backlog, figures
from specbatch.pipeline.ledger.sql.transactions import Transactions
from specbatch.schemas.backlog import Backlog
from specbatch.schemas.job_figures import GroupFigures, RowFigures


class ReportingInSql:
    """Each method only reads."""

    _db: Transactions

    def backlog(self) -> Backlog:
        now = self._db.now()
        return self._db.read(lambda conn: backlog.backlog(conn, now))

    def group_figures(self, job_id: str) -> Iterator[GroupFigures]:
        return figures.of_groups(self._db, job_id)

    def row_figures(self, job_id: str, batch: int = 1000) -> Iterator[RowFigures]:
        return figures.of_rows(self._db, job_id, batch)
