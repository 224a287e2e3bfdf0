"""What a store must do for tenants' privacy. Part of the contract in `contract.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from specbatch.schemas.records import Artefact, JobRow, Prompts

MOST_JOBS = 10_000  # of one answer


class PrivacyStore(Protocol):
    """Where the whole of what a job gave lies, and the end of what the store keeps of its texts."""

    def recorded_groups(self, job_id: str) -> list[tuple[int, Prompts, Artefact | None]]:
        """(index, prompts, results) of groups with completions, in the order of their rows.

        Without results are those of which only a part was kept (`keep_part`).
        """
        ...

    def ended_jobs(
        self,
        age_sec: float,
        tenant: str | None = None,
        limit: int = MOST_JOBS,
        private_only: bool = False,
        after: JobRow | None = None,
    ) -> list[JobRow]:
        """Jobs that ended so long ago or longer and are not wholly purged, the oldest first.

        `private_only`: those whose texts are not kept. `after`: the last one of an earlier answer,
        to go on from there.
        """
        ...

    def purge(
        self, job_id: str, why: str, batch_rows: int = 1000, unfinished: bool = False
    ) -> Iterator[int]:
        """Empty what is kept of an ended job's texts; how many rows are done: first when the job is
        marked, then after each batch. A job that was wholly purged before gives nothing.

        Of completions that is the row's id, text, token ids, log-probabilities, rejected drafts and
        error; of quarantined rows the id and the reason; of the job its encrypted spec; errors of
        units. Tags, counts, origins, times, costs, digests and the audit log stay, which says first
        that it was done, and `why`. From then on the job cannot be retried. Each batch is a
        transaction: who is interrupted goes on where it was. `unfinished`: all rows are emptied,
        and the job stays among those that are due, as something else of it is still there.

        Raises `UsageError` for a job that has not ended.
        """
        ...
