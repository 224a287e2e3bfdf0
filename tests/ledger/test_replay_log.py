"""A job's rows beside what its log says of them: without a store."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ledger.builders import JOB, completion, new_group

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import content_digest
from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.audit.replay_log import Checker
from specbatch.schemas.audit import EMPTY, EntryKind, Finding, KeptCompletion, KeptGroup, LogEntry
from specbatch.schemas.months import month_of
from specbatch.schemas.records import (
    FIRST_SPLIT_INDEX,
    Artefact,
    CompletionRecord,
    Prompts,
    RejectedRow,
    Stage,
)

MADE_AT = 1_790_000_000.0
SPEC = {"spec": {"engine": {}}, "job_id": JOB, "created_at": MADE_AT}
Said = tuple[EntryKind, Mapping[str, Any]]


def checker(*said: Said, begun: EntryKind = EntryKind.SUBMITTED) -> Checker:
    """Of a log of these entries."""
    log, head = dict[int, LogEntry](), EMPTY
    for kind, payload in ((begun, SPEC), *said):
        entry = entries.follow(head, JOB, kind, 1.0, "w", payload)
        log[entry.number], head = entry, entry.head
    facts = LogFacts(JOB)
    assert list(facts.follow(log.values(), head)) == []
    return Checker(facts, log.get)


def kept(record: CompletionRecord, group: int, **values: Any) -> KeptCompletion:
    place = (record.row_index, record.sample_index, group)
    found = KeptCompletion(*place, content_digest(record), record, month_of(MADE_AT))
    return replace(found, **values)


def recorded(group: int, records: Sequence[CompletionRecord]) -> Said:
    return EntryKind.GROUP, entries.completed(group, 1, entries.digested(records))


def words(findings: Sequence[Finding]) -> list[str]:
    return [one.what for one in findings]


# --- completions --------------------------------------------------------------------------------
def spread_over_groups(seed: int) -> tuple[list[Said], list[KeptCompletion]]:
    """Groups whose rows lie between each other's, as cut ones do, in any order of recording."""
    chance = random.Random(seed)
    said, there = list[Said](), list[KeptCompletion]()
    of_group: dict[int, list[CompletionRecord]] = {}
    for row in range(40):
        for sample in range(chance.randint(1, 3)):
            of_group.setdefault(chance.randint(0, 6), []).append(completion(row, sample))
    for group, records in chance.sample(sorted(of_group.items()), len(of_group)):
        said.append(recorded(group, records))
        there += [kept(record, group) for record in records]
    return said, sorted(there, key=lambda one: (one.row_index, one.sample_index))


@pytest.mark.parametrize("seed", range(10))
def test_completions_are_compared_in_order_whatever_entries_they_are_in(seed: int) -> None:
    said, there = spread_over_groups(seed)
    whole, seen = checker(*said), list[KeptCompletion]()
    assert list(whole.completions(iter(there), seen.append)) == []
    assert (whole.counts.completions, seen) == (len(there), there)
    chance = random.Random(seed)
    gone = set(chance.sample(range(len(there)), 5))
    left = [one for place, one in enumerate(there) if place not in gone]
    found = list(checker(*said).completions(iter(left)))
    assert [(one.row, one.sample) for one in found] == [
        (there[place].row_index, there[place].sample_index) for place in sorted(gone)
    ]
    assert all(what.endswith("is missing") for what in words(found))


def test_of_a_completion_that_two_entries_tell_of_the_first_counts() -> None:
    first, again = completion(0), completion(0, text="again")
    check = checker(recorded(0, [first, completion(1)]), recorded(0, [again]))
    assert list(check.completions([kept(first, 0), kept(completion(1), 0)])) == []
    assert check.counts.completions == 2


def test_completions_that_no_entry_tells_of_are_counted_by_group() -> None:
    there = [kept(completion(row), group) for row, group in ((0, 0), (1, 0), (2, 5), (3, 5), (4, 5),
                                                             (5, 7))]  # fmt: skip
    found = list(checker(recorded(0, [completion(0), completion(1)])).completions(there))
    assert words(found) == [
        "the completion of row 2, sample 0 and 2 more of group 5 are in no entry of the log: added "
        "by hand",
        "the completion of row 5, sample 0 is in no entry of the log: added by hand",
    ]
    assert [(one.row, one.sample, one.number) for one in found] == [(2, 0, None), (5, 0, None)]


