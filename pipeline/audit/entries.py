"""Entries of the audit log: the payload of each kind. Pure functions, without SQL or clock.

Payloads hold only digests of prompts and outputs, because the log outlives what is purged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from types import MappingProxyType, SimpleNamespace
from typing import Any

import orjson

from specbatch.pipeline.audit.digests import (
    canonical_json,
    chained,
    completion_digest,
    entry_hash,
    rejected_digest,
)
from specbatch.schemas.audit import EMPTY, EntryKind, Head, LogEntry, PublishedManifest
from specbatch.schemas.policies import Ruling
from specbatch.schemas.records import CompletionRecord, NewGroup, RejectedRow

# Columns of a job's row that say what it is. Other entries record later changes of some.
PINNED = (
    *("name", "tenant", "spec", "spec_digest", "verifier", "proposer", "output_uri"),
    *("workspace_uri", "idempotency_key", "created_at", "priority", "deadline_at", "budget_usd"),
)

NOTHING: Mapping[str, Any] = MappingProxyType({})


def follow(
    head: Head, job_id: str, kind: EntryKind, at: float, actor: str, payload: Mapping[str, Any]
) -> LogEntry:
    """The entry after `head`."""
    number, said = head.number + 1, canonical_json(payload)
    hashed = entry_hash(job_id, number, kind.value, at, actor, said, head.hash)
    return LogEntry(job_id, number, kind.value, at, actor, said, head.hash, hashed)


def values(entry: LogEntry) -> dict[str, Any]:
    return asdict(entry)


# --- payloads -------------------------------------------------------------------------------


def submitted(job: Mapping[str, Any], at: float, actor: str) -> LogEntry:
    """The first entry of the job with these columns."""
    row = SimpleNamespace(**job)
    return follow(EMPTY, row.job_id, EntryKind.SUBMITTED, at, actor, pinned(row))


def pinned(row: Any) -> dict[str, Any]:
    """The pinned columns of a job's row, as its database returns them."""
    said: dict[str, Any] = orjson.loads(
        orjson.dumps({name: getattr(row, name) for name in PINNED}, option=orjson.OPT_NON_STR_KEYS)
    )
    return said


def planned(groups: Sequence[NewGroup], rejected: Sequence[RejectedRow]) -> dict[str, Any]:
    return {
        "groups": [[group.index, group.rows, group.prompts.sha256] for group in groups],
        "rejected": [[row.row_index, row.code, rejected_digest(row)] for row in rejected],
    }


def read(rows_total: int, models: Mapping[str, Any]) -> dict[str, Any]:
    return {"rows_total": rows_total, "models": dict(models)}


def completed(
    index: int, generation: int, records: Iterable[tuple[CompletionRecord, bytes]]
) -> dict[str, Any]:
    """The completions of a group, or of its kept part, by (row, sample) with their digests."""
    records = list(records)
    keyed = sorted((r.row_index, r.sample_index, chained(digest)) for r, digest in records)
    said = {"index": index, "generation": generation, "completions": keyed}
    policies = ruled(record for record, _ in records)
    return said | ({"policies": policies} if policies else {})


def ruled(records: Iterable[CompletionRecord]) -> list[dict[str, Any]]:
    """By policy and version: how often it was asked, the seconds that this took, and what it did
    not allow, as [row, sample, ruling, code]."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for one in record.rulings:
            named = {"policy": one.policy, "version": one.version}
            of = found.setdefault(
                (one.policy, one.version), {**named, "asked": 0, "sec": 0.0, "not_allowed": []}
            )
            of["asked"] += 1
            of["sec"] += one.sec
            verdict = one.verdict
            if verdict.ruling is not Ruling.ALLOW:
                place = (record.row_index, record.sample_index)
                of["not_allowed"].append([*place, verdict.ruling.value, verdict.code])
    return list(found.values())


def digested(records: Sequence[CompletionRecord]) -> list[tuple[CompletionRecord, bytes]]:
    return [(record, completion_digest(record)) for record in records]


def lost(index: int, rows: int, error: str | None) -> dict[str, Any]:
    return {"index": index, "rows": rows, "error_sha256": sha256_of(error)}


def retried(
    quarantined: bool,
    units: int,
    deadline_at: float | None,
    budget_usd: float | None,
    moved: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """The job's limits from now on, and what was pinned anew."""
    limits = {"deadline_at": deadline_at, "budget_usd": budget_usd}
    return {"quarantined": quarantined, "units": units, **limits, **moved}


def ended(
    state: str,
    error: str | None,
    manifest: PublishedManifest | None = None,
    accounts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`accounts`: the result of `accounts.pinned` for a published job."""
    written = None if manifest is None else asdict(manifest)
    said = {"state": state, "error_sha256": sha256_of(error), "manifest": written}
    return said if accounts is None else said | {"accounts": dict(accounts)}


def sha256_of(words: str | None) -> str | None:
    """The digest of words that may quote texts which are purged later."""
    return None if words is None else sha256(words.encode("utf-8", "surrogatepass")).hexdigest()
