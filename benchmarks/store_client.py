"""`python -m specbatch.benchmarks.store_client URL JOB NUMBER COUNT`: what stages ask of the store.

Claims, advances, claims again and commits groups of one job, with nothing in between. Says when it
has done the first one, waits for a line, and prints when it began and ended with the others and
what it computed.
"""

from __future__ import annotations

import json
import sys
import time

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    Stage,
    StageTiming,
)

VERIFIER = "verifier"
ROWS = 64
TOKENS = 64
LEASE_SEC = 60.0
NO_TIME = StageTiming(0.0)
RESULTS = Artefact("file:///results.arrow", "0" * 64, 1)


def main() -> None:
    url, job_id, number, count = sys.argv[1:]
    store = open_store(url, migrate=False)
    verifier, owner = f"{VERIFIER}-of-{job_id}", f"client-{job_id}-{number}"
    do_group(store, verifier, owner)  # connects, and has every statement compiled
    print("ready", flush=True)
    sys.stdin.readline()
    begun, computed = time.time(), time.process_time()
    for _ in range(int(count) - 1):
        do_group(store, verifier, owner)
    result = {"begun": begun, "ended": time.time(), "cpu_sec": time.process_time() - computed}
    store.close()
    print(json.dumps(result | {"groups": int(count) - 1}))


def do_group(store: Store, verifier: str, owner: str) -> None:
    """All that the store hears of a group after it was planned."""
    while (work := store.claim_next(Stage.VERIFY, verifier, owner, LEASE_SEC)) is None:
        pass  # others were about to take those that were looked at: some are left for each client
    job_id, index = work.lease.job_id, work.lease.group_index
    assert index is not None, "it is a group"
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    work = store.claim_group(job_id, index, Stage.RECORD, owner, LEASE_SEC)
    assert work is not None, "nobody else claims it"
    rows = range(index * ROWS, index * ROWS + ROWS)
    store.commit_group(work.lease, [_completion(row) for row in rows], NO_TIME, {"groups": 1})


def _completion(row: int) -> CompletionRecord:
    return CompletionRecord(
        row_index=row,
        sample_index=0,
        row_id=f"row-{row}",
        tag=None,
        seed=row,
        prompt_tokens=64,
        token_ids=tuple(range(TOKENS)),
        text="text " * TOKENS,
        finish_reason=FinishReason.LENGTH,
        origins=(0,) * TOKENS,
        logprobs=(-0.5,) * TOKENS,
        proposed=0,
        accepted=0,
        verifier_passes=TOKENS,
        cost_usd=0.0,
        verifier="verifier",
        proposer=None,
    )


if __name__ == "__main__":
    main()