def test_what_is_older_than_the_log_is_counted_and_no_fault() -> None:
    old = [kept(completion(row), 0, digest=None) for row in range(3)]
    adopted = checker(begun=EntryKind.ADOPTED)
    assert list(adopted.completions([*old, kept(completion(7), 1)])) != []
    assert adopted.counts.uncovered == 3
    of_all = checker()
    assert len(list(of_all.completions(old))) == 1, "a log from the beginning tells of all"
    assert of_all.counts.uncovered == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"record": None}, "was changed: it cannot be read"),
        ({"record": None, "lacks_key": True}, "was written with a key that is not among"),
        ({"digest": bytes(32)}, "has another digest than it had; the completion itself is as"),
        ({"record": completion(3, text="z")}, "its tokens, text or log-probabilities are not"),
        ({"record": completion(3, cost_usd=9.0)}, "entry 2 of the log tells of another one"),
        ({"month": month_of(MADE_AT) + 1}, "which is not its job's"),
        ({"month": None}, None),
        ({"group_index": 8}, "was moved to group 8 from group 0"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(change: Any, said: str | None) -> None:
    check = checker(recorded(0, [completion(3)]))
    found = list(check.completions([replace(kept(completion(3), 0), **change)]))
    if said is None:
        assert found == []
        return
    [one] = found
    assert said in one.what
    assert (one.row, one.sample, one.number) == (3, 0, 2)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_purge_left_is_held_to_the_facts_and_counted(is_told: bool) -> None:
    whole = completion(3)
    emptied = replace(whole, token_ids=(), text="", logprobs=(), row_id="", top_logprobs=None,
                      provenance=replace(whole.provenance, rejected=()))  # fmt: skip
    purge = (EntryKind.PURGED, {"rows": [[3, 3]] if is_told else [[4, 9]], "output": False})
    check = checker(recorded(0, [whole]), purge)
    found = list(check.completions([replace(kept(whole, 0), record=emptied)]))
    assert (found == [], check.counts.purged) == (is_told, int(is_told))
    text_left = replace(emptied, text="a b")
    again = checker(recorded(0, [whole]), purge)
    assert list(again.completions([replace(kept(whole, 0), record=text_left)])) != []
    assert again.counts.purged == 0


# --- prompts ------------------------------------------------------------------------------------
def planned(*rows: int) -> Said:
    groups = [
        replace(new_group(i, n), prompts=Artefact("file:///p", f"{i}" * 64, 1))
        for i, n in enumerate(rows)
    ]
    return EntryKind.PLANNED, entries.planned(groups, [])


def part(index: int, of: int, start: int, rows: int) -> KeptGroup:
    prompts = Prompts(Artefact("file:///p", f"{of}" * 64, 1), start, rows)
    return KeptGroup(index, prompts, Stage.VERIFY)


def test_groups_and_their_parts_have_the_prompts_that_were_planned() -> None:
    plan = planned(4, 6)
    cut = [part(0, 0, 0, 4), part(1, 1, 0, 4), part(FIRST_SPLIT_INDEX, 1, 4, 2)]
    assert list(checker(plan).groups(cut)) == []
    for there, said in (
        (cut[:2], "the prompts of group 1 are 6 rows, but its parts in the store have 4"),
        ([*cut, part(FIRST_SPLIT_INDEX + 1, 0, 0, 1)],
         "the prompts of group 0 are 4 rows, but its parts in the store have 5"),
        (cut[1:], "group 0 is missing from the store"),
        ([*cut, part(2, 1, 0, 0)], "group 2 is not in the log: it was added by hand"),
        ([*cut, part(FIRST_SPLIT_INDEX + 1, 7, 0, 1)],
         f"group {FIRST_SPLIT_INDEX + 1} has other prompts than were planned"),
    ):  # fmt: skip
        assert words(list(checker(plan).groups(there))) == [said]


def test_a_group_with_another_groups_prompts_is_found() -> None:
    found = words(list(checker(planned(4, 4)).groups([part(0, 0, 0, 4), part(1, 0, 0, 4)])))
    assert "group 1 has other prompts than were planned" in found


def test_groups_that_are_older_than_the_log_are_no_fault() -> None:
    adopted = checker(begun=EntryKind.ADOPTED)
    there = [part(0, 0, 0, 4), part(FIRST_SPLIT_INDEX, 0, 2, 2)]
    assert list(adopted.groups(there)) == []


# --- how groups ended ---------------------------------------------------------------------------
LOST = (EntryKind.LOST, entries.lost(0, 4, "it broke"))
DONE = (EntryKind.GROUP, entries.completed(0, 1, []))
KEPT = (EntryKind.KEPT, entries.completed(0, 1, []))
AGAIN = (EntryKind.RETRIED, entries.retried(False, 1, None, None))
ONE_ROW_AGAIN = (EntryKind.RETRIED, entries.retried(True, 1, None, None))
ENDED = (EntryKind.PUBLISHED, entries.ended("partial", None))
PURGED = (EntryKind.PURGED, {"rows": None, "why": "it is old", "output": False})


def ends(*log: Said, stage: Stage, error: str | None = None, **more: Any) -> list[str]:
    """What is found of a group that ended so, beside these entries."""
    group = replace(part(0, 0, 0, 4), stage=stage, last_error=error, **more)
    return words(list(checker(planned(4), *log).groups([group])))


@pytest.mark.parametrize(
    ("log", "stage", "error"),
    [
        ((DONE, ENDED), Stage.DONE, None),
        ((LOST, ENDED), Stage.FAILED, "it broke"),
        ((LOST, ENDED, PURGED), Stage.FAILED, None),
        ((KEPT, ENDED), Stage.CANCELLED, "the job ended"),
        ((ENDED,), Stage.CANCELLED, None),
        ((LOST, ENDED, AGAIN, DONE, ENDED), Stage.DONE, None),
        ((LOST, ENDED, AGAIN, ENDED), Stage.CANCELLED, "the job ended"),
        ((LOST, ENDED, ONE_ROW_AGAIN, ENDED), Stage.FAILED, "it broke"),
        ((LOST, ENDED, AGAIN), Stage.RECORD, None),
    ],
)
def test_a_group_that_ended_as_the_log_says_is_no_fault(
    log: tuple[Said, ...], stage: Stage, error: str | None
) -> None:
    assert ends(*log, stage=stage, error=error) == []


@pytest.mark.parametrize(
    ("log", "stage", "error", "said"),
    [
        ((DONE, ENDED), Stage.FAILED, "forged",
         "group 0 is failed, but by entry 3 of the log it is done"),
        ((DONE, ENDED), Stage.DONE, "forged", "the error of group 0 was changed"),
        ((LOST, ENDED), Stage.DONE, None,
         "group 0 is done, but by entry 3 of the log it is failed"),
        ((LOST, ENDED), Stage.FAILED, "forged", "the error of group 0 was changed"),
        ((LOST, ENDED), Stage.FAILED, None, "the error of group 0 was changed"),
        ((LOST, ENDED, PURGED), Stage.FAILED, "forged", "the error of group 0 was changed"),
        ((KEPT, ENDED), Stage.DONE, None,
         "group 0 is done, but by entry 3 of the log it is cancelled"),
        ((ENDED,), Stage.FAILED, "forged", "group 0 is failed, but no entry of the log says so"),
    ],
)  # fmt: skip
def test_a_group_that_did_not_end_so_is_named(
    log: tuple[Said, ...], stage: Stage, error: str | None, said: str
) -> None:
    assert ends(*log, stage=stage, error=error) == [said]


def test_an_error_under_a_key_that_is_not_here_is_not_called_changed() -> None:
    (said,) = ends(LOST, ENDED, stage=Stage.FAILED, error="[encrypted]", lacks_key=True)
    assert said.startswith("the error of group 0 was written with a key that is not among those")


# --- rejected rows ------------------------------------------------------------------------------
BAD = [RejectedRow(3, "r3", "bad_id", "why 3"), RejectedRow(7, "r7", "null_prompt", "why 7")]


def rejecting(*rows: RejectedRow) -> Said:
    return EntryKind.PLANNED, entries.planned([], rows)


def test_quarantined_rows_are_as_they_were_when_they_were_rejected() -> None:
    assert list(checker(rejecting(BAD[0]), rejecting(BAD[1])).rejected(BAD)) == []
    for there, said in (
        ([BAD[0]], "quarantined row 7 is missing"),
        ([*BAD, RejectedRow(9, "r9", "x", "y")],
         "quarantined row 9 is not in the log: it was added by hand"),
        ([BAD[0], replace(BAD[1], reason="another")], "quarantined row 7 was changed"),
        ([replace(BAD[0], row_id=None), BAD[1]], "quarantined row 3 was changed"),
    ):  # fmt: skip
        assert words(list(checker(rejecting(*BAD)).rejected(there))) == [said]
    adopted = checker(begun=EntryKind.ADOPTED)
    assert list(adopted.rejected(BAD)) == [], "they may be older than the log"


@pytest.mark.parametrize(
    ("left", "is_fine"),
    [
        ({"row_id": None, "reason": ""}, True),
        ({"row_id": None, "reason": "", "code": "other"}, False),
        ({"row_id": None}, False),
        ({"reason": ""}, False),
    ],
)
def test_a_purged_row_keeps_its_code(left: dict[str, Any], is_fine: bool) -> None:
    purge = (EntryKind.PURGED, {"rows": [[0, 5]], "output": False})
    check = checker(rejecting(*BAD), purge)
    found = list(check.rejected([replace(BAD[0], **left), BAD[1]]))
    assert (found == []) is is_fine
    not_purged = replace(BAD[1], row_id=None, reason="")
    assert len(list(checker(rejecting(*BAD), purge).rejected([BAD[0], not_purged]))) == 1
