"""How much of a job is drafted ahead: of a pilot little, of drafts that are worth it all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitch, DraftSwitches, SwitchScope
from specbatch.schemas.records import JobRow, PromptRow
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation import PRE_GENERATED, AcceptanceCount

ROWS = [PromptRow(i, f"row-{i}", (1, 2), 0) for i in range(256)]
TOKENS = 64  # of a completion at most
MOST = 1 / 64  # of a job's rows: it costs less than 2 % even if a draft costs what a token does
GOOD = AcceptanceCount(PRE_GENERATED, None, 95.0, 100.0)
POOR = AcceptanceCount(PRE_GENERATED, None, 5.0, 100.0)


class Priors:
    """A store that knows nothing but how drafts fared."""

    def __init__(self, *counts: AcceptanceCount) -> None:
        self._counts = counts

    def acceptance(self, _tenant: str, _name: str) -> tuple[AcceptanceCount, ...]:
        return self._counts


def job() -> JobRow:
    class Named:
        job_id, tenant, name = "job", "default", "nightly"

    return cast(JobRow, Named())


def spec_of(group_size: int = 64, **speculation: Any) -> JobSpec:
    values: dict[str, Any] = {
        "input": {"uri": "in"},
        "output": {"uri": "out"},
        "verifier": "v",
        "proposer": "p",
        "sampling": {"max_tokens": TOKENS},
        "group_size": group_size,
    }
    return JobSpec.model_validate(values | {"speculation": speculation})


def rows_ahead(drafting: Drafting, spec: JobSpec, groups: int) -> list[int]:
    """Of each group, how many rows are drafted ahead."""
    rows = ROWS[: spec.group_size]
    return [
        len(drafting.rows_ahead(job(), spec, rows)) if drafting.proposes(job(), spec, index) else 0
        for index in range(groups)
    ]


def drafting_of(
    *counts: AcceptanceCount, beside: bool = False, off: DraftSwitches = ALL_ON
) -> Drafting:
    return Drafting(cast(Store, Priors(*counts)), Objects(), beside, lambda: off)


@pytest.mark.parametrize("counts", [(), (POOR,)])
@pytest.mark.parametrize("group_size", [1, 7, 64, 256])
def test_a_pilot_is_a_small_part_of_a_job_of_any_length(
    counts: tuple[AcceptanceCount, ...], group_size: int
) -> None:
    drafted = rows_ahead(drafting_of(*counts), spec_of(group_size), 1024)
    for groups in range(1, 1025):
        assert sum(drafted[:groups]) <= MOST * groups * group_size
        assert group_size * groups * TOKENS >= 65_536 or not any(drafted[:groups]), (
            "too short to pay for one"
        )
    assert any(drafted), "a long job has pilots"


def test_all_rows_are_drafted_ahead_where_that_was_worth_it_or_is_asked_for() -> None:
    assert rows_ahead(drafting_of(GOOD), spec_of(), 3) == [64, 64, 64]
    assert rows_ahead(drafting_of(), spec_of(pregenerate=True), 3) == [64, 64, 64]


def test_nothing_is_drafted_ahead_beside_a_verifier_with_a_draft_model() -> None:
    assert sum(rows_ahead(drafting_of(GOOD, beside=True), spec_of(), 16)) == 0


# --- switched off by an operator ------------------------------------------------------------------


def off(**scope: str) -> DraftSwitches:
    return DraftSwitches((DraftSwitch(SwitchScope(**scope), 1.0, "alice", "it is slow"),))


@pytest.mark.parametrize("scope", [{}, {"tenant": "default"}, {"proposer": PRE_GENERATED}])
def test_nothing_is_drafted_ahead_that_is_switched_off(scope: dict[str, str]) -> None:
    drafting = drafting_of(GOOD, off=off(**scope))
    for spec in (spec_of(), spec_of(pregenerate=True), spec_of(pregenerate_tokens=32)):
        assert not drafting.proposes(job(), spec, 0)
        assert drafting.length(job(), spec) == 0, "of a group that waited for drafts already"
        assert drafting.rows_ahead(job(), spec, ROWS) == []


def test_only_rows_of_a_tag_that_is_switched_off_are_left_out() -> None:
    drafting, spec = drafting_of(GOOD, off=off(tag="de")), spec_of()
    tagged = replace(ROWS[0], tag="de")
    assert drafting.proposes(job(), spec, 0)
    assert drafting.rows_ahead(job(), spec, [tagged, *ROWS[1:]]) == ROWS[1:]


def test_other_proposers_that_are_switched_off_change_nothing_ahead() -> None:
    drafting = drafting_of(GOOD, off=off(proposer="draft-model"))
    assert rows_ahead(drafting, spec_of(), 3) == [64, 64, 64]
