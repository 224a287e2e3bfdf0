"""Who changes anything of a job by hand is found out, and what he changed is named."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from contracts.shorthand import F32, TORCH, serving
from ledger.audited import OTHER, audited, other_reason, record, tell_everything, told
from ledger.builders import JOB, LEASE_SEC, Clock, new_group, new_job, position
from sqlalchemy import Engine, Row, Table, delete, event, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import KEPT_BYTES, chained, completion_digest
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.operations.coverage import Extent
from specbatch.schemas.audit import EntryKind, FindingKind, Head
from specbatch.schemas.audit_tables import AuditLog
from specbatch.schemas.records import Lease, Stage
from specbatch.schemas.tables import Completion, Group, Job, Rejected
from support.databases import migrated
from support.servers import PrivatePostgres

LOG: Table = AuditLog.__table__  # type: ignore[assignment]  # a mapped class's table is a Table
COMPLETIONS: Table = Completion.__table__  # type: ignore[assignment]  # the same
JOBS: Table = Job.__table__  # type: ignore[assignment]  # the same
REJECTED: Table = Rejected.__table__  # type: ignore[assignment]  # the same
GROUPS: Table = Group.__table__  # type: ignore[assignment]  # the same
KINDS = [
    "submitted", "planned", "read", "group", "lost", "cancelled", "kept", "published", "retried",
    "group", "group", "published", "exported", "purged",
]  # fmt: skip


class Thief:
    """Somebody with all rights, DDL's too, who puts everything back afterwards."""

    def __init__(self, url: str) -> None:
        self.engine: Engine = make_engine(url, foreign_keys=False)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _hurried)
        with self.engine.begin() as conn:
            if conn.dialect.name == "sqlite":
                for name in ("update", "delete"):
                    conn.execute(text(f"DROP TRIGGER audit_log_no_{name}"))
            else:
                conn.execute(text("DROP TRIGGER audit_log_no_update ON audit_log"))

    def read(self, table: Table, *where: Any) -> list[Row[Any]]:
        with self.engine.connect() as conn:
            return list(conn.execute(select(*table.c).where(*where).order_by(*table.primary_key)))

    def change(self, table: Table, row: Row[Any], **values: Any) -> None:
        with self.engine.begin() as conn:
            conn.execute(update(table).where(*_this(table, row)).values(**values))

    def undo(self, table: Table, row: Row[Any], **changed: Any) -> None:
        """The opposite of `change`."""
        is_there = {column.name: row._mapping[column.name] for column in table.primary_key}
        where = [
            table.c[name] == value for name, value in (is_there | _keys(table, changed)).items()
        ]
        with self.engine.begin() as conn:
            conn.execute(update(table).where(*where).values(**row._mapping))

    def take(self, table: Table, *rows: Row[Any]) -> None:
        with self.engine.begin() as conn:
            for row in rows:
                conn.execute(delete(table).where(*_this(table, row)))

    def add(self, table: Table, *rows: dict[str, Any]) -> None:
        with self.engine.begin() as conn:
            for row in rows:
                conn.execute(insert(table).values(**row))

    def put_back(self, table: Table, before: list[Row[Any]]) -> None:
        """The table as it was."""
        with self.engine.begin() as conn:
            conn.execute(delete(table))
        self.add(table, *(dict(row._mapping) for row in before))


def _hurried(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")


def _this(table: Table, row: Row[Any]) -> list[Any]:
    return [column == row._mapping[column.name] for column in table.primary_key]


def _keys(table: Table, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if table.c[name].primary_key}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SqlStore, Thief]]:
    """A store with one job of which everything can be told, and a thief in it."""
    server: PrivatePostgres | None = None
    if request.param == "sqlite":
        url = migrated(tmp_path_factory.mktemp("store") / "store.db")
    else:
        server = request.getfixturevalue("postgres_server")
        url = server.create_database(like=request.getfixturevalue("migrated_postgres"))
    store = open_store(url, clock=Clock())
    tell_everything(store)
    thief = Thief(url)
    yield store, thief
    thief.engine.dispose()
    store.close()
    if server is not None:
        server.drop_database(url)


