"""Drafting switched off by an operator, on both databases: who changed what when, and the logs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ledger.builders import START, Clock, new_job

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.draft_switches import DraftSwitch, SwitchScope

OTHER, ENDED = "job00000000000002", "job00000000000003"
EVERYTHING, TAGGED = SwitchScope(), SwitchScope(tag="de", proposer="ngram")


def of_actor(url: str, clock: Clock, actor: str) -> Store:
    return open_store(url, clock=clock, actor=actor)


def test_a_switch_is_there_until_it_is_ended_and_then_in_the_history(
    url: str, clock: Clock
) -> None:
    alice, bob = of_actor(url, clock, "alice"), of_actor(url, clock, "bob")
    made, is_new = alice.switch_drafting_off(TAGGED, "acceptance fell")
    assert is_new
    assert made == DraftSwitch(TAGGED, START, "alice", "acceptance fell")
    clock.advance(5)
    also, _ = alice.switch_drafting_off(EVERYTHING, "an incident")
    assert bob.draft_switches() == [made, also]
    assert bob.figures().draft_switches == {"tag+proposer": 1, "everything": 1}
    clock.advance(5)
    ended = bob.switch_drafting_on(TAGGED)
    assert ended == DraftSwitch(TAGGED, START, "alice", "acceptance fell", START + 10, "bob")
    assert alice.draft_switches() == [also]
    again, is_new = bob.switch_drafting_off(TAGGED, "it fell again")
    assert is_new
    assert alice.draft_switches(history=True) == [ended, also, again]
    alice.close()
    bob.close()


def test_a_scope_is_switched_off_once_and_what_is_on_cannot_be_switched_on(store: Store) -> None:
    assert store.switch_drafting_on(EVERYTHING) is None
    first, _ = store.switch_drafting_off(EVERYTHING, "an incident")
    assert store.switch_drafting_off(EVERYTHING, "the same incident") == (first, False)
    assert store.switch_drafting_on(TAGGED) is None
    assert store.draft_switches() == [first]


def test_of_several_callers_at_once_one_switches(store: Store) -> None:
    store.create_job(new_job())
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda i: store.switch_drafting_off(EVERYTHING, f"reason {i}"), range(4))
        )
    assert [is_new for _, is_new in found].count(True) == 1
    assert len({switch for switch, _ in found}) == 1


def test_no_password_is_kept_in_a_reason(store: Store) -> None:
    store.switch_drafting_off(TAGGED, "see amqp://me:secret@host")
    assert [one.reason for one in store.draft_switches()] == ["see amqp://me:***@host"]
