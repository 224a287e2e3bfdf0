"""Texts at rest: encrypted in the database, whole for who has the key, told of for who has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import RESULTS, claim, claim_job, finish, ingest, verified
from ledger.audited import Published
from ledger.builders import JOB, LEASE_SEC, NO_TIME, completion, new_group, new_job, position
from sqlalchemy import text

from specbatch.pipeline.ledger.sql import migrate
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import StoreError, UnknownKeyError, UsageError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import CompletionRecord, JobState, RejectedRow, Stage, StageTiming
from specbatch.schemas.tables import Base
from specbatch.schemas.text_columns import SHOWN_WITHOUT_KEY, EncryptedText
from support.databases import migrated

OLD, NEW = Cipher([bytes(32)]), Cipher([bytes(range(32)), bytes(32)])
SECRET = "Anna's text, with \0 and \x1a and \ud800"
Open = Callable[[Cipher | None], SqlStore]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return migrated(tmp_path / "s.db")
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def opened(url: str) -> Iterator[Open]:
    """`opened(cipher)`: a store on the one database."""
    stores: list[SqlStore] = []

    def open_it(cipher: Cipher | None) -> SqlStore:
        stores.append(migrate.open_store(url, cipher=cipher))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def raw(url: str, query: str) -> list[Any]:
    engine = make_engine(url)
    with engine.begin() as connection:
        result = connection.execute(text(query))
        rows = [tuple(row) for row in result] if result.returns_rows else []
    engine.dispose()
    return rows


def secret(row: int) -> CompletionRecord:
    return completion(row, text=SECRET, row_id=f"{row} {SECRET}", error=SECRET)


def record(store: SqlStore, index: int) -> None:
    rows = range(index * 4, index * 4 + 4)
    store.commit_group(verified(store, index), [secret(row) for row in rows], NO_TIME, {})


def test_texts_are_sealed_in_the_database_and_whole_with_the_key(url: str, opened: Open) -> None:
    store = opened(OLD)
    ingest(store)
    record(store, 0)
    assert [c.text for c in store.completions(JOB)] == [SECRET] * 4
    for values in raw(url, "SELECT text, row_id, error FROM completions"):
        assert not [value for value in values if "Anna" in value]
    texts = [value for (value,) in raw(url, "SELECT text FROM completions")]
    assert len(set(texts)) == 4, "equal texts do not look alike"
    assert [c.row_id for c in opened(NEW).completions(JOB)] == [f"{i} {SECRET}" for i in range(4)]


def test_without_the_key_one_sentence_says_so(opened: Open) -> None:
    store = opened(OLD)
    ingest(store)
    record(store, 0)
    store.release(store.claim_group(JOB, 1, Stage.VERIFY, "w", 60.0).lease, SECRET, whole=True)  # type: ignore[union-attr]  # it is free
    keyless = opened(None)
    with pytest.raises(UsageError, match=r"completions\.\w+ is encrypted: set SPECBATCH_ENCRYPT"):
        list(keyless.completions(JOB))
    store.request_cancel(JOB, SECRET)
    assert keyless.get_job(JOB).stop_reason == SHOWN_WITHOUT_KEY
    [(_, _, _, last_error)] = keyless.failed_groups(JOB)
    assert last_error == SHOWN_WITHOUT_KEY
    assert keyless.progress(JOB).completions == 4
    with pytest.raises(StoreError, match="missing from SPECBATCH_ENCRYPTION_KEY"):
        list(opened(Cipher([b"x" * 32])).completions(JOB))


def test_an_error_sealed_with_a_key_that_is_missing_here_holds_no_group_up(opened: Open) -> None:
    newer, older = opened(NEW), opened(OLD)
    ingest(newer, groups=1)
    newer.release(claim(newer, 0).lease, SECRET)
    work = older.claim_next(Stage.VERIFY, "big", "w", LEASE_SEC)
    assert work is not None
    older.release(work.lease, "once more")
    newer.request_cancel(JOB, SECRET)
    assert older.get_job(JOB).stop_reason == SHOWN_WITHOUT_KEY
    assert older.get_job(JOB).stage is Stage.PUBLISH


def test_a_group_with_such_an_error_is_closed(opened: Open) -> None:
    newer, older = opened(NEW), opened(OLD)
    ingest(newer, groups=1, rows=1)
    for _ in range(2):
        newer.release(claim(newer, 0).lease, SECRET)
    assert newer.claim_group(JOB, 0, Stage.VERIFY, "w", 0.0) is not None
    assert older.close_over() == 1
    [(_, _, _, last_error)] = older.failed_groups(JOB)
    assert SHOWN_WITHOUT_KEY in str(last_error)


def test_a_whole_spec_is_never_replaced_by_what_is_shown_of_it(opened: Open) -> None:
    opened(NEW).create_job(new_job(privacy=PrivacyMode.REDACTED, sealed_spec='{"stop": "Anna"}'))
    with pytest.raises(StoreError, match="missing from SPECBATCH_ENCRYPTION_KEY"):
        opened(OLD).get_job(JOB)


def test_what_was_written_before_there_was_a_key_stays_readable(url: str, opened: Open) -> None:
    ingest(opened(None))
    record(opened(None), 0)
    later = opened(NEW)
    record(later, 1)
    assert [c.text for c in later.completions(JOB)] == [SECRET] * 8
    sealed = [value.startswith("\x1aS1.") for (value,) in
              raw(url, "SELECT text FROM completions ORDER BY row_index")]  # fmt: skip
    assert sealed == [False] * 4 + [True] * 4


def test_a_cell_that_was_moved_is_noticed(url: str, opened: Open) -> None:
    store = opened(OLD)
    ingest(store)
    record(store, 0)
    raw(url, "UPDATE completions SET text = error WHERE row_index = 1")
    with pytest.raises(StoreError, match="copied from elsewhere"):
        list(store.completions(JOB))


def test_quarantined_rows_and_whole_specs_are_sealed(url: str, opened: Open) -> None:
    store = opened(OLD)
    order = new_job(privacy=PrivacyMode.REDACTED, sealed_spec='{"stop": "Anna"}')
    store.create_job(order)
    lease = claim_job(store, Stage.INGEST).lease
    bad = [RejectedRow(4, SECRET, "bad_id", SECRET), RejectedRow(5, None, "bad_id", SECRET)]
    store.add_groups(lease, [new_group(0)], bad, 6, position(6))
    store.finish_ingest(lease, 6, {})
    assert list(store.rejected(JOB)) == bad
    assert store.get_job(JOB).spec == {"stop": "Anna"}
    rows = raw(url, "SELECT row_id, reason, NULL FROM rejected_rows")
    rows += raw(url, "SELECT sealed_spec, last_error, error FROM jobs")
    assert not [value for row in rows for value in row if value is not None and "Anna" in value]
    assert opened(None).get_job(JOB).spec == order.spec, "what is shown of it"


def test_what_was_purged_is_in_no_byte_of_a_sqlite_file(tmp_path: Path) -> None:
    url, said = migrated(tmp_path / "s.db"), "said in confidence "
    store = migrate.open_store(url)
    ingest(store)
    for index in range(2):
        rows = range(index * 4, index * 4 + 4)
        records = [completion(row, text=said * 1000, row_id=said) for row in rows]
        store.commit_group(verified(store, index), records, NO_TIME, {})
    finish(store)
    store.close()
    assert said.encode() in (tmp_path / "s.db").read_bytes()
    store = migrate.open_store(url)
    list(store.purge(JOB, "asked for"))
    store.close()
    assert not [path for path in tmp_path.iterdir() if said.encode() in path.read_bytes()]


def test_every_text_column_is_bound_to_a_place_of_its_own() -> None:
    places = [
        (column.type.about, table.name, column.name)
        for table in Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, EncryptedText)
    ]
    about = [place for place, _, name in places if name != "last_error"]  # shared by both units
    assert len(set(about)) == len(about) > 7
    assert all(place == f"{table}.{name}" for place, table, name in places if name != "last_error")


def test_the_log_is_a_chain_over_sealed_texts_and_after_a_purge(opened: Open) -> None:
    from specbatch.pipeline.operations.audit import audit_chain

    store = opened(OLD)
    ingest(store)
    for index in range(2):
        record(store, index)
    finish(store, JobState.DONE)
    assert audit_chain(store, Published(), JOB).intact
    assert list(store.purge(JOB, "asked for", batch_rows=3)) == [0, 3, 6, 8]
    found = audit_chain(store, Published(), JOB)
    assert found.intact
    assert found.counts.purged == 8


def test_who_has_no_key_neither_replaces_the_reason_of_a_stop_nor_is_held_by_it(
    opened: Open,
) -> None:
    store, keyless = opened(OLD), opened(None)
    ingest(store, budget_usd=1.0)
    lease = claim(store, 0).lease
    assert store.cancelled_jobs({lease: 1.5}) == {JOB}
    reason = store.get_job(JOB).stop_reason
    keyless.request_cancel(JOB, "cancelled by an operator")
    assert store.get_job(JOB).stop_reason == reason
    store.advance(lease, Stage.RECORD, RESULTS, StageTiming(1.0, 1.5))
    store.cancel_group(claim(store, 0, Stage.RECORD).lease)
    finish(store, JobState.CANCELLED)
    assert keyless.retry_job(JOB) > 0
    assert store.get_job(JOB).budget_usd is None


def test_without_its_key_an_audit_says_so_and_calls_nothing_changed(opened: Open) -> None:
    from specbatch.pipeline.operations.audit import audit_chain

    store = opened(OLD)
    ingest(store)
    for index in range(2):
        record(store, index)
    finish(store, JobState.DONE)
    other = opened(Cipher([b"x" * 32]))
    with pytest.raises(UnknownKeyError, match="add it after the others"):
        audit_chain(other, Published(), JOB)


def test_of_a_job_with_two_keys_an_audit_tells_which_rows_it_cannot_read(opened: Open) -> None:
    from specbatch.pipeline.operations.audit import audit_chain

    ingest(opened(OLD))
    record(opened(OLD), 0)
    record(opened(NEW), 1)
    finish(opened(NEW), JobState.DONE)
    newest = opened(Cipher([bytes(range(32))]))
    assert audit_chain(opened(NEW), Published(), JOB).intact
    found = audit_chain(newest, Published(), JOB).findings
    assert [one.row for one in found] == [0, 1, 2, 3]
    assert all("was written with a key that is not among those" in one.what for one in found)


def test_an_error_that_cannot_be_read_without_its_key_is_not_called_changed(opened: Open) -> None:
    from specbatch.pipeline.operations.audit import audit_chain

    store = opened(OLD)
    store.create_job(new_job(privacy=PrivacyMode.REDACTED, sealed_spec='{"stop": "Anna"}'))
    store.fail_job(claim_job(store, Stage.INGEST).lease, SECRET)
    assert audit_chain(store, Published(), JOB).intact
    with pytest.raises(UsageError, match=r"jobs\.error is encrypted"):
        audit_chain(opened(None), Published(), JOB)
    with pytest.raises(UsageError, match=r"jobs\.error is encrypted"):
        audit_chain(opened(Cipher([b"x" * 32])), Published(), JOB)
