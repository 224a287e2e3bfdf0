"""What a log says, what of it is believed, and what is missing: without a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ledger.builders import JOB

from specbatch.pipeline.audit.entries import follow
from specbatch.pipeline.audit.log_facts import LogFacts, believed, is_final
from specbatch.schemas.audit import EMPTY, EntryKind, Finding, Head, LogEntry

SPEC = {"spec": {"engine": {"numeric_class": None}, "model_fingerprint": None}, "job_id": JOB}
BEGUN = (EntryKind.SUBMITTED, SPEC)
STOPPED = (EntryKind.STOPPED, {"reason": "its budget was spent"})
LIMITS = {"deadline_at": None, "budget_usd": 2.0}
FAILED = (EntryKind.FAILED, {"state": "failed", "error_sha256": "e" * 64, "manifest": None})


def log(*entries: tuple[EntryKind, Mapping[str, Any]]) -> list[LogEntry]:
    found, head = list[LogEntry](), EMPTY
    for kind, said in entries:
        found.append(follow(head, JOB, kind, 1.0, "w", said))
        head = found[-1].head
    return found


def read(entries: Sequence[LogEntry], head: Head | None = None) -> tuple[LogFacts, list[Finding]]:
    facts = LogFacts(JOB)
    return facts, list(facts.follow(entries, head or entries[-1].head))


def group(row: int) -> tuple[EntryKind, dict[str, Any]]:
    return EntryKind.GROUP, {"index": row, "completions": [[row, 0, "d" * 64]]}


def test_a_whole_log_lacks_nothing() -> None:
    facts, found = read(log(BEGUN, group(0), group(4)))
    assert found == []
    assert not facts.lacks
    assert facts.entries == 3
    assert facts.completed == [((0, 0), 2), ((4, 0), 3)]
    assert facts.expected["state"] is None
    assert facts.is_open() is True


def test_an_entry_that_was_changed_is_neither_believed_nor_a_reason_to_doubt_the_next() -> None:
    entries = log(BEGUN, group(0), group(4))
    entries[1] = replace(entries[1], payload=entries[1].payload.replace("[0,", "[9,"))
    facts, found = read(entries)
    assert [one.number for one in found] == [2]
    assert "was changed" in found[0].what
    assert facts.lacks
    assert facts.completed == [((4, 0), 3)]


@pytest.mark.parametrize(
    ("missing", "said"),
    [([1], "entry 2 is missing"), ([1, 2], "entries 2 to 3 are missing"), ([3], "entry 4 is")],
)
def test_what_is_missing_is_named(missing: list[int], said: str) -> None:
    entries = log(BEGUN, group(0), group(4), group(8))
    kept = [one for place, one in enumerate(entries) if place not in missing]
    facts, (found,) = read(kept, entries[-1].head)
    assert said in found.what
    assert found.number == missing[0] + 1
    assert facts.lacks


def test_an_entry_that_stands_for_another_is_found_by_the_next_one() -> None:
    entries, other = log(BEGUN, group(0), group(4)), log(BEGUN, group(7))
    facts, (found,) = read([entries[0], other[1], entries[2]])
    assert found.number == 3
    assert "does not follow entry 2" in found.what
    assert facts.lacks


def test_the_end_must_be_the_one_that_the_jobs_row_names() -> None:
    entries, other = log(BEGUN, group(0)), log(BEGUN, group(7))
    facts, (found,) = read(entries, other[-1].head)
    assert found.number == 2
    assert "is not the one that the job's row names" in found.what
    assert facts.lacks


def test_more_than_the_jobs_row_knows_was_added_by_hand() -> None:
    entries = log(BEGUN, group(0), group(4))
    facts, (found,) = read(entries, entries[1].head)
    assert "has 3 entries, but the job's row knows of 2" in found.what
    assert facts.lacks


def test_no_log_at_all() -> None:
    facts = LogFacts(JOB)
    (found,) = facts.follow([], EMPTY)
    assert "no audit log" in found.what
    assert facts.lacks
    assert facts.is_open() is None


def test_a_row_that_is_gone_says_nothing_of_the_end() -> None:
    facts = LogFacts(JOB)
    assert list(facts.follow(log(BEGUN), None)) == []
    assert not facts.lacks


@pytest.mark.parametrize(
    "said",
    [
        (EntryKind.SUBMITTED, SPEC),
        (EntryKind.GROUP, {}),
        (EntryKind.READ, {"rows_total": 4}),
        (EntryKind.FAILED, FAILED[1] | {"state": "done"}),
        (EntryKind.PUBLISHED, FAILED[1] | {"accounts": [1]}),
    ],
)
def test_what_specbatch_would_not_write_is_not_believed(said: Any) -> None:
    facts, (found,) = read(log(BEGUN, said))
    assert found.number == 2
    assert "says nothing that specbatch would write" in found.what
    assert facts.lacks


def test_a_stop_keeps_its_first_reason_and_a_retry_takes_it_back() -> None:
    entries = log(BEGUN, STOPPED, (EntryKind.CANCELLED, {"reason": "cancelled"}), FAILED,
                  (EntryKind.RETRIED, {"quarantined": False, "units": 1, **LIMITS}))  # fmt: skip
    stopped, _ = read(entries[:3])
    assert stopped.expected["cancel_requested"] is True
    assert stopped.expected["stop_reason"] == "its budget was spent"
    failed, _ = read(entries[:4])
    assert (failed.expected["state"], failed.is_open()) == ("failed", False)
    assert failed.published_by == 4
    assert not failed.published
    facts, found = read(entries)
    assert found == []
    expected = {"cancel_requested": False, "stop_reason": None, "state": None, **LIMITS}
    assert expected.items() <= facts.expected.items()
    assert facts.is_open()
    assert facts.published_by is None


def test_a_job_older_than_its_log_says_nothing_of_how_it_stands() -> None:
    facts, found = read(log((EntryKind.ADOPTED, {"spec": {}})))
    assert found == []
    assert facts.adopted
    assert "numeric_class" not in facts.expected
    assert facts.is_open() is None


def test_a_purge_covers_rows_up_to_its_last_one_of_entries_before_it() -> None:
    purged = (EntryKind.PURGED, {"rows": [[3, 5], [9, 9]], "output": False})
    facts, _ = read(log(BEGUN, group(3), purged))
    assert [row for row in range(12) if facts.was_purged(row, 2)] == [3, 4, 5, 9]
    assert not facts.was_purged(4, 3)
    assert not facts.was_purged(4, 4)
    assert not facts.output_purged


@pytest.mark.parametrize(
    ("said", "with_output"),
    [({"rows": None}, True), ({"rows": [[0, 1]]}, False), ({"rows": None, "output": False}, False)],
)
def test_earlier_versions_do_not_say_whether_the_output_went_too(
    said: dict[str, Any], with_output: bool
) -> None:
    facts, _ = read(log(BEGUN, (EntryKind.PURGED, said)))
    assert facts.output_purged is with_output
    assert facts.was_purged(1, 1)


def test_what_changes_while_it_is_read_is_not_believed() -> None:
    (entry,) = log(BEGUN)
    assert believed(entry, {1: entry.hash}) == SPEC
    changed = replace(entry, payload="{}")
    other = replace(entry, number=2)
    for one, hashes in ((None, {1: entry.hash}), (changed, {1: entry.hash}), (entry, {}),
                        (entry, {1: bytes(32)}), (other, {2: other.hash})):  # fmt: skip
        with pytest.raises(ValueError, match="audit again"):
            believed(one, hashes)


def test_a_job_has_ended_in_final_states_alone() -> None:
    states = ("done", "partial", "failed", "cancelled", "running", "queued", "?")
    assert [is_final(state) for state in states] == [True, True, True, True, False, False, False]