@pytest.fixture
def store(site: tuple[SqlStore, Thief]) -> SqlStore:
    return site[0]


@pytest.fixture(scope="module")
def as_it_was(site: tuple[SqlStore, Thief]) -> dict[Table, list[Row[Any]]]:
    tables = (JOBS, GROUPS, COMPLETIONS, REJECTED, LOG)  # what hangs on jobs goes with them
    return {table: site[1].read(table) for table in tables}


@pytest.fixture
def thief(site: tuple[SqlStore, Thief], as_it_was: dict[Table, list[Row[Any]]]) -> Iterator[Thief]:
    """What he does in a test is undone after it."""
    thief = site[1]
    yield thief
    with thief.engine.begin() as conn:
        for table, rows in as_it_was.items():
            query = select(*table.c).order_by(*table.primary_key)
            there = {repr(row) for row in conn.execute(query)}
            if there != {repr(row) for row in rows}:  # NaN is not equal to itself
                conn.execute(delete(table))
                conn.execute(insert(table), [dict(row._mapping) for row in rows])


def test_what_nobody_touched_is_intact(store: SqlStore) -> None:
    found = audited(store)
    assert [entry.kind for entry in store.log(JOB)] == KINDS
    assert found.findings == []
    assert found.counts.completions == 12
    assert len(found.to_replay) == 12
    assert list(found.to_replay) == [(row, 0) for row in range(12)]


# --- completions ----------------------------------------------------------------------------


def other(name: str, value: Any) -> Any:
    """A value that differs as little as can be."""
    if name == "finish_reason":
        return other_reason(value)
    if name == "job_id":
        return OTHER
    if name == "row_index":
        return value + 1000  # one that is not there
    if isinstance(value, str):
        return chr(ord(value[0]) ^ 1) + value[1:] if value else "x"
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, float):
        return _next_bit(value, "<d")
    if isinstance(value, int):
        return value - 1 if value > 2**62 else value + 1
    if isinstance(value, list | tuple):
        return [_next_item(value[0]), *value[1:]] if len(value) else [1]
    return 1 if value is None else None


def _next_item(value: Any) -> Any:
    return _next_bit(value, "<f") if isinstance(value, float) else other("", value)


def _next_bit(value: float, form: str) -> float:
    data = struct.pack(form, value)
    return float(struct.unpack(form, bytes([data[0] ^ 1]) + data[1:])[0])


@pytest.mark.parametrize("column", [column.name for column in COMPLETIONS.c])
def test_a_changed_column_of_a_completion_is_found(
    store: SqlStore, thief: Thief, column: str
) -> None:
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    value = other(column, row._mapping[column])
    if column == "makers":  # NULL: the first one drafted for all passes
        value = [1]
    assert value != row._mapping[column]
    thief.change(COMPLETIONS, row, **{column: value})
    words = told(store)
    assert words, f"nobody saw that {column} became {value!r}"
    assert any("row 5, sample 0" in word for word in words)
    assert all("the completion of row" in word for word in words)


def test_a_last_token_taken_away_is_found(store: SqlStore, thief: Thief) -> None:
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    thief.change(COMPLETIONS, row, token_ids=list(row.token_ids)[:-1])
    assert told(store) == [
        "the completion of row 5, sample 0 was changed: its tokens, text or log-probabilities are "
        "not those recorded"
    ]


def test_a_changed_completion_with_a_digest_to_match_is_found(
    store: SqlStore, thief: Thief
) -> None:
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    thief.change(COMPLETIONS, row, text="nothing to see", digest=None)
    kept = store.kept_one(JOB, 5, 0)
    assert kept is not None
    assert kept.record is not None
    thief.change(COMPLETIONS, row, digest=completion_digest(kept.record)[:KEPT_BYTES])
    (word,) = told(store)
    assert "row 5, sample 0 was changed: entry 10 of the log tells of another one" in word


