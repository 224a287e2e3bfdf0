"""What an engine tells who measures it: every step, to the last tick, and nothing changes by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from engine.decoding import AMPLE_BLOCKS, Bench, bench, prompts, runner_of

from specbatch.pipeline.engines.contract import Cohort, Completion, Request
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.speculation.drift import divergence
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.schemas.figures import StepFigures
from specbatch.schemas.records import FinishReason, SamplingParams, Verification
from specbatch.schemas.speculation import ALL_PROPOSERS
from support.engines import loaded
from support.models import TinyPair

SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, ignore_eos=True)
DRAFT_MODEL = frozenset({"draft-model"})


@dataclass
class Recorder:
    """Keeps all that it is told."""

    steps: list[StepFigures] = field(default_factory=list)
    first: list[tuple[str, float]] = field(default_factory=list)
    collapses: list[tuple[str, str, bool]] = field(default_factory=list)
    ended: list[tuple[str, float]] = field(default_factory=list)
    turns: list[tuple[str, str, bool]] = field(default_factory=list)
    drifts: list[tuple[str, float]] = field(default_factory=list)

    def stepped(self, step: StepFigures) -> None:
        self.steps.append(step)

    def first_token(self, job_id: str, sec: float) -> None:
        self.first.append((job_id, sec))

    def finished(self, job_id: str, sec_per_token: float) -> None:
        self.ended.append((job_id, sec_per_token))

    def drafting_switched(self, job_id: str, proposer: str, is_off: bool) -> None:
        self.turns.append((job_id, proposer, is_off))

    def acceptance_collapsed(self, job_id: str, proposer: str, is_far_below: bool) -> None:
        self.collapses.append((job_id, proposer, is_far_below))

    def drifted(self, proposer: str, nats: float) -> None:
        self.drifts.append((proposer, nats))


def requests(count: int, **values: object) -> list[Request]:
    made = [
        Request(f"j/{i}/0", prompt, SAMPLED, seed=7 * i + 1, depth=3, route=Cohort("job"))
        for i, prompt in enumerate(prompts(count, shortest=3, longest=40))
    ]
    return [replace(request, **values) for request in made]  # type: ignore[arg-type]  # fields of it


def test_steps_add_up_to_what_the_engine_did(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.draft, observer=told, max_sequences=4)
    done = made.add(*requests(9)).run()
    stats = made.engine.stats
    assert len(told.steps) == stats.steps
    ticks = [sum(kinds) for kinds in zip(*(step.ticks for step in told.steps), strict=True)]
    assert ticks == stats.time
    assert sum(len(step.passes) for step in told.steps) == stats.steps  # nothing raised
    depths = sum((Counter(step.depths) for step in told.steps), Counter[tuple[str, int]]())
    assert sum(tokens * times for (_, tokens), times in depths.items()) == stats.proposed
    assert sum(depths.values()) == stats.verifier_passes
    assert {name for name, tokens in depths if tokens} == {"draft-model"}
    assert {name for name, tokens in depths if not tokens} <= {""}
    fed = sum(tokens for step in told.steps for tokens, _ in step.passes)
    prompt = sum(len(request.prompt_ids) for request in requests(9))
    # Each pass feeds the pending tokens, the newest decided one among them, and the draft.
    assert fed == prompt + stats.verifier_passes - len(done) + stats.proposed - stats.reused_tokens
    assert all(1 <= n <= 4 == step.most_sequences for step in told.steps for _, n in step.passes)


def test_each_request_has_one_first_token_and_a_time_for_the_others(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, observer=told, max_sequences=2)
    one_token = replace(SAMPLED, max_tokens=1)
    made.add(*requests(3), *requests(1, request_id="short", params=one_token)).run()
    assert [job for job, _ in told.first] == ["job"] * 4
    waited = [sec for _, sec in told.first]
    assert max(waited[:2]) < min(waited[2:]), "two at a time, so the others wait for a seat"
    assert len(told.ended) == 3, "one token has none behind it"
    assert all(sec > 0 for _, sec in told.first + told.ended)


def test_who_is_cancelled_or_fails_has_no_time_per_token(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, observer=told)
    made.add(*requests(2), *requests(1, request_id="long", prompt_ids=(1,) * 100_000))
    for _ in range(3):
        made.step()
    made.keep(made.engine.cancel(lambda _: True))
    reasons = Counter(c.finish_reason for c in made.finished.values())
    assert reasons == {FinishReason.CANCELLED: 2, FinishReason.ERROR: 1}
    assert (len(told.first), told.ended) == (2, [])


def test_preempted_sequences_and_blocks_are_told(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, observer=told, num_blocks=9, share_prefixes=False)
    made.add(*requests(8, params=replace(SAMPLED, max_tokens=60), depth=0))
    used = []
    while not made.engine.idle:
        made.step()
        used.append(made.engine.stats.kv_blocks[0])
        assert sum(made.engine.stats.kv_blocks) == 8
    assert sum(step.preemptions for step in told.steps) == made.engine.stats.preemptions > 0
    assert max(used) > 0
    assert made.engine.stats.kv_blocks == (0, 8, 0)


def test_what_raised_is_told(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.draft, observer=told)
    forward = made.runners[0].forward
    calls = iter([True])

    def fails_once(chunks: list[Chunk]) -> torch.Tensor:
        if next(calls, False):
            raise ValueError("this pass fails")
        return forward(chunks)

    monkeypatch.setattr(made.runners[0], "forward", fails_once)
    made.add(*requests(2)).run()
    assert [step.raised_passes for step in told.steps][:2] == [1, 0]


def outcome(made: Bench) -> dict[str, Completion]:
    """All that does not depend on how long things took."""
    return {
        name: replace(
            done,
            compute_sec=0.0,
            decode_sec=0.0,
            baseline_sec=0.0,
            ticks=made.finished[name].ticks.__class__(),
            provenance=replace(done.provenance, pass_ticks=()),
        )
        for name, done in made.run().items()
    }


@pytest.mark.parametrize("kind", [Verification.COUPLED, Verification.REJECTION])
def test_looking_at_every_step_changes_no_bit_and_no_draft(
    tiny_pair: TinyPair, kind: Verification
) -> None:
    """Under a ratio test the output hangs on the drafts, and so shows that they are the same."""
    found = []
    for observer, every in ((None, 0), (Recorder(), 1)):
        made = bench(
            tiny_pair.verifier, tiny_pair.draft, observer=observer, drift_every=every
        )  # fmt: skip
        made.add(*requests(6, verification=kind, sources=DRAFT_MODEL))
        found.append(outcome(made))
        made.assert_all_blocks_are_free()
    assert found[0] == found[1]
    assert observer is not None
    assert len(observer.drifts) > 3


def law(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token, from nothing."""
    runner = runner_of(loaded(folder, "float32"), AMPLE_BLOCKS)
    kv = KvState()
    runner.blocks.grow(kv, len(tokens))
    return runner.forward([Chunk(kv, tokens, 1)])[0].double().log_softmax(dim=0)


