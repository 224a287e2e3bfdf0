"""What raises in a step costs the row at fault; its neighbours keep their bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts
from engine.faulty import FaultyDecoder, FaultyProposer, real_tokens, spoil

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.proposers.guarded import OPEN_SEC, PATIENCE, GuardedProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.records import FinishReason, SamplingParams
from support.grids import pairwise
from support.models import TinyPair

POISON = 299  # never sampled, only ever in a prompt
PARAMS = SamplingParams(
    max_tokens=24, temperature=0.8, top_p=0.95, ignore_eos=True, bad_token_ids=(POISON,)
)


def requests(count: int = 20, depth: int | None = None, bad: tuple[int, ...] = ()) -> list[Request]:
    asked = []
    for i, prompt in enumerate(prompts(count)):
        poison = (POISON,) if i in bad else ()
        asked.append(Request(str(i), (*poison, *prompt), PARAMS, seed=1000 + i, depth=depth))
    return asked


def poisoned(batch: DecoderBatch) -> Exception | None:
    """Any pass with the poisonous token in it raises."""
    return IndexError("index out of range in self") if (batch.ids == POISON).any() else None


def assert_the_others_are_unharmed(
    asked: list[Request], got: dict[str, Completion], verifier: Path, bad: tuple[int, ...] = ()
) -> None:
    for i, request in enumerate(asked):
        if i not in bad:
            assert_same(got[request.request_id], baseline_of(verifier)(request))


@pairwise(bad=[(0,), (19,), (3, 4, 11)], depth=[0, 4, None], budget=[2048, 13])
def test_a_row_that_makes_its_pass_raise_fails_alone(
    tiny_pair: TinyPair, bad: tuple[int, ...], depth: int | None, budget: int
) -> None:
    asked = requests(20, depth, bad)
    one = bench(tiny_pair.verifier, tiny_pair.draft, max_batch_tokens=budget)
    spoil(one, poisoned)
    got = one.add(*asked).run()
    for i in bad:
        assert got[str(i)].finish_reason is FinishReason.ERROR
        assert got[str(i)].token_ids == ()
        message = got[str(i)].error or ""
        assert message.startswith("step ")
        assert message.endswith("at token 0: IndexError: index out of range in self")
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier, bad)
    assert one.engine.stats.raised_passes >= 1
    one.assert_all_blocks_are_free()


def test_a_bad_row_among_many_costs_few_passes(tiny_pair: TinyPair) -> None:
    passes = []
    for bad in ((), (17,)):
        one = bench(tiny_pair.verifier)
        faulty = spoil(one, poisoned)
        one.add(*requests(64, 0, bad)).run()
        passes.append(faulty.passes)
    assert passes[1] <= passes[0] + 1 + 2 * 6


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_pass_that_raises_once_costs_nobody_anything(
    tiny_pair: TinyPair, at: int, depth: int
) -> None:
    """All of its keys and values were written by then; they are written again."""
    asked = requests(20, depth)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    faulty = spoil(one, lambda _: RuntimeError("a hiccup") if faulty.passes == at else None)
    got = one.add(*asked).run()
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier)
    assert one.engine.stats.raised_passes == 1
    one.assert_all_blocks_are_free()


@pytest.mark.parametrize("depth", [0, 4])
def test_a_row_whose_verdict_raises_fails_alone(tiny_pair: TinyPair, depth: int) -> None:
    bad = 6
    asked = requests(20, depth)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    sampler = one.engine._sampler

    def verify(logits: Any, draft: Any, offsets: Any, counters: Any, sampling: Any) -> Any:
        verdict = sampler.verify(logits, draft, offsets, counters, sampling)
        if ((counters[:, 0] == 1000 + bad) & (counters[:, 1] == 9)).any():
            raise ValueError("no such penalty")
        return verdict

    one.engine._sampler = replace(sampler, verify=verify)
    got = one.add(*asked).run()
    assert got[str(bad)].finish_reason is FinishReason.ERROR
    assert "ValueError: no such penalty" in (got[str(bad)].error or "")
    expected = baseline_of(tiny_pair.verifier)(asked[bad]).token_ids
    so_far = len(got[str(bad)].token_ids)
    assert 0 < so_far <= 9
    assert got[str(bad)].token_ids == expected[:so_far]
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier, (bad,))
    one.assert_all_blocks_are_free()


def test_a_watch_over_the_text_that_raises_fails_its_row_alone(tiny_pair: TinyPair) -> None:
    def watch() -> Callable[[int], bool]:
        def ends(_: int) -> bool:
            raise UnicodeError("half a letter")

        return ends

    asked = requests(8, 4)
    asked[3] = replace(asked[3], watch_text=watch)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    got = one.add(*asked).run()
    assert (got["3"].error or "").endswith("UnicodeError: half a letter")
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier, (3,))
    one.assert_all_blocks_are_free()


def test_a_bad_row_all_by_itself_is_told_from_a_bad_engine(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier)
    spoil(one, poisoned)
    got = one.add(*requests(1, 0, (0,))).run()
    assert got["0"].finish_reason is FinishReason.ERROR
    after = requests(3)[1:]
    got = one.add(*after).run()
    for request in after:
        assert_same(got[request.request_id], baseline_of(tiny_pair.verifier)(request))
    one.assert_all_blocks_are_free()


@pytest.mark.parametrize("count", [1, 7])
def test_when_nothing_goes_through_it_is_no_row_s_fault(tiny_pair: TinyPair, count: int) -> None:
    one = bench(tiny_pair.verifier).add(*requests(count))
    spoil(one, lambda _: RuntimeError("the device fell over"))
    with pytest.raises(RuntimeError, match="the device fell over"):
        one.step()
    assert one.finished == {}


# --- memory ------------------------------------------------------------------------------------
TOO_LITTLE: list[Callable[[], Exception]] = [
    lambda: MemoryError("no memory for a pass"),
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
]


@pairwise(error={type(make()).__name__: make for make in TOO_LITTLE}, most=[1, 3, 40], depth=[0, 4])
def test_where_memory_runs_out_passes_become_smaller_and_bits_stay(
    tiny_pair: TinyPair, error: Callable[[], Exception], most: int, depth: int
) -> None:
    asked = requests(8, depth)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    spoil(one, lambda batch: error() if real_tokens(batch) > most else None)
    got = one.add(*asked).run()
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier)
    assert one.engine.stats.raised_passes >= 1
    one.assert_all_blocks_are_free()


def test_what_a_failed_pass_had_made_is_gone_when_a_smaller_one_is_tried(
    tiny_pair: TinyPair,
) -> None:
    one = bench(tiny_pair.verifier).add(*requests(8))
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Full(FaultyDecoder):
        def forward(self, batch: DecoderBatch) -> torch.Tensor:
            alive.extend(ref() is not None for ref in made)
            logits = super().forward(batch)
            if len(made) < 3:
                made.append(weakref.ref(logits))
                raise MemoryError("none left")
            return logits

    one.runners[0]._decoder = Full(one.runners[0]._decoder, lambda _: None)  # type: ignore[assignment]  # forwards the rest
    one.step()
    assert len(made) == 3
    assert alive
    assert not any(alive)


def test_memory_for_nothing_at_all_is_the_engine_s_failure(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier).add(*requests(5))
    spoil(one, lambda _: MemoryError("none left"))
    with pytest.raises(MemoryError, match="none left"):
        one.step()


def test_a_lost_device_is_not_taken_apart(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier).add(*requests(5))
    faulty = spoil(one, lambda _: torch.AcceleratorError("CUDA error: unspecified launch failure"))
    with pytest.raises(torch.AcceleratorError):
        one.step()
    assert faulty.passes == 1


# --- proposers ---------------------------------------------------------------------------------
def with_faulty_proposer(pair: TinyPair, method: str, error: Exception) -> tuple[Bench, Any]:
    drafting = bench(pair.draft).runners[0]
    faulty = FaultyProposer(DraftModelProposer(drafting), method, error)
    one = bench(pair.verifier, others=[faulty])
    one.runners.append(drafting)
    return one, faulty


@pytest.mark.parametrize("method", ["available", "propose", "on_verified", "forget"])
def test_a_proposer_that_raises_costs_its_drafts(tiny_pair: TinyPair, method: str) -> None:
    asked = requests(12, 4)
    one, faulty = with_faulty_proposer(tiny_pair, method, RuntimeError("no idea"))
    got = one.add(*asked).run()
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier)
    assert faulty.calls >= PATIENCE
    assert one.engine.stats.proposer_failures == faulty.calls
    assert one.engine.stats.raised_passes == 0
    if method == "propose":
        assert faulty.calls == PATIENCE, "then it is disabled"
        assert sum(c.proposed for c in got.values()) == 0
    one.assert_all_blocks_are_free()


def test_what_a_proposer_raises_is_quoted_in_no_decision(
    tiny_pair: TinyPair, caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions are kept with every job of the engine, and an error may quote another's texts."""
    one, _ = with_faulty_proposer(tiny_pair, "propose", ValueError("secret 4711"))
    one.engine.prime("mine", ())
    one.engine.prime("theirs", ())
    one.add(*requests(4, 4)).run()
    for job in ("mine", "theirs"):
        (reason,) = [d.reason for d in one.engine.lessons(job).decisions if "disabled" in d.reason]
        assert reason.endswith("in a row and is disabled for 60 s: ValueError")
    assert "is disabled for 60 s: ValueError: secret 4711" in caplog.text, "a log has the whole"


