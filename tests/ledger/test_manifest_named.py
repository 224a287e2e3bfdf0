"""A rewritten log must name the manifest of its publication."""

from __future__ import annotations

from contracts.shorthand import MANIFEST, commit, finish, ingest, verified
from ledger.audited import told
from ledger.builders import JOB

from specbatch.pipeline.audit.entries import ended, follow
from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.audit import EntryKind, PublishedManifest
from specbatch.schemas.records import JobState
from support.databases import sqlite_store


def done(manifest: PublishedManifest | None) -> Store:
    store = sqlite_store()
    ingest(store, groups=1)
    commit(store, verified(store, 0))
    finish(store, JobState.DONE, manifest)
    return store


def test_a_publication_has_a_manifest_beside_its_output() -> None:
    assert told(done(MANIFEST)) == []
    (nameless,) = told(done(None))
    assert nameless == (
        "its log says that it was published, and names no manifest: the log was rewritten"
    )
    (elsewhere,) = told(done(PublishedManifest("file:///else/manifest.json", MANIFEST.sha256)))
    assert "names a manifest file:///else/manifest.json, but its output is file:///out" in elsewhere


def test_a_job_that_failed_did_not_end_otherwise() -> None:
    store = done(MANIFEST)
    *log, _ = store.log(JOB)
    said = ended(JobState.DONE.value, None)
    forged = follow(log[-1].head, JOB, EntryKind.FAILED, 0.0, "eve", said)
    (found,) = LogFacts(JOB).follow([*log, forged], forged.head)
    assert "says nothing that specbatch would write" in found.what
