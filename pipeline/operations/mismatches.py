"""Which draft tokens the verifier refused most, across the jobs of a tenant, and on which rows.

A token is one of a vocabulary, so its count is for one verifier. Of purged jobs nothing is counted.
Jobs that keep no texts have no tokens either, and digests for tags; masked tokens are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.export import in_batches
from specbatch.pipeline.operations.nightly_audit import ended_within
from specbatch.pipeline.outputs.export_columns import MASKED
from specbatch.pipeline.outputs.token_table import token_table
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.records import CompletionRecord, JobRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RefusedToken:
    """`text` is None where the verifier's tokenizer is not here."""

    verifier: str
    token_id: int
    text: str | None
    count: int
    share: float  # of all refusals


@dataclass(frozen=True, slots=True)
class RefusedTag:
    """Rows with one tag; a language is one. None: rows without."""

    tag: str | None
    refused: int  # drafts that the verifier broke off
    proposed: int  # draft tokens
    share: float  # of all refusals

    @property
    def per_proposed(self) -> float:
        return self.refused / self.proposed if self.proposed else 0.0


@dataclass(frozen=True, slots=True)
class Mismatches:
    """The most refused first."""

    jobs: int
    without_texts: int  # jobs
    refused: int
    proposed: int
    accepted: int
    tokens: Sequence[RefusedToken]
    tags: Sequence[RefusedTag]

    @property
    def sentence(self) -> str:
        jobs = f"{self.jobs:,} job{'s' if self.jobs != 1 else ''}"
        if not self.refused:
            return f"no draft was refused in {jobs}"
        untested = self.proposed - self.accepted - self.refused
        return (
            f"of {self.proposed:,} tokens proposed in {jobs} {self.accepted:,} were accepted, "
            f"{self.refused:,} refused, and {untested:,} behind those not tested"
        )


@dataclass(slots=True)
class _Counts:
    jobs: int = 0
    without_texts: int = 0
    accepted: int = 0
    tokens: Counter[tuple[str, int]] = field(default_factory=Counter)  # by verifier and id
    tags: Counter[str | None] = field(default_factory=Counter)
    proposed: Counter[str | None] = field(default_factory=Counter)

    def add(self, job: JobRow, batches: Iterable[Sequence[CompletionRecord]]) -> None:
        self.jobs += 1
        self.without_texts += not job.privacy.is_full
        for records in batches:
            table = token_table([record for record in records if record.provenance.steps])
            traced = [record for record in records if record.provenance.steps]
            refused = np.bincount(table.completion[table.is_rejection], minlength=len(traced))
            for record, count in zip(traced, refused, strict=True):
                self.tags[record.tag] += int(count)
                self.proposed[record.tag] += record.proposed
                self.accepted += record.accepted
            ids, counts = np.unique(table.rejected[table.is_rejection], return_counts=True)
            for token_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                if token_id != MASKED:
                    self.tokens[job.verifier, token_id] += count


Decode = Callable[[str, int], str | None]  # verifier and token id


def mismatches(store: Store, tenant: str, days: float, top: int) -> Mismatches:
    """Of the tenant's jobs that ended in the last `days`."""
    counts = _Counts()
    for job in ended_within(store, days * DAY_SEC, tenant):
        if job.purged_at is None:
            counts.add(job, in_batches(store.completions(job.job_id)))
    return _ranked(counts, top, _decoder())


def _ranked(counts: _Counts, top: int, decode: Decode) -> Mismatches:
    refused = counts.tags.total()

    def share(count: int) -> float:
        return count / refused if refused else 0.0

    tokens = [
        RefusedToken(verifier, token_id, decode(verifier, token_id), count, share(count))
        for (verifier, token_id), count in _most(counts.tokens, top)
    ]
    tags = [
        RefusedTag(tag, count, counts.proposed[tag], share(count))
        for tag, count in _most(counts.tags, top)
    ]
    proposed = counts.proposed.total()
    jobs = (counts.jobs, counts.without_texts)
    return Mismatches(*jobs, refused, proposed, counts.accepted, tokens, tags)


def _most(counts: Counter[T], top: int) -> list[tuple[T, int]]:
    """The largest, equal ones in one order everywhere."""
    found = [(key, count) for key, count in counts.items() if count]
    return sorted(found, key=lambda one: (-one[1], str(one[0])))[:top]


def _decoder() -> Decode:
    """Loads each verifier's tokenizer once."""
    known: dict[str, TextTokenizer | None] = {}

    def decode(verifier: str, token_id: int) -> str | None:
        if verifier not in known:
            try:
                known[verifier] = TextTokenizer.load(verifier)
            except SpecbatchError:
                known[verifier] = None
        tokenizer = known[verifier]
        return None if tokenizer is None else tokenizer.shown([token_id])

    return decode