def test_a_missing_and_an_added_completion_are_found(store: SqlStore, thief: Thief) -> None:
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    thief.take(COMPLETIONS, row)
    assert told(store) == ["the completion of row 5, sample 0 is missing"]
    values = dict(row._mapping)
    thief.add(COMPLETIONS, values, {**values, "row_index": 400}, {**values, "row_index": 401})
    (word,) = told(store)
    assert word == (
        "the completion of row 400, sample 0 and 1 more of group 1 are in no entry of the log: "
        "added by hand"
    )


def test_bytes_that_cannot_be_read_any_more_are_found(store: SqlStore, thief: Thief) -> None:
    if thief.engine.dialect.name == "sqlite":
        spoils = ["token_ids = '[7, 8'", "text = CAST(x'ff41' AS TEXT)", "finish_reason = 'sto'"]
        spoils += ["proposed = 'many'", "logprobs = '[-0.5, \"x\", 1]'"]
    else:
        spoils = ["finish_reason = 'sto'", "token_ids = ARRAY[7, NULL, 30]"]
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    values = dict(row._mapping)
    for spoil in spoils:
        with thief.engine.begin() as conn:
            where = f"job_id = '{JOB}' AND row_index = 5"
            conn.execute(text(f"UPDATE completions SET {spoil} WHERE {where}"))
        (word,) = told(store)
        assert "row 5, sample 0 was changed" in word
        with thief.engine.begin() as conn:
            conn.execute(text(f"DELETE FROM completions WHERE {where}"))
        thief.add(COMPLETIONS, values)


# --- the log --------------------------------------------------------------------------------

FIELDS = ("job_id", "number", "kind", "at", "actor", "payload", "previous", "hash")


@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_entry_of_any_kind_is_found(store: SqlStore, thief: Thief, field: str) -> None:
    for entry in thief.read(LOG, LOG.c.job_id == JOB):
        value = entry._mapping[field]
        changed = {"job_id": "elsewhere", "number": entry.number + 100}.get(field)
        if field == "payload":
            changed = value[:-2] + chr(ord(value[-2]) ^ 1) + value[-1]
        changed = changed or other("", value)
        thief.change(LOG, entry, **{field: changed})
        found = audited(store).findings
        thief.undo(LOG, entry, **{field: changed})
        kind = changed if field == "kind" else entry.kind
        words = [finding.what for finding in found]
        if field in ("job_id", "number"):
            gap = f"entry {entry.number} is missing"
            if field == "number" and entry.number == len(KINDS):
                gap = f"entries {entry.number} to {entry.number + 99} are missing"
            assert any(word.startswith(gap) for word in words)
        else:
            assert f"entry {entry.number} ({kind}) was changed" in words[0]
        if entry.kind not in ("group", "kept"):
            assert all(f.kind is not FindingKind.COMPLETION for f in found)
    assert told(store) == []


def rewritten(thief: Thief, number: int, **changed: Any) -> None:
    """Change an entry and write its hash anew, as somebody would who knows how."""
    (entry,) = thief.read(LOG, LOG.c.job_id == JOB, LOG.c.number == number)
    values = dict(entry._mapping) | changed
    made = entries.follow(
        Head(number - 1, values["previous"]),
        JOB,
        EntryKind(values["kind"]),
        values["at"],
        values["actor"],
        orjson.loads(values["payload"]),
    )
    thief.change(LOG, entry, **entries.values(made))


def test_an_entry_with_a_hash_to_match_is_found_by_its_neighbour(
    store: SqlStore, thief: Thief
) -> None:
    rewritten(thief, 6, actor="nobody")
    assert "entry 7 (kept) does not follow entry 6: one of them was replaced" in told(store)


def test_a_last_entry_with_a_hash_to_match_is_found_by_the_jobs_row(
    store: SqlStore, thief: Thief
) -> None:
    rewritten(thief, len(KINDS), actor="nobody")
    (word,) = told(store)
    assert word.startswith(f"entry {len(KINDS)}, the last, is not the one that the job's row names")


