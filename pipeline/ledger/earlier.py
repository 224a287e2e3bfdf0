"""What a store gives a job of earlier jobs' outputs: texts to draft from, and answers to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from specbatch.schemas.placement import ANYWHERE, PlacementSpec
from specbatch.schemas.records import Answered
from specbatch.schemas.speculation import PastOutput


class Earlier(Protocol):
    """Outputs of a tenant's earlier jobs, where their rows may be."""

    def past_outputs(
        self,
        tenant: str,
        job_name: str,
        vocabulary: str,
        max_tokens: int,
        except_job: str,
        placement: PlacementSpec = ANYWHERE,
    ) -> Iterator[PastOutput]:
        """Finished completions of this tenant's other jobs, streamed; never another tenant's.

        Only jobs whose report has this `VOCABULARY` count. Jobs of the same name come first, of
        these and of the others the newest, each by (row, sample). The stream ends before its token
        ids exceed `max_tokens`. `except_job` is the job that asks. Outputs whose tokens were not
        all kept are skipped, and jobs whose rows may not be wherever `placement` goes.
        """

    def offer_answers(self, job_id: str, requests: Mapping[bytes, tuple[int, int]]) -> None:
        """Keep which (row, sample) of a job, unless it was purged, answered which request."""

    def answered(
        self, tenant: str, requests: Sequence[bytes], placement: PlacementSpec = ANYWHERE
    ) -> dict[bytes, Answered]:
        """Completions of this tenant that answered these requests, where their texts are whole and
        may be wherever `placement` goes."""
