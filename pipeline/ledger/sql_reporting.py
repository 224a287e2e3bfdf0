"""The part of `SqlStore` that reports and `top` read."""

from __future__ import annotations

from specbatch.pipeline.ledger import backlog
from specbatch.pipeline.ledger.transactions import Transactions
from specbatch.schemas.backlog import Backlog


class ReportingInSql:
    """Each method is one transaction that reads."""

    _db: Transactions

    def backlog(self) -> Backlog:
        now = self._db.now()
        return self._db.read(lambda conn: backlog.backlog(conn, now))