def test_missing_entries_are_found(store: SqlStore, thief: Thief) -> None:
    log = thief.read(LOG, LOG.c.job_id == JOB)
    thief.take(LOG, log[2], log[3])
    assert "entries 3 to 4 are missing from the log" in told(store)
    thief.take(LOG, log[0])
    assert "entry 1 is missing from the log" in told(store)


def test_a_log_that_was_cut_off_is_found(store: SqlStore, thief: Thief) -> None:
    log = thief.read(LOG, LOG.c.job_id == JOB)
    thief.take(LOG, *log[-2:])
    assert "entries 13 to 14 are missing from the log" in told(store)
    thief.take(LOG, *log)
    assert "entries 1 to 14 are missing from the log" in told(store)
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    thief.change(JOBS, row, log_number=0, log_head=None)
    assert "the job has no audit log: the job is older than that, or the log was removed" in told(
        store
    )


def test_swapped_entries_are_found(store: SqlStore, thief: Thief) -> None:
    one, two = thief.read(LOG, LOG.c.job_id == JOB)[9:11]
    thief.change(LOG, one, number=99)
    thief.change(LOG, two, number=one.number)
    (moved,) = thief.read(LOG, LOG.c.job_id == JOB, LOG.c.number == 99)
    thief.change(LOG, moved, number=two.number)
    words = told(store)
    for number in (one.number, two.number):
        assert any(word.startswith(f"entry {number} (group) was changed") for word in words)


def test_an_added_entry_is_found(store: SqlStore, thief: Thief) -> None:
    last = list(store.log(JOB))[-1]
    made = entries.follow(last.head, JOB, EntryKind.CANCELLED, 1.0, "eve", {"reason": None})
    thief.add(LOG, entries.values(made))
    assert "the log has 15 entries, but the job's row knows of 14" in told(store)[0]


@pytest.mark.parametrize("column", ["log_number", "log_head"])
def test_a_changed_end_in_the_jobs_row_is_found(store: SqlStore, thief: Thief, column: str) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    thief.change(JOBS, row, **{column: other("", row._mapping[column])})
    assert len(told(store)) == 1


# --- order, actions, prompts, rejected rows -------------------------------------------------

PINNED = (
    *("name", "tenant", "spec_digest", "verifier", "proposer", "output_uri", "workspace_uri"),
    *("idempotency_key", "created_at", "priority", "deadline_at", "budget_usd", "rows_total"),
    *("cancel_requested", "stop_reason"),
)


@pytest.mark.parametrize("column", PINNED)
def test_a_changed_column_of_the_order_is_found(store: SqlStore, thief: Thief, column: str) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    value = row._mapping[column]
    changed = True if value is False else ("words" if value is None else other("", value))
    thief.change(JOBS, row, **{column: changed})
    what = f" was changed: {column} is {changed!r}, by the log it is {value!r}"
    assert any(what in word for word in told(store))


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_changed_numeric_class_is_found(store: SqlStore, thief: Thief, is_moved: bool) -> None:
    new = "job-of-a-class"
    lease = begun(store, new)
    store.add_groups(lease, [new_group(0)], [], 4, position(4))
    where = (Stage.VERIFY, "big", "w", LEASE_SEC)
    assert store.claim_next(*where, serving(F32)) is not None
    if is_moved:
        assert store.retry_job(new, numeric_class=TORCH) == 1
    assert told(store, new) == []
    (row,) = thief.read(JOBS, JOBS.c.job_id == new)
    thief.change(JOBS, row, numeric_class="exact/f32/2")
    (word,) = told(store, new)
    assert "numeric_class is 'exact/f32/2', by the log it is" in word


def begun(store: SqlStore, job_id: str) -> Lease:
    """The lease of a new job whose input is being read."""
    store.create_job(new_job(job_id, spec={"engine": {"numeric_class": None}}))
    work = store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    return work.lease