@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_draft_model_that_raises_half_way_starts_anew(tiny_pair: TinyPair, at: int) -> None:
    """Its own verifier drafts: what it says after the failure must be right again."""
    asked = requests(12, 4)
    one = bench(tiny_pair.verifier, tiny_pair.verifier)
    faulty = spoil(
        one, lambda _: RuntimeError("a hiccup") if faulty.passes == at else None, model=1
    )
    got = one.add(*asked).run()
    assert_the_others_are_unharmed(asked, got, tiny_pair.verifier)
    assert one.engine.stats.proposer_failures == 1
    assert sum(c.accepted for c in got.values()) == sum(c.proposed for c in got.values()) > 0
    one.assert_all_blocks_are_free()


def test_a_lost_device_is_no_failure_of_the_proposer_s(tiny_pair: TinyPair) -> None:
    one, _ = with_faulty_proposer(tiny_pair, "propose", DeviceLostError("gone"))
    with pytest.raises(DeviceLostError):
        one.add(*requests(2, 4)).run()


def test_a_disabled_proposer_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Proposer):
        name = "broken"
        asked = 0
        works = False

        def available(self, _: Any) -> int:
            return 5

        def propose(self, sequences: Any, _: Any) -> list[list[int]]:
            self.asked += 1
            if not self.works:
                raise RuntimeError("no idea")
            return [[1] for _ in sequences]

    now = 0.0
    broken = Broken()
    failures: list[float] = []
    opened: list[str] = []
    guarded = GuardedProposer(
        broken, lambda: failures.append(now), lambda _, why: opened.append(why), lambda: now
    )
    row: Any = object()

    def drafts() -> list[list[int]]:
        return guarded.propose([row], [1]) if guarded.available(row) else []

    for _ in range(PATIENCE):
        assert drafts() == [[]]
    assert drafts() == []
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "is disabled for 60 s" in caplog.text
    assert opened == [
        f"proposer broken failed {PATIENCE} times in a row and is disabled for 60 s: RuntimeError"
    ]
    now = OPEN_SEC + 1
    assert drafts() == [[]], "one more try"
    assert drafts() == [], "which failed"
    now *= 3
    broken.works = True
    assert drafts() == [[1]]
    broken.works = False
    assert drafts() == [[]]
    assert drafts() == [[]], "a success buys patience again"
    assert len(failures) == PATIENCE + 3
