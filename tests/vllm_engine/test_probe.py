"""What the probe says of sound and faulty cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice

import pytest
from vllm_engine.fake_core import VOCABULARY, FakeCore, Running

from specbatch.pipeline.engines.vllm.core import Emitted, Work
from specbatch.pipeline.engines.vllm.probe import Verdict, probe


def verdict_on(core: FakeCore) -> Verdict:
    return probe(core, VOCABULARY, "float32", 4)


def test_a_sound_core_may_speculate_on_mixed_batches() -> None:
    found = verdict_on(FakeCore(sequences=8))
    assert found == Verdict(True, True, True, True)
    assert found.in_words == "speculation gives what the same core gives without it"


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_a_core_of_few_sequences_is_sound_too(sequences: int) -> None:
    assert verdict_on(FakeCore(sequences=sequences)) == Verdict(True, True, True, True)


def test_what_a_core_drafts_itself_does_not_count_as_the_truth_without_drafts() -> None:
    core = FakeCore(sequences=8, faulty="drafts")
    core.own = []
    assert verdict_on(core) == Verdict(False, False, False, False)


class Trusting(FakeCore):
    """It verifies what it is given, and takes its own drafts as they are."""

    given: frozenset[str] = frozenset()

    def draft(self, drafts: Mapping[str, list[int]]) -> None:
        super().draft(drafts)
        self.given = frozenset(drafts)

    def step(self) -> list[Emitted]:
        emitted = super().step()
        self.given = frozenset()
        return emitted

    def _token(self, running: Running, drafted: bool) -> int:
        trusted = drafted and running.work.request_id not in self.given
        return 3 if trusted else super()._token(running, drafted)


def test_drafts_that_a_core_makes_itself_are_tried_too() -> None:
    core = Trusting(sequences=8)
    core.own = []
    found = probe(core, VOCABULARY, "float32", 4, drafts_itself=True)
    assert found == Verdict(False, False, False, False)
    assert "drafts of its own changed outputs: row 0, token 1" in found.in_words
    sound = FakeCore(sequences=8)
    sound.own = []
    assert probe(sound, VOCABULARY, "float32", 4, drafts_itself=True).faults == ()


def test_a_core_that_fails_mixed_batches_keeps_them_apart() -> None:
    found = verdict_on(FakeCore(sequences=8, faulty="mixed"))
    assert found == Verdict(True, False, True, True)
    assert "greedy and sampled requests run apart" in found.in_words


def test_a_core_that_draws_wrongly_under_drafts_does_not_draft_for_sampled_requests() -> None:
    found = verdict_on(FakeCore(sequences=8, faulty="sampled"))
    assert found == Verdict(True, True, False, True)
    assert "sampled requests run apart, without drafts: drafts of 4 changed" in found.in_words


def test_a_core_that_drafts_free_of_a_grammar_does_not_draft_for_requests_that_have_one() -> None:
    found = verdict_on(FakeCore(sequences=8, faulty="formed"))
    assert found == Verdict(True, True, True, False)
    assert "requests with a grammar run apart, without drafts: " in found.in_words
    assert "right drafts of 1 changed outputs under a grammar: row 0, token " in found.in_words


class Shifted(FakeCore):
    """Its masks are those of the place before."""

    def _formed(self, work: Work, token: int) -> int:
        return super()._formed(work, token) - 1


def test_a_core_that_puts_masks_into_the_wrong_row_is_seen_without_drafts() -> None:
    found = verdict_on(Shifted(sequences=8))
    assert not found.formed
    assert "row 0 left its grammar" in found.in_words


def test_a_core_that_drafts_change_does_not_speculate() -> None:
    found = verdict_on(FakeCore(sequences=8, faulty="drafts"))
    assert found == Verdict(False, False, False, False)
    assert "speculation is off: right drafts of 1 changed outputs" in found.in_words


def test_a_core_that_accepts_no_draft_does_not_speculate() -> None:
    core = FakeCore(sequences=8)
    core.deaf = True
    found = verdict_on(core)
    assert found == Verdict(False, False, False, False)
    assert "right drafts of 1 were never accepted" in found.in_words


class NearTies(FakeCore):
    """Another token where two were as likely, from the second run on."""

    def step(self) -> list[Emitted]:
        return [self._tied(event) for event in super().step()]

    def _tied(self, event: Emitted) -> Emitted:
        other = [token ^ 1 for token in event.token_ids]
        tops = [((t, o), (-0.5, -0.5)) for t, o in zip(event.token_ids, other, strict=True)]
        is_first = event.request_id.startswith(("probe-1-", "probe-8-"))
        return event._replace(tops=tops, token_ids=event.token_ids if is_first else other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_near_tie_is_no_fault(dtype: str) -> None:
    found = probe(NearTies(sequences=8), VOCABULARY, dtype, 4)
    assert not [fault for fault in found.faults if "changed" in fault]


class Doubtful(FakeCore):
    """Another token at the end of each drafted step, less likely by `gap`."""

    gap = 0.1

    def step(self) -> list[Emitted]:
        return [self._doubted(event) for event in super().step()]

    def _doubted(self, event: Emitted) -> Emitted:
        tokens = event.token_ids
        tops = [((t, t ^ 1), (-0.5, -0.5 - self.gap)) for t in tokens]
        decided = [*tokens[:-1], tokens[-1] ^ 1] if event.drafted else tokens
        return event._replace(tops=tops, token_ids=decided)


def test_how_near_a_tie_must_be_depends_on_the_dtype() -> None:
    core = Doubtful(sequences=8)
    assert probe(core, VOCABULARY, "bfloat16", 4) == Verdict(True, True, True, True)
    assert probe(core, VOCABULARY, "float32", 4) == Verdict(False, False, False, False)
    core.gap = 1.0
    assert probe(core, VOCABULARY, "bfloat16", 4) == Verdict(False, False, False, False)


@pytest.mark.parametrize("faulty", ["mixed", "drafts"])
def test_a_fault_says_where_and_what_was_decided_instead(faulty: str) -> None:
    found = verdict_on(FakeCore(sequences=8, faulty=faulty))
    assert found.faults
    for fault in found.faults:
        assert re.search(r"row \d, token ", fault)
        assert ": 3 instead of " in fault


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_probe_leaves_nothing_in_the_core(depth: int) -> None:
    core = FakeCore(sequences=8)
    assert probe(core, VOCABULARY, "float32", depth) == Verdict(True, True, True, True)
    assert core.step() == []
    assert core.batches[-1] == []


class Penalised(FakeCore):
    """A repetition penalty changes its tokens, but for drafted ones where it is `forgetful`."""

    forgetful = False

    def _token(self, running: Running, drafted: bool) -> int:
        likeliest = super()._token(running, drafted)
        self.likeliest.append(likeliest)
        penalised = running.work.params.repetition_penalty != 1
        return likeliest ^ 1 if penalised and not (drafted and self.forgetful) else likeliest

    def step(self) -> list[Emitted]:
        self.likeliest: list[int] = []
        events, of_each = super().step(), iter(self.likeliest)
        return [
            event._replace(
                tops=[((t, t ^ 1), (-0.5, -3.0)) for t in islice(of_each, len(event.token_ids))]
            )
            for event in events
        ]


@pytest.mark.parametrize("forgetful", [False, True])
def test_drafts_that_take_a_penalty_off_are_a_fault(forgetful: bool) -> None:
    core = Penalised(sequences=8)
    core.forgetful = forgetful
    found = verdict_on(core)
    assert found.drafts is not forgetful
    assert ("take the repetition penalty off" in found.in_words) is forgetful


class Stubborn(FakeCore):
    """It verifies what it drafted itself, whatever it is given."""

    def draft(self, drafts: Mapping[str, list[int]]) -> None:
        super().draft({n: list(self.own_draft(n)) if of else [] for n, of in drafts.items()})


def test_a_core_that_verifies_its_own_drafts_instead_of_those_given_does_not_speculate() -> None:
    core = Stubborn(sequences=8)
    core.own = []
    found = verdict_on(core)
    assert not found.drafts
    assert "other drafts than the given ones were accepted" in found.in_words
