"""Drafts that are only compared: depth 0 to the last bit and pass, and an exact count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from engine.decoding import Bench, assert_same, baseline_of, bench, prompts
from engine.faulty import real_tokens, spoil
from engine.replaying import decide, sequence_of, sequence_with
from engine.simulating import Source

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.pipeline.engines.contract import Cohort, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.shadow import DEPTH, SHARE, Shadow, is_watched
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.acceptance import Track, Tracks
from specbatch.pipeline.policy.breaker import Breaker
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import AcceptanceCount
from support.models import TinyPair

PARAMS = SamplingParams(max_tokens=40, temperature=0.7, ignore_eos=True)
JOB = "nightly"


@dataclass(slots=True)
class WatchedShadow(Shadow):
    """Remembers what was kept: the sequence, its output tokens then, the draft."""

    kept: list[tuple[Sequence, int, list[int]]] = field(default_factory=list)

    def keep(self, sequence: Sequence, proposer: Proposer, draft: list[int], track: Track) -> None:
        self.kept.append((sequence, sequence.num_output, list(draft)))
        Shadow.keep(self, sequence, proposer, draft, track)


def requests(count: int = 12, params: SamplingParams = PARAMS, **values: object) -> list[Request]:
    given = {"depth": 0, "shadow": True, "route": Cohort(JOB), **values}
    return [
        Request(f"{i}", prompt, params, seed=i, **given)  # type: ignore[arg-type]  # by name
        for i, prompt in enumerate(prompts(count))
    ]


def sizes_of_passes(one: Bench) -> list[int]:
    """Grows by the tokens of each pass of the verifier."""
    sizes: list[int] = []

    def replan(batch: DecoderBatch) -> None:
        sizes.append(real_tokens(batch))

    spoil(one, replan)
    return sizes


def run(one: Bench, asked: list[Request]) -> WatchedShadow:
    shadow = one.engine._speculator._shadow = WatchedShadow()
    one.engine.prime(JOB, ())
    one.add(*asked).run()
    return shadow


def verified(tiny: TinyPair, request: Request, output: tuple[int, ...], draft: list[int]) -> int:
    """Draft tokens that a real verification behind `output` accepts."""
    one = bench(tiny.verifier)
    block = (*output, *draft)
    one.add(
        replace(request, shadow=False, decided_ids=output, draft_ids=block, depth=len(draft))
    ).step()
    assert one.engine.stats.proposed == len(draft)
    return one.engine.stats.accepted


@pytest.mark.parametrize("num_blocks", [1024, 30], ids=["ample", "preempted"])
def test_outputs_and_passes_are_those_of_depth_0(tiny_pair: TinyPair, num_blocks: int) -> None:
    asked = requests()
    one = bench(tiny_pair.verifier, tiny_pair.draft, num_blocks=num_blocks)
    plain = bench(tiny_pair.verifier, num_blocks=num_blocks)
    drafted, undrafted = sizes_of_passes(one), sizes_of_passes(plain)
    shadow = run(one, asked)
    plain.add(*(replace(request, shadow=False) for request in asked)).run()
    for request in asked:
        assert_same(one.finished[request.request_id], baseline_of(tiny_pair.verifier)(request))
    assert drafted == undrafted, "the very passes, token by token"
    assert one.engine.stats.proposed == one.engine.stats.accepted == 0
    assert one.engine.stats.proposer_failures == 0
    assert shadow.kept
    assert (one.blocks.preempted > 0) is (num_blocks == 30)
    one.assert_all_blocks_are_free()


def test_what_is_counted_is_what_verifying_the_same_drafts_gives(tiny_pair: TinyPair) -> None:
    flat = replace(PARAMS, temperature=20.0)  # the noise they share decides, and they often agree
    asked = requests(params=flat)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    shadow = run(one, asked)
    proposed, accepted, tested = Counter[str](), Counter[str](), 0
    for sequence, begin, draft in shadow.kept:
        request = sequence.request
        output = one.finished[request.request_id].token_ids
        agreed = verified(tiny_pair, request, output[:begin], draft)
        proposed[request.request_id] += len(draft)
        accepted[request.request_id] += agreed
        tested += agreed + (agreed < len(draft))
    for request in asked:
        done = one.finished[request.request_id]
        assert done.shadow_proposed == proposed[request.request_id]
        assert done.shadow_accepted == accepted[request.request_id]
        assert done.proposed == done.accepted == 0
    agreed_in_all = sum(accepted.values())
    assert 0 < agreed_in_all < sum(proposed.values()), "the drafts are neither all right nor wrong"
    assert one.engine.lessons(JOB).counts == (
        AcceptanceCount("draft-model", None, agreed_in_all, tested),
    )


def test_only_one_sequence_in_so_many_is_drafted_for_and_one_draft_at_a_time(
    tiny_pair: TinyPair,
) -> None:
    asked = requests()
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    shadow = run(one, asked)
    seeds = {sequence.request.seed for sequence, _, _ in shadow.kept}
    assert seeds == {seed for seed in range(len(asked)) if is_watched(seed)}
    for seed in seeds:
        spans = [(at, len(d)) for s, at, d in shadow.kept if s.request.seed == seed]
        assert all(0 < length <= DEPTH for _, length in spans)
        ends = [at + length for at, length in spans]
        assert [at for at, _ in spans[1:]] == ends[:-1], "one behind another, none beside"


def test_requests_at_depth_0_are_not_drafted_for_beside_such_in_shadow(
    tiny_pair: TinyPair,
) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    watched = requests(5)
    off = [replace(r, request_id=f"off{r.seed}", shadow=False) for r in requests(5)]
    shadow = run(one, [*watched, *off])
    assert {s.request.shadow for s, _, _ in shadow.kept} == {True}


def test_the_draft_models_books_are_balanced_after_every_step(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft, share_prefixes=False)
    proposer = one.engine._speculator.proposers[1]._proposer  # type: ignore[attr-defined]  # its guard is no part of the contract
    assert isinstance(proposer, DraftModelProposer)
    one.engine.add(requests(1)[0])
    full = tuple(range(2 * one.runners[1].blocks.block_size))  # blocks that are full from the start
    one.add(*(replace(r, prompt_ids=full) for r in requests()[1:9]), *requests()[9:])
    blocks, size = one.runners[1].blocks, one.runners[1].blocks.block_size
    fed = 0
    while not one.engine.idle:
        one.step()
        for sequence, kv in proposer._kv.items():
            assert kv.length <= len(sequence.tokens), "nothing is left of a draft"
            fed += kv.length
        held = sum(len(kv.blocks) for kv in proposer._kv.values())
        assert blocks.free_blocks == blocks.num_blocks - 1 - held
        assert held <= sum(-(-(len(s.tokens) + DEPTH) // size) for s in proposer._kv)
    assert fed
    assert one.engine.stats.proposer_failures == 0
    one.assert_all_blocks_are_free()


def test_a_cancelled_sequence_leaves_nothing_behind(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    one.engine.prime(JOB, ())
    one.add(*requests())
    for _ in range(3):
        one.step()
    done = one.engine.cancel(lambda _: True)
    (decided,) = {c.shadow_proposed for c in done if c.shadow_proposed}
    assert decided == 3, "of the draft behind the prompt, what was decided since"
    assert not one.engine._speculator._shadow._waiting
    one.assert_all_blocks_are_free()


# --- the judge by itself ------------------------------------------------------------------------


def judged(draft: list[int], decided: list[int]) -> tuple[Sequence, Track]:
    """A draft behind one output token, and what was decided before the sequence ended."""
    sequence, shadow, source = sequence_with([1], [5]), Shadow(), Source("a", 0.0)
    track = Tracks({}).track("a", "", None)
    shadow.keep(sequence, source, draft, track)
    assert source.verified == [sequence]
    decide(sequence, decided)
    shadow.forget(sequence)
    return sequence, track


@pytest.mark.parametrize(
    ("draft", "decided", "proposed", "accepted", "tested"),
    [
        ([1, 2, 3], [1, 2, 3], 3, 3, 3),
        ([1, 2, 3], [1, 9, 3], 3, 1, 2),  # what comes behind a mismatch counts for nothing
        ([1, 2, 3], [9, 2, 3], 3, 0, 1),
        ([1, 2, 3], [1, 2, 3, 4], 3, 3, 3),
        ([1, 2, 3], [1, 2], 2, 2, 2),  # it ended: the third cannot be judged
        ([1, 2, 3], [1, 9], 2, 1, 2),
        ([1, 2, 3], [], 0, 0, 0),
        ([], [1, 2], 0, 0, 0),
    ],
)
def test_a_draft_is_judged_by_the_places_that_were_decided(
    draft: list[int], decided: list[int], proposed: int, accepted: int, tested: int
) -> None:
    sequence, track = judged(draft, decided)
    assert (sequence.shadow_proposed, sequence.shadow_accepted) == (proposed, accepted)
    assert (track.agreed, track.tested) == (accepted, tested)


def test_a_draft_waits_until_all_its_places_are_decided_and_is_judged_once() -> None:
    sequence, shadow = sequence_of(), Shadow()
    track = Tracks({}).track("a", "", None)
    shadow.keep(sequence, Source("a", 0.0), [1, 2], track)
    decide(sequence, [1])
    shadow.compare()
    assert sequence.shadow_proposed == 0
    decide(sequence, [2])
    shadow.compare()
    shadow.compare()
    shadow.forget(sequence)
    assert (sequence.shadow_proposed, sequence.shadow_accepted) == (2, 2)
    assert track.tested == 2


@pytest.mark.parametrize(
    ("shadow", "seed", "wanted"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_it_is_wanted_for_some_of_those_that_ask(shadow: bool, seed: int, wanted: bool) -> None:
    request = Request("r", (1,), PARAMS, seed=seed, shadow=shadow)
    assert Shadow().is_due(sequence_of(request)) is wanted


@pytest.mark.parametrize("step", [1, 2, 4, 1000])
def test_few_are_wanted_whatever_the_pattern_of_seeds(step: int) -> None:
    watched = sum(is_watched(step * i + 1) for i in range(4000))
    assert watched == pytest.approx(4000 / SHARE, rel=0.1)


def test_samples_while_drafting_rests_leave_outputs_and_their_counts_as_they_are(
    tiny_pair: TinyPair,
) -> None:
    asked = requests(depth=None, shadow=False)
    one = bench(tiny_pair.verifier, tiny_pair.draft)
    log = one.engine._speculator.decision_log
    log._job(JOB).breakers["draft-model"] = Breaker(open_until=10**9, needed=2.0)
    one.add(*asked).run()
    for request in asked:
        done = one.finished[request.request_id]
        assert_same(done, baseline_of(tiny_pair.verifier)(request))
        assert (done.shadow_proposed, done.shadow_accepted) == (0, 0)
    assert one.engine.stats.proposed == one.engine.stats.proposer_failures == 0
    (samples,) = one.engine.lessons(JOB).counts
    assert samples.proposer.partition(":")[0] == "draft-model"
    assert samples.tested > 0
    one.assert_all_blocks_are_free()
