"""The audit log of a job: entries that each carry the hash of the one before.

An entry is added inside the transaction that it tells of, while that holds the job's row; so a job's
entries are numbered one after another, and what was not committed is not logged. The job's row keeps
the number and the hash of the last one: else nobody could tell that the last ones are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from specbatch.pipeline.ledger.transactions import Now
from specbatch.schemas.audit import EntryKind


def append(
    conn: Connection,
    now: Now,
    job_id: str,
    kind: EntryKind,
    actor: str | None,
    payload: Mapping[str, Any],
) -> None:
    """Add an entry to a job's log. The caller holds the job's row (`jobs.lock`).

    `actor` is who did it; None: whoever this store works for. `payload` is plain JSON.
    """
    raise NotImplementedError