def test_a_changed_field_of_the_spec_is_named(store: SqlStore, thief: Thief) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    spec = {**row.spec, "sampling": {**row.spec["sampling"], "temperature": 1e-9}}
    thief.change(JOBS, row, spec=spec)
    assert told(store) == ["the order was changed: spec (sampling.temperature)"]


def test_a_spec_that_cannot_be_read_is_found(store: SqlStore, thief: Thief) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    thief.change(JOBS, row, spec=[])
    (word,) = told(store)
    assert word.startswith("the order was changed: spec")
    if thief.engine.dialect.name == "sqlite":
        with thief.engine.begin() as conn:
            conn.execute(text(f"UPDATE jobs SET spec = '{{' WHERE job_id = '{JOB}'"))
        assert told(store) == ["the order was changed: spec cannot be read"]
        thief.change(JOBS, row, spec=row.spec)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"state": "done"}, "the job's state is done, but it ended as partial"),
        ({"error": None}, "the error with which the job ended was changed"),
        ({"report": {}}, "the report was changed: verifier_sha256 was"),
    ],
    ids=["state", "error", "report"],
)
def test_a_changed_outcome_is_found(
    store: SqlStore, thief: Thief, values: dict[str, Any], words: str
) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    thief.change(JOBS, row, **values)
    assert any(word.startswith(words) for word in told(store))


@pytest.mark.parametrize("column", ["row_index", "row_id", "code", "reason"])
def test_a_changed_rejected_row_is_found(store: SqlStore, thief: Thief, column: str) -> None:
    before = thief.read(REJECTED)
    for row in before:
        value = 900 if column == "row_index" else other("", row._mapping[column])
        thief.change(REJECTED, row, **{column: "x" if value == 1 else value})
        what = "is missing" if column == "row_index" else "was changed"
        assert f"quarantined row {row.row_index} {what}" in told(store)
        thief.put_back(REJECTED, before)


def test_prompts_that_are_not_those_that_were_planned_are_found(
    store: SqlStore, thief: Thief
) -> None:
    row = thief.read(GROUPS, GROUPS.c.job_id == JOB)[1]
    thief.change(GROUPS, row, prompts={**row.prompts, "sha256": "0" * 64})
    assert "group 1 has other prompts than were planned" in told(store)
    thief.change(GROUPS, row, prompts=row.prompts, rows=3)
    assert any("its parts in the store have" in word for word in told(store))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stage": "failed", "last_error": "forged"},
         "group 1 is failed, but by entry 10 of the log it is done"),
        ({"last_error": "forged"}, "the error of group 1 was changed"),
    ],
)  # fmt: skip
def test_a_group_that_ended_otherwise_is_found(
    store: SqlStore, thief: Thief, values: dict[str, Any], said: str
) -> None:
    row = thief.read(GROUPS, GROUPS.c.job_id == JOB)[1]
    thief.change(GROUPS, row, **values)
    assert told(store) == [said]


# --- what is no tampering -------------------------------------------------------------------


def emptied(thief: Thief, row: Row[Any], **but: Any) -> None:
    empty: list[int] = []
    left: dict[str, Any] = {
        **dict.fromkeys(("row_id", "text"), ""),
        **dict.fromkeys(("token_ids", "logprobs"), empty),
        **dict.fromkeys(("top_token_ids", "top_logprobs", "rejected", "error")),
    }
    thief.change(COMPLETIONS, row, **(left | but))


