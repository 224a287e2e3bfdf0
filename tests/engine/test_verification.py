"""Ratio tests in the engine: the verifier's law whatever is drafted, and nobody else's bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.decoding import assert_counts_add_up, assert_same, baseline_of, bench, prompts
from engine.faulty import real_tokens, spoil
from scipy import stats

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampling import sampling_rows
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.guarded import GuardedProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams, Verification
from support.engines import loaded
from support.models import TinyPair, tiny_llama

pytestmark = pytest.mark.pipeline  # runs models

VOCAB, LENGTH, DRAWS = 4, 3, 6000
PROMPT = (2, 3, 2)
PLAIN = SamplingParams(max_tokens=LENGTH, temperature=1.5, ignore_eos=True)
SHAPED = replace(PLAIN, top_p=0.9, repetition_penalty=1.5, min_p=0.02)
RATIO_TESTS = (Verification.REJECTION, Verification.BLOCK)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Two models of four tokens that have nothing to do with one another."""
    folder = tmp_path_factory.mktemp("foreign")
    verifier, draft = (
        tiny_llama(folder / name, vocab_size=VOCAB, hidden=128, layers=layers, seed=seed)
        for name, layers, seed in (("verifier", 2, 5), ("draft", 1, 6))
    )
    return TinyPair(verifier, draft)


def law_after(folder: Path, output: Seq[int], params: SamplingParams) -> torch.Tensor:
    """float64 [VOCAB]: what the model says of the next token, processed."""
    runner = ModelRunner(loaded(folder, "float32"), 1 << 20)
    kv = KvState()
    tokens = [*PROMPT, *output]
    runner.blocks.grow(kv, len(tokens))
    logits = runner.forward([Chunk(kv, tokens, 1)])
    sequence = Sequence(Request("", PROMPT, params, 0), frozenset(), 100)
    rows, _ = sampling_rows([sequence], [1], logits.device, [list(output)], len(output))
    return process(logits, rows)[0].double().softmax(dim=0)


