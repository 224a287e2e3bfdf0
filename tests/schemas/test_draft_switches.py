"""What a switch of drafting covers: any switch that fits a row and a proposer is enough."""

from __future__ import annotations

import pytest

from specbatch.schemas.draft_switches import (
    ALL_ON,
    DraftSwitch,
    DraftSwitches,
    OffHere,
    RowScope,
    SwitchScope,
)

ROW = RowScope("search", "nightly", "de")
NGRAM, SMALL = "ngram", "draft-model@small"


def off(*scopes: SwitchScope) -> DraftSwitches:
    return DraftSwitches(tuple(DraftSwitch(scope, 1.0, "alice", "it is slow") for scope in scopes))


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        (SwitchScope(), {NGRAM, SMALL}),
        (SwitchScope(tenant="search"), {NGRAM, SMALL}),
        (SwitchScope(tenant="ads"), set()),
        (SwitchScope(job_name="nightly"), {NGRAM, SMALL}),
        (SwitchScope(job_name="hourly"), set()),
        (SwitchScope(tag="de"), {NGRAM, SMALL}),
        (SwitchScope(tag="fr"), set()),
        (SwitchScope(proposer=NGRAM), {NGRAM}),
        (SwitchScope(proposer=SMALL), {SMALL}),
        (SwitchScope(proposer="draft-model"), {SMALL}),  # all draft models
        (SwitchScope(proposer="draft-model@big"), set()),
        (SwitchScope("search", "nightly", "de", NGRAM), {NGRAM}),
        (SwitchScope("search", "nightly", "fr", NGRAM), set()),  # all of it must fit
    ],
)
def test_a_scope_covers_what_has_all_of_its_values(scope: SwitchScope, covered: set[str]) -> None:
    assert {name for name in (NGRAM, SMALL) if off(scope).is_off(ROW, name)} == covered


def test_any_switch_that_fits_is_enough_and_the_oldest_is_named() -> None:
    switches = off(SwitchScope(tag="fr"), SwitchScope(proposer=NGRAM), SwitchScope())
    assert switches.of(ROW, NGRAM) == switches.active[1]
    assert switches.of(ROW, SMALL) == switches.active[2]
    assert not ALL_ON.is_off(ROW, NGRAM)


def test_a_switch_for_a_tag_does_not_cover_rows_without_one() -> None:
    assert not off(SwitchScope(tag="de")).is_off(RowScope("search", "nightly"), NGRAM)


def test_a_scope_in_words_names_its_values_and_its_kind_does_not() -> None:
    scope = SwitchScope(tenant="search", tag="de")
    assert (str(scope), scope.kind) == ("tenant search, tag de", "tenant+tag")
    assert str(SwitchScope()) == SwitchScope().kind == "everything"


def test_what_does_not_pay_here_counts_for_one_model_and_one_class() -> None:
    switch = DraftSwitch(SwitchScope(proposer="draft-model"), 1.0, "alice", "drafts do not pay")
    here = DraftSwitches((), (OffHere("draft-model", "exact/f32/1", switch),))
    assert here.of(ROW, "draft-model") is switch
    assert here.of(ROW, "draft-model@other") is None
    assert here.by_operator(ROW, "draft-model") is None
    assert here.in_class("exact/f32/1") is here
    assert not here.in_class("exact/bf16/1").is_off(ROW, "draft-model")
    unfit = DraftSwitches((), (OffHere("draft-model", "", switch),))
    assert unfit.in_class("exact/bf16/1").is_off(ROW, "draft-model")