def test_drift_is_the_divergence_of_both_models_where_it_was_looked_at(
    tiny_pair: TinyPair,
) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.draft, observer=told, drift_every=1)
    (request,) = requests(1, sources=DRAFT_MODEL)
    (done,) = made.add(request).run().values()
    tokens, expected = list(request.prompt_ids), []
    ends = [i + 1 for i, origin in enumerate(done.origins) if origin != 1]  # of passes
    for end in ends[:-1]:  # before the first one the draft model has read nothing
        context = tokens + list(done.token_ids[:end])
        p, q = law(tiny_pair.verifier, context), law(tiny_pair.draft, context)
        expected.append(float((p.exp() * (p - q)).sum()))
    assert [name for name, _ in told.drifts] == ["draft-model"] * len(expected)
    assert [nats for _, nats in told.drifts] == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 0.001


def test_a_verifier_does_not_drift_from_itself(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.verifier, observer=told, drift_every=1)
    made.add(*requests(2, sources=DRAFT_MODEL)).run()
    assert told.drifts
    assert max(nats for _, nats in told.drifts) < 1e-5


def test_only_every_so_many_steps_are_looked_at(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.draft, observer=told, drift_every=4)
    made.add(*requests(3, sources=DRAFT_MODEL)).run()
    assert 0 < len(told.drifts) <= made.engine.stats.steps // 4


def test_a_model_that_fails_is_not_looked_at_again(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, tiny_pair.draft, observer=told, drift_every=1)
    asked = []

    def fails(*_: object) -> None:
        asked.append(1)
        raise ValueError("no law today")

    monkeypatch.setattr(
        "specbatch.pipeline.engines.exact.draft_model.DraftModelProposer.next_token_logprobs",
        fails,
    )
    assert len(made.add(*requests(2)).run()) == 2
    assert (asked, told.drifts) == ([1], [])
    assert "drift is not measured any more: ValueError: no law today" in caplog.text


def test_the_divergence_of_laws_with_tokens_that_cannot_be() -> None:
    half = torch.tensor([0.5, 0.5, 0.0]).log()
    other = torch.tensor([0.25, 0.5, 0.25]).log()
    assert float(divergence(half, other)) == pytest.approx(0.5 * torch.log(torch.tensor(2.0)))
    assert float(divergence(half, half)) == 0.0
    assert float(divergence(other, half)) == float("inf")


def test_turns_of_drafting_are_told_with_their_job(tiny_pair: TinyPair) -> None:
    told = Recorder()
    made = bench(tiny_pair.verifier, observer=told)
    decision_log = made.engine._speculator.decision_log
    for _ in range(3):
        decision_log.record_drafting("job", False, lambda: "it does not pay", 4)
    for _ in range(3):
        decision_log.record_drafting("job", True, lambda: "it pays", 4)
    assert told.turns == [("job", ALL_PROPOSERS, True), ("job", ALL_PROPOSERS, False)]
