"""What a store keeps of output parts that are written while their job runs."""

from __future__ import annotations

from typing import Protocol

from specbatch.schemas.records import Lease, Prompts
from specbatch.schemas.staging import PartClaim, PartPlace, StagedPart
from specbatch.schemas.usage import UsageMeter


class Staging(Protocol):
    """Claims and notes of staged parts. They are gone once the job has ended."""

    def first_unrecorded(self, job_id: str) -> tuple[Prompts | None, int]:
        """The first group by rows that is not recorded, failed ones too; None if all rows before
        the second value are recorded or quarantined."""

    def next_part(self, job_id: str) -> PartPlace | None:
        """The place of the first part that is not noted; None unless the job is at INGEST or RUN,
        if another worker writes that part, or if it was claimed `max_attempts` times."""

    def rows_between(self, job_id: str, first: int, before: int, most: int) -> int:
        """How many completions and quarantined rows input rows have from `first` to before
        `before`; counts no further than `most`."""

    def claim_part(self, job_id: str, place: PartPlace, lease_sec: float) -> PartClaim | None:
        """Claim the next part; None unless it is still this one and nobody writes it. A part that
        was claimed `max_attempts` times is left to the publication."""

    def extend_part(self, claim: PartClaim, lease_sec: float) -> None:
        """Keep a claimed part. Raises `FencedError` for a lost claim, and once the job is being
        published."""

    def note_part(
        self,
        claim: PartClaim,
        part: StagedPart,
        by: Lease | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """The part's file is in place. `by`: the attempt that wrote it beside its results, which
        are kept, and what it used by now. Raises what `extend_part` raises."""

    def staged_parts(self, job_id: str) -> list[StagedPart]:
        """The noted parts, by number, without gaps."""
