"""What a job gave, to compare with another one's."""

from __future__ import annotations

from typing import Any

from specbatch.pipeline.ledger.contract import Store

Outcome = list[tuple[Any, ...]]


def outcome(store: Store, job_id: str) -> Outcome:
    """All of the completions that does not depend on how they came about, to the last bit."""
    return [
        (c.row_index, c.sample_index, c.seed, c.token_ids, c.logprobs, c.text, c.finish_reason)
        for c in store.completions(job_id)
    ]
