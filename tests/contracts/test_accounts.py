"""What a publication pins of figures, device time and decisions, and what it cannot pin."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

import orjson
from contracts.shorthand import commit, finish, ingest, verified
from ledger.audited import audited, told
from ledger.builders import JOB
from sqlalchemy import Engine, event

from specbatch.pipeline.audit import accounts, entries
from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.operations.coverage import Extent
from specbatch.schemas.audit import EMPTY, EntryKind, LogEntry
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import Stage
from specbatch.schemas.speculation import Decision, DecisionAction
from specbatch.schemas.timekeeping import Attempt, Device, NewSession, SessionTime

SESSION = "s" * 32
DEVICE = Device("cpu", "here", "spot", 200_000)
LOST = Attempt(JOB, 0, 7, Stage.VERIFY)  # an attempt of which nothing was kept


def decision(reason: str) -> Decision:
    return Decision(time.time(), DecisionAction.OFF, "ngram", reason, 0.2, 0.5, 3)


def published(store: Store) -> None:
    """A job with a decision and an attempt that was lost, in a session that goes on."""
    ingest(store, groups=1)
    store.begin_session(NewSession(SESSION, "w1", DEVICE, 0))
    store.report_time(SessionTime(SESSION, 100), {LOST: Ticks(verify=10)})
    store.note_decisions(JOB, [decision("it does not pay")])
    commit(store, verified(store, 0), saved=0.5)
    finish(store)


def test_what_comes_after_a_publication_is_no_fault_and_is_not_covered(store: Store) -> None:
    published(store)
    store.report_time(SessionTime(SESSION, 200), {LOST: Ticks(verify=50)})
    store.note_decisions(JOB, [decision("it was tried again")])
    found = audited(store)
    assert found.findings == []
    counts = found.accounts
    assert (counts.groups, counts.decisions, counts.late_decisions) == (1, 1, 1)
    assert (counts.slices, counts.late_slices, counts.late_ticks) == (0, 1, 50)
    rows = {row.what: row for row in found.covered(0)}
    assert rows["device time of attempts"].extent is Extent.IN_PART
    assert "of attempts that were not kept are not" in rows["device time of attempts"].how
    assert "1 noted after the job was published are not" in rows["decisions about drafting"].how


def test_time_of_a_session_that_had_ended_is_pinned(store: Store) -> None:
    ingest(store, groups=1)
    store.begin_session(NewSession(SESSION, "w1", DEVICE, 0))
    store.end_session(SessionTime(SESSION, 100), {LOST: Ticks(verify=10)})
    commit(store, verified(store, 0))
    finish(store)
    found = audited(store)
    assert found.findings == []
    assert (found.accounts.slices, found.accounts.ticks) == (1, 10)


def test_a_session_that_ends_during_a_publication_is_no_fault(postgres_url: str) -> None:
    with closing(open_store(postgres_url)) as store, closing(open_store(postgres_url)) as other:
        ingest(store, groups=1)
        store.begin_session(NewSession(SESSION, "w1", DEVICE, 0))
        store.report_time(SessionTime(SESSION, 100), {LOST: Ticks(verify=10)})
        commit(store, verified(store, 0))
        ends = iter(
            [partial(other.end_session, SessionTime(SESSION, 100), {LOST: Ticks(verify=15)})]
        )

        def end(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            if "FROM time_slices" in statement and (end_session := next(ends, None)):
                end_session()

        event.listen(Engine, "after_cursor_execute", end)
        try:
            finish(store)
        finally:
            event.remove(Engine, "after_cursor_execute", end)
        assert next(ends, None) is None
        assert audited(store).findings == []


def test_all_stores_pin_the_same(store: Store) -> None:
    published(store)
    said = orjson.loads(list(store.log(JOB))[-1].payload)["accounts"]
    assert said == orjson.loads(orjson.dumps(accounts.pinned(store.accounts(JOB))))
    assert said["groups"]["sums"]["completions"] == 4.0
    assert said["decisions"]["ids"] in ([[1, 1]], [[2, 2]])


def test_a_job_from_before_is_audited_without_them(store: Store) -> None:
    published(store)
    assert told(store) == []
    log, older, head = list(store.log(JOB)), list[LogEntry](), EMPTY
    for entry in log:
        said = orjson.loads(entry.payload)
        said.pop("accounts", None)
        older.append(entries.follow(head, JOB, EntryKind(entry.kind), entry.at, entry.actor, said))
        head = older[-1].head
    facts = LogFacts(JOB)
    assert list(facts.follow(older, head)) == []
    assert (facts.published, facts.accounts) == (True, None)
    found = audited(store)
    found.facts = facts
    rows = {row.what: row for row in found.covered(0)}
    for name in ("figures of job and groups", "device time of attempts"):
        assert rows[name].extent is Extent.NOT
        assert rows[name].how == "the job is older than this part of the log"


def test_a_job_that_is_under_way_has_none(store: Store) -> None:
    ingest(store, groups=1)
    rows = {row.what: row for row in audited(store).covered(0)}
    assert rows["decisions about drafting"].how == "the job is not published yet"
    assert rows["output files"].how == "the job is not published yet"