def test_what_was_purged_is_told_and_still_held_to_the_log(store: SqlStore, thief: Thief) -> None:
    before = thief.read(COMPLETIONS)
    row = thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB)[5]
    emptied(thief, row)
    (word,) = told(store)
    assert "row 5, sample 0 was changed: its tokens" in word
    store.note_action(JOB, EntryKind.PURGED, {"rows": [[4, 5]]})
    found = audited(store)
    assert found.findings == []
    assert found.counts.purged == 1
    (covered,) = (one for one in found.covered(0) if one.what == "completions")
    assert covered.extent is Extent.IN_PART
    assert covered.how.endswith(
        "1 purged ones are empty, as they were left, and their tags are not covered"
    )
    for forged in (
        *({"row_id": "r5"}, {"text": "x"}, {"token_ids": [1]}, {"logprobs": [-0.5]}),
        *({"top_token_ids": [1], "top_logprobs": [-0.5]}, {"rejected": [9]}, {"error": "forged"}),
    ):
        emptied(thief, row, **forged)
        assert told(store), f"nobody saw {forged}"
    emptied(thief, row)
    assert told(store) == []
    thief.change(COMPLETIONS, row, cost_usd=9.0)
    (word,) = told(store)
    assert "row 5, sample 0 was changed: entry 10 of the log tells of another one" in word
    thief.put_back(COMPLETIONS, before)
    rejected, _ = thief.read(REJECTED)
    thief.change(REJECTED, rejected, row_id=None, reason="")
    assert told(store) == ["quarantined row 12 was changed"]
    store.note_action(JOB, EntryKind.PURGED, {"rows": None, "why": "it is old"})
    assert told(store) == []
    thief.change(REJECTED, rejected, code="another")
    assert told(store) == ["quarantined row 12 was changed"]


def test_a_job_that_is_older_than_its_log_is_adopted(store: SqlStore, thief: Thief) -> None:
    thief.take(LOG, *thief.read(LOG, LOG.c.job_id == JOB))
    (row,) = thief.read(JOBS, JOBS.c.job_id == JOB)
    thief.change(JOBS, row, log_number=0, log_head=None)
    for one in thief.read(COMPLETIONS, COMPLETIONS.c.job_id == JOB):
        thief.change(COMPLETIONS, one, digest=None)
    store.note_action(JOB, EntryKind.EXPORTED, {})
    found = audited(store)
    assert [entry.kind for entry in store.log(JOB)] == ["adopted", "exported"]
    assert found.findings == []
    assert found.counts.uncovered == 12
    assert "older than the job's log" in found.remarks[0]
    thief.change(JOBS, row, tenant="eve", log_number=2, log_head=list(store.log(JOB))[-1].hash)
    assert told(store)[0].startswith("the order was changed: tenant")


def test_the_log_outlives_its_job(store: SqlStore, thief: Thief) -> None:
    (row,) = thief.read(JOBS, JOBS.c.job_id == OTHER)
    thief.take(JOBS, row)
    assert store.logged_job(OTHER) == OTHER
    assert told(store, OTHER) == ["the job's row is gone; its log outlives it"]


# --- what a database refuses by itself ------------------------------------------------------


@pytest.mark.pipeline
def test_entries_can_neither_be_changed_nor_deleted(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for url in (migrated(tmp_path / "store.db"), request.getfixturevalue("postgres_url")):
        store = open_store(url)
        tell_everything(store)
        engine = make_engine(url)
        statements = ["UPDATE audit_log SET actor = 'eve'", "DELETE FROM audit_log"]
        if engine.dialect.name == "postgresql":
            statements.append("TRUNCATE audit_log")
        for statement in statements:
            with pytest.raises(DBAPIError, match="only added to"), engine.begin() as conn:
                conn.execute(text(statement))
        with engine.begin() as conn:  # a job that is deleted altogether leaves its log behind
            conn.execute(text("DELETE FROM jobs"))
        assert len(list(store.log(JOB))) == len(KINDS)
        engine.dispose()
        store.close()


def test_the_log_has_digests_and_nothing_of_an_output(store: SqlStore) -> None:
    said = [orjson.loads(e.payload) for e in store.log(JOB) if e.kind == EntryKind.GROUP]
    row, sample, digest = said[0]["completions"][1]
    assert (row, sample) == (1, 0)
    assert digest == chained(completion_digest(record(1)))
    every = "".join(entry.payload for entry in store.log(JOB))
    assert "a b" not in every
    assert "three rows" not in every