def law_of_texts(folder: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every text of LENGTH tokens."""
    after = lru_cache(lambda output: law_after(folder, output, params))
    return {
        text: math.prod(float(after(text[:i])[token]) for i, token in enumerate(text))
        for text in product(range(VOCAB), repeat=LENGTH)
    }


def drawn(
    pair: TinyPair, params: SamplingParams, kinds: Seq[Verification], depth: int, count: int
) -> list[Completion]:
    """`count` completions in one batch; request i is verified as kinds[i % len(kinds)]."""
    it = bench(pair.verifier, pair.draft, max_sequences=512, num_blocks=4096)
    for i in range(count):
        kind = kinds[i % len(kinds)]
        it.add(Request(str(i), PROMPT, params, 7919 * i, depth=depth, verification=kind))
    done = it.run()
    it.assert_all_blocks_are_free()
    return [done[str(i)] for i in range(count)]


def assert_texts_follow(law: dict[tuple[int, ...], float], done: Seq[Completion]) -> None:
    counts = Counter(c.token_ids for c in done)
    assert all(law[text] > 0 for text in counts), "a text without probability"
    likely = [text for text, p in law.items() if p * len(done) >= 5]
    observed = [counts[text] for text in likely]
    expected = [law[text] * len(done) for text in likely]
    rest, unlikely = len(done) - sum(observed), len(done) - sum(expected)
    if unlikely > 1:
        observed, expected = [*observed, rest], [*expected, unlikely]
    scaled = np.array(expected) * sum(observed) / sum(expected)
    assert len(likely) > 8
    assert stats.chisquare(observed, scaled).pvalue > 1e-3
    assert 0 < sum(c.accepted for c in done) < sum(c.proposed for c in done)


@pytest.mark.parametrize("params", [PLAIN, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("verification", list(Verification), ids=str)
def test_texts_follow_the_verifier_s_law_with_a_foreign_draft_model(
    foreign: TinyPair, verification: Verification, depth: int, params: SamplingParams
) -> None:
    law = law_of_texts(foreign.verifier, params)
    assert_texts_follow(law, drawn(foreign, params, [verification], depth, DRAWS))


def test_texts_follow_the_law_in_mixed_company(foreign: TinyPair) -> None:
    kinds = list(Verification)
    done = drawn(foreign, PLAIN, kinds, 2, len(kinds) * DRAWS)
    law = law_of_texts(foreign.verifier, PLAIN)
    for i in range(len(kinds)):
        assert_texts_follow(law, done[i :: len(kinds)])


def test_the_draft_s_law_is_another_so_that_the_test_above_can_fail(foreign: TinyPair) -> None:
    mine, theirs = (law_of_texts(f, PLAIN) for f in (foreign.verifier, foreign.draft))
    assert sum(abs(mine[text] - theirs[text]) for text in mine) / 2 > 0.2


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_a_ratio_test_accepts_the_overlap_and_coupling_no_more(
    foreign: TinyPair, verification: Verification
) -> None:
    """One draft token each, all in the same context."""
    params = replace(PLAIN, max_tokens=2)
    p, q = (law_after(f, (), params) for f in (foreign.verifier, foreign.draft))
    overlap = float(torch.minimum(p, q).sum())
    tested, coupled = (
        sum(c.accepted for c in done) / sum(c.proposed for c in done)
        for done in (
            drawn(foreign, params, [kind], 1, DRAWS)
            for kind in (verification, Verification.COUPLED)
        )
    )
    sigma = math.sqrt(overlap * (1 - overlap) / DRAWS)
    assert abs(tested - overlap) <= 3 * sigma
    assert overlap / (2 - overlap) - 3 * sigma <= coupled <= tested + 3 * sigma


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_the_draft_s_noise_is_not_the_request_s(
    foreign: TinyPair, verification: Verification
) -> None:
    """Else the first token of a draft would be the coupled proposer's."""
    params = replace(PLAIN, max_tokens=1)
    firsts = []
    for kind in (verification, Verification.COUPLED):
        draft_model = DraftModelProposer(ModelRunner(loaded(foreign.draft, "float32"), 1 << 22))
        asked = [
            Sequence(Request(str(i), PROMPT, params, i, verification=kind), frozenset(), 9)
            for i in range(200)
        ]
        firsts.append([d[0] for d in draft_model.propose(asked, [1] * 200)])
    same = sum(a == b for a, b in zip(*firsts, strict=True))
    law = law_after(foreign.draft, (), params)
    chance = float((law * law).sum())
    assert abs(same / 200 - chance) < 4 * math.sqrt(chance * (1 - chance) / 200)


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_greedy_outputs_are_those_of_coupled_verification(
    tiny_pair: TinyPair, verification: Verification
) -> None:
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    asked = [
        Request(str(i), p, greedy, i, depth=i % 5, verification=verification)
        for i, p in enumerate(prompts(12))
    ]
    done = bench(tiny_pair.verifier, tiny_pair.draft).add(*asked).run()
    assert sum(c.proposed for c in done.values()) > 0
    for request in asked:
        assert_same(done[request.request_id], baseline_of(tiny_pair.verifier)(request))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("right", [False, True], ids=["wrong drafts", "right drafts"])
def test_coupled_requests_keep_their_bits_beside_others(
    tiny_pair: TinyPair, dtype: str, right: bool
) -> None:
    sampled = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, frequency_penalty=0.2)
    kinds = [*Verification] * 7
    asked = [
        Request(str(i), p, sampled, i, depth=(0, 3, None)[i // 3 % 3], verification=kind)
        for i, (p, kind) in enumerate(zip(prompts(len(kinds)), kinds, strict=True))
    ]
    draft = tiny_pair.verifier if right else tiny_pair.draft
    it = bench(tiny_pair.verifier, draft, dtype=dtype, max_batch_tokens=64)
    done = it.add(*asked).run()
    it.assert_all_blocks_are_free()
    for kind in Verification:
        of_kind = [done[r.request_id] for r in asked if r.verification is kind]
        assert sum(c.proposed for c in of_kind) > 0
        assert sum(c.accepted for c in of_kind) >= 20 * right
    for request in asked:
        if request.verification is Verification.COUPLED:
            expected = baseline_of(tiny_pair.verifier, dtype)(request)
            assert_same(done[request.request_id], expected)
        else:
            assert_counts_add_up(done[request.request_id])


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_blocks_made_beforehand_are_not_used_for_they_carry_no_probabilities(
    tiny_pair: TinyPair, verification: Verification
) -> None:
    sampled = SamplingParams(max_tokens=12, temperature=0.9, ignore_eos=True)
    request = Request("r", (1, 2), sampled, 3, (4, 5, 6), depth=4, verification=verification)
    done = bench(tiny_pair.verifier).add(request).run()["r"]
    assert (done.proposed, len(done.token_ids)) == (0, 12)


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_a_preempted_request_goes_on_and_all_blocks_come_back(
    tiny_pair: TinyPair, verification: Verification
) -> None:
    sampled = SamplingParams(max_tokens=60, temperature=0.9, ignore_eos=True)
    asked = [
        Request(str(i), p, sampled, i, depth=3, verification=verification)
        for i, p in enumerate(prompts(8, longest=40))
    ]
    it = bench(tiny_pair.verifier, tiny_pair.draft, num_blocks=12, draft_blocks=64)
    done = it.add(*asked).run()
    assert it.blocks.preempted > 0
    it.assert_all_blocks_are_free()
    for completion in done.values():
        assert len(completion.token_ids) == 60
        assert_counts_add_up(completion)


def test_the_most_likely_tokens_are_told_in_mixed_company(tiny_pair: TinyPair) -> None:
    """Of every kind some ask for many, some for few, some for none."""
    sampled = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, ignore_eos=True)
    asked = [
        Request(
            str(i),
            p,
            replace(sampled, top_logprobs=(0, 3, 9)[i // 3 % 3]),
            i,
            depth=(0, 3)[i % 2],
            verification=[*Verification][i % 3],
        )
        for i, p in enumerate(prompts(27))
    ]
    it = bench(tiny_pair.verifier, tiny_pair.verifier, max_batch_tokens=64)
    done = it.add(*asked).run()
    for request in asked:
        got, count = done[request.request_id], request.params.top_logprobs
        if not count:
            assert got.top_logprobs is None
            continue
        logits = it.runners[0].forward([whole_text(it.runners[0], request, got)])
        law, best = logits.log_softmax(1), logits.sort(dim=1, descending=True, stable=True).indices
        assert got.top_logprobs is not None
        for row, (ids, values) in enumerate(got.top_logprobs):
            assert list(ids) == best[row, :count].tolist()
            assert list(values) == pytest.approx(law[row, best[row, :count]].tolist(), abs=1e-5)
        assert len(got.top_logprobs) == len(logits) == 24
    for kind in Verification:
        of_kind = [done[r.request_id] for r in asked if r.verification is kind]
        assert sum(c.accepted for c in of_kind) > 0


def whole_text(runner: ModelRunner, request: Request, done: Completion) -> Chunk:
    """A pass over prompt and output, with a row of logits for every token of the output."""
    kv, tokens = KvState(), [*request.prompt_ids, *done.token_ids][:-1]
    runner.blocks.grow(kv, len(tokens))
    before = len(request.prompt_ids) - 1
    if before:
        runner.forward([Chunk(kv, tokens[:before], 0)])
    return Chunk(kv, tokens[before:], len(done.token_ids))


@pytest.mark.parametrize("verification", RATIO_TESTS, ids=str)
def test_a_pass_that_raises_leaves_the_law_as_it_is(
    foreign: TinyPair, verification: Verification
) -> None:
    """Its drafts are dropped; what is decided without them follows the law too."""

    def hiccup(batch: DecoderBatch) -> Exception | None:
        often = faulty.passes % 5 == 0 and real_tokens(batch) > 8  # no sequence raises alone
        return RuntimeError("a hiccup") if often else None

    it = bench(foreign.verifier, foreign.draft)
    faulty = spoil(it, hiccup)
    for i in range(DRAWS):
        it.add(Request(str(i), PROMPT, PLAIN, 7919 * i, depth=2, verification=verification))
    done = it.run()
    it.assert_all_blocks_are_free()
    assert it.engine.stats.raised_passes > 20
    assert all(c.error is None for c in done.values())
    assert_texts_follow(law_of_texts(foreign.verifier, PLAIN), list(done.values()))


def test_a_guarded_proposer_has_draft_probs_where_the_proposer_has(foreign: TinyPair) -> None:
    params = replace(PLAIN, max_tokens=3)
    request = Request("r", PROMPT, params, 1, verification=Verification.REJECTION)
    sequence = Sequence(request, frozenset(), 9)
    draft_model = DraftModelProposer(ModelRunner(loaded(foreign.draft, "float32"), 1 << 20))
    kept = GuardedProposer(draft_model, lambda: None, lambda *_: None)
    assert kept.has_draft_probs
    assert len(kept.propose([sequence], [2])[0]) == 2
    assert torch.equal(kept.draft_probs(sequence), draft_model.draft_probs(sequence))
    assert not GuardedProposer(BlockProposer(), lambda: None, lambda *_: None).has_draft_probs


def test_a_guarded_proposer_does_all_that_a_proposer_does() -> None:
    """The contract's defaults would hide what the proposer can do."""
    methods = {name for name, of in vars(Proposer).items() if callable(of) and name[0] != "_"}
    assert methods
    assert methods <= vars(GuardedProposer).keys()
