"""`specbatch rollout`: start, list, show, stop and settle."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.worker import registered
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.registry import PairTrial
from specbatch.schemas.rollouts import Observed
from support.models import TinyPair


@pytest.fixture(autouse=True)
def deployed(monkeypatch: pytest.MonkeyPatch, cli: Any, tiny_pair: TinyPair) -> None:
    """Two versions; the first drafts for everything."""
    monkeypatch.setenv("SPECBATCH_ACTOR", "alice@laptop")
    for folder in (tiny_pair.draft, tiny_pair.verifier):
        assert cli("models", "add", "docs", str(folder)).code == 0
    assert cli("models", "promote", "docs:1", "--reason", "the first").code == 0


def observe(groups: int, candidate: int, present: int) -> None:
    with closing(make_store(load_settings())) as store:
        for index in range(groups):
            (rollout,) = store.rollouts()
            if rollout.outcome is not None:
                break
            mine = index % 2 == 0
            tokens = (candidate if mine else present) + index % 5
            seen = Observed(rollout.share, mine, tokens, 2.0, tokens // 2, 3, candidate, present)
            store.observe_rollout(rollout.number, "job", index, seen)


def test_a_candidate_is_tried_shown_and_promoted(cli: Any, tiny_pair: TinyPair) -> None:
    assert cli("rollout").out.startswith("no rollouts: start one with ")
    begun = cli("rollout", "start", "docs", "--steps", "50,100", "--reason", "trained on Monday")
    assert begun.out == "rollout 1: docs:2 for everything, drafts for 50% of groups\n"
    assert registered(load_settings(), ("models:docs",)).loaded == [
        str(tiny_pair.draft.resolve()),
        str(tiny_pair.verifier.resolve()),
    ]
    observe(2, 1000, 10)
    listed = cli("rollout", "list").out
    assert "docs:2" in listed
    assert "drafts for 50% of groups" in listed
    shown = cli("rollout", "show", "1").out.splitlines()
    assert shown[1].endswith("by alice@laptop: trained on Monday")
    assert "2 groups, 1 with the candidate" in shown[2]
    assert any("per device second, candidate: 500 (one group)" in line for line in shown)
    assert any("shadow draft, present model: 3.333 (95 %: " in line for line in shown)
    assert cli("rollout", "settle").out == "no candidate waits to be promoted\n"
    observe(80, 1000, 10)
    assert "better: waits to be promoted" in cli("rollout", "list").out
    assert cli("rollout", "settle").out == "rollout 1 for everything: promoted\n"
    assert "everything" in cli("models", "list").out
    found = cli("models", "show", "docs:2", "--json").json
    assert found["deployments"][0]["reason"].startswith("rollout 1: better")
    ended = cli("rollout", "show", "1", "--json").json
    assert (ended["outcome"], ended["better"] >= 50) == ("better", True)
    figures = ended["figures"]["tokens per device second"]
    assert figures["candidate"]["low"] > figures["present model"]["high"]


def test_a_rollout_is_stopped_and_stays_in_the_history(cli: Any) -> None:
    begun = cli("rollout", "start", "docs:2", "--tag", "news", "--reason", "news first")
    assert begun.out == "rollout 1: docs:2 for tag news, in shadow\n"
    missed = cli("rollout", "stop", "--tag", "old", "--reason", "x")
    said = "there is no rollout in progress for tag old; in progress: 1 for tag news"
    assert missed.complaint == said
    done = cli("rollout", "stop", "1", "--reason", "the wrong one")
    assert done.out == "rollout 1 is stopped: its candidate drafts no more\n"
    assert cli("rollout", "list").out.startswith("no rollouts")
    assert "stopped" in cli("rollout", "list", "--history").out
    (one,) = json.loads(cli("rollout", "list", "--history", "--json").out)
    assert (one["end_reason"], one["ended_by"]) == ("the wrong one", "alice@laptop")
    assert "the wrong one" in cli("rollout", "show", "1").out


@pytest.mark.parametrize("numeric_class", ["", "a-class"])
def test_what_a_trial_found_of_a_model_counts(cli: Any, numeric_class: str) -> None:
    models = cli("models", "list", "--json").json
    with closing(make_store(load_settings())) as store:
        of = ("f" * 64, models[1]["fingerprint"], numeric_class)
        store.add_pair_trial(PairTrial(*of, False, "they must share one vocabulary", {}))
    begin = ("rollout", "start", "docs:2", "--tag", "news", "--reason", "x")
    done = cli("models", "promote", "docs:2", "--tag", "old", "--reason", "x")
    assert done.code == (0 if numeric_class else 2)
    for refused in (done, cli(*begin)):
        assert "they must share one vocabulary" in refused.err
    assert cli(*begin).code == 2, "its drafts would be off, and no rollout can judge that"
    with closing(make_store(load_settings())) as store:
        beside_another = ("e" * 64, models[1]["fingerprint"], "a-class")
        store.add_pair_trial(PairTrial(*beside_another, True, "drafts can pay", {}))
    assert cli(*begin).code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start"], "needs a model"),
        (["start", "docs"], "needs --reason"),
        (["start", "docs:9", "--reason", "x"], "no registered model"),
        (["start", "docs:1", "--reason", "x"], "drafts for everything already"),
        (["start", "docs", "--steps", "5,1,100", "--reason", "x"], "rising percentages"),
        (["start", "docs", "--steps", "1,5", "--reason", "x"], "end with 100"),
        (["start", "docs", "--steps", "100", "--reason", "x"], "end with 100"),
        (["start", "docs", "--steps", "a,100", "--reason", "x"], "rising percentages"),
        (["start", "docs", "--json", "--reason", "x"], "has no --json"),
        (["show"], "needs a number"),
        (["show", "7"], "no rollout '7'"),
        (["list", "docs"], "takes no model"),
        (["list", "--tag", "news"], "takes no --tag\n"),
        (["settle", "--steps", "5,100"], "takes no --steps"),
        (["stop", "--history", "--reason", "x"], "takes no --history"),
        (["stop", "--reason", "x"], "no rollout in progress for everything; in progress: none"),
        (["stop", "7", "--reason", "x"], "no rollout '7' in progress; in progress: none"),
        (["stop", "7", "--tag", "x", "--reason", "x"], "takes a number, or --tenant"),
    ],
)
def test_what_cannot_be_done_is_said(cli: Any, arguments: list[str], said: str) -> None:
    done = cli("rollout", *arguments)
    assert (done.code, said in done.err) == (2, True), done.err
    assert cli("rollout", "list", "--history").out.startswith("no rollouts")
