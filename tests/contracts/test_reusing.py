"""Which completion answers a request, in every store."""

from __future__ import annotations

from contracts.shorthand import ended
from ledger.builders import JOB

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.privacy import PrivacyMode

ONE, TWO = b"\x00" * 16, b"\xff" * 16
OTHER = "job-another"


def test_an_answer_is_the_completion_with_all_that_is_kept(store: Store) -> None:
    ended(store)
    store.offer_answers(JOB, {ONE: (1, 0), TWO: (3, 0)})
    found = store.answered("default", [ONE, TWO, b"other"])
    kept = {c.row_index: c for c in store.completions(JOB)}
    assert {digest: answer.record for digest, answer in found.items()} == {
        ONE: kept[1],
        TWO: kept[3],
    }
    assert found[ONE].name == f"{JOB}/1/0"
    assert store.answered("default", []) == {}
    assert store.answered("another", [ONE, TWO]) == {}


def test_the_newest_answer_counts(store: Store) -> None:
    ended(store)
    ended(store, OTHER)
    store.offer_answers(JOB, {ONE: (1, 0), TWO: (2, 0)})
    store.offer_answers(OTHER, {ONE: (0, 0)})
    found = store.answered("default", [ONE, TWO])
    assert {digest: answer.name for digest, answer in found.items()} == {
        ONE: f"{OTHER}/0/0",
        TWO: f"{JOB}/2/0",
    }


def test_requests_may_be_more_than_a_statement_has_room_for(store: Store) -> None:
    ended(store)
    many = [n.to_bytes(16, "big") for n in range(70_000)]
    store.offer_answers(JOB, {many[0]: (0, 0), many[-1]: (1, 0)})
    assert set(store.answered("default", many)) == {many[0], many[-1]}


def test_nothing_of_a_purged_job_is_an_answer(store: Store) -> None:
    ended(store)
    store.offer_answers(JOB, {ONE: (1, 0)})
    list(store.purge(JOB, "asked for"))
    assert store.answered("default", [ONE]) == {}
    store.offer_answers(JOB, {ONE: (1, 0)})  # of a worker that was late
    assert store.answered("default", [ONE]) == {}
    ended(store, OTHER)
    store.offer_answers(OTHER, {ONE: (1, 0)})
    assert store.answered("default", [ONE])[ONE].name == f"{OTHER}/1/0"


def test_texts_that_are_not_whole_are_no_answer(store: Store) -> None:
    ended(store, privacy=PrivacyMode.REDACTED)
    store.offer_answers(JOB, {ONE: (1, 0)})
    assert store.answered("default", [ONE]) == {}


def test_a_row_without_a_completion_is_no_answer(store: Store) -> None:
    ended(store)
    store.offer_answers(JOB, {ONE: (99, 0)})
    assert store.answered("default", [ONE]) == {}
