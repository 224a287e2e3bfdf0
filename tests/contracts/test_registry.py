"""The model registry: versions, deployments, and what is left when a change is cut off."""

from __future__ import annotations

from functools import partial

import pytest
from contracts.shorthand import successes, together

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.registry import DeployScope, NewModel, deployed_for

ALL, NEWS = DeployScope(), DeployScope(tag="news")


def model(fingerprint: str, name: str = "docs", parent: str | None = None) -> NewModel:
    return NewModel(fingerprint, name, f"/models/{fingerprint}", parent, {"seed": 7})


def live(store: Store) -> dict[str, str]:
    return {one.scope.words: one.fingerprint for one in store.deployments()}


def test_files_are_registered_once_and_versions_count_by_name(store: Store) -> None:
    first, is_new = store.add_model(model("aa"))
    assert (first.label, first.origin, is_new) == ("docs:1", {"seed": 7}, True)
    assert first.added_by
    assert store.add_model(model("bb", parent="aa"))[0].label == "docs:2"
    assert store.add_model(model("cc", "code"))[0].label == "code:1"
    again, is_new = store.add_model(model("aa", "another"))
    assert (again, is_new) == (first, False)
    assert [one.label for one in store.models()] == ["code:1", "docs:1", "docs:2"]


def test_versions_that_are_added_at_once_get_numbers_of_their_own(store: Store) -> None:
    successes(together(*(partial(store.add_model, model(f"m{i}")) for i in range(4))))
    assert sorted(one.version for one in store.models()) == [1, 2, 3, 4]


def test_one_model_drafts_for_a_scope_and_its_history_stays(store: Store) -> None:
    for fingerprint in ("aa", "bb"):
        store.add_model(model(fingerprint))
    store.promote("aa", ALL, "the first")
    store.promote("bb", ALL, "better on the sample")
    store.promote("aa", NEWS, "news are not for bb")
    assert live(store) == {"everything": "bb", "tag news": "aa"}
    ended, *_ = store.deployments(history=True)
    assert (ended.fingerprint, ended.reason) == ("aa", "the first")
    assert ended.ended_at is not None
    assert ended.ended_by
    assert len(store.deployments(history=True)) == 3


def test_a_rollback_brings_back_what_was_before_but_nothing_retired(store: Store) -> None:
    with pytest.raises(UsageError, match="no model is deployed for everything"):
        store.roll_back(ALL, "there is none")
    for fingerprint in ("aa", "bb", "cc"):
        store.add_model(model(fingerprint))
        store.promote(fingerprint, ALL, "next")
    with pytest.raises(UsageError, match="docs:3 drafts for everything"):
        store.retire("cc")
    assert store.retire("bb").retired_at is not None
    begun = store.roll_back(ALL, "cc is bad")
    assert begun is not None
    assert begun.fingerprint == "aa"
    with pytest.raises(UsageError, match="docs:2 was retired by"):
        store.promote("bb", ALL, "again")
    with pytest.raises(UsageError, match="no model with fingerprint dd"):
        store.promote("dd", ALL, "unknown")
    assert live(store) == {"everything": "aa"}


def test_rollbacks_go_back_further_each_time_and_bring_nothing_bad_back(store: Store) -> None:
    for fingerprint in ("aa", "bb", "cc"):
        store.add_model(model(fingerprint))
        store.promote(fingerprint, ALL, "next")
    backwards = [store.roll_back(ALL, "bad") for _ in range(3)]
    assert [one and one.fingerprint for one in backwards] == ["bb", "aa", None]
    store.promote("aa", ALL, "next")
    store.promote("bb", ALL, "next")
    store.roll_back(ALL, "bb is bad")
    store.promote("cc", ALL, "next")
    begun = store.roll_back(ALL, "cc is bad")
    assert begun is not None
    assert begun.fingerprint == "aa"
    reasons = {one.fingerprint: one.end_reason for one in store.deployments(history=True)}
    assert (reasons["bb"], reasons["cc"]) == ("bb is bad", "cc is bad")


def test_a_rollback_of_the_first_leaves_wider_scopes(store: Store) -> None:
    store.add_model(model("aa"))
    store.promote("aa", NEWS, "first")
    assert store.roll_back(NEWS, "bad") is None
    assert live(store) == {}


def test_of_promotions_at_once_one_model_is_left(store: Store) -> None:
    names = ["aa", "bb", "cc", "dd"]
    for name in names:
        store.add_model(model(name))
    together(*(partial(store.promote, name, ALL, "me") for name in names))
    assert len(store.deployments()) == 1


def test_the_narrowest_scope_counts(store: Store) -> None:
    scopes = {
        "aa": ALL,
        "bb": DeployScope(tenant="acme"),
        "cc": DeployScope(job_name="nightly"),
        "dd": DeployScope(tag="news"),
        "ee": DeployScope(tenant="acme", tag="news"),
    }
    for fingerprint, scope in scopes.items():
        store.add_model(model(fingerprint))
        store.promote(fingerprint, scope, "why not")
    deployed = store.deployments()
    assert deployed_for(deployed, "other", "weekly") == {None: "aa", "news": "dd"}
    assert deployed_for(deployed, "other", "nightly") == {None: "cc", "news": "cc"}
    assert deployed_for(deployed, "acme", "weekly") == {None: "bb", "news": "ee"}
    assert deployed_for((), "acme", "weekly") == {}
