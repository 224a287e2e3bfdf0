"""How completions end, what they count, and how requests are refused or cancelled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.decoding import VOCAB, assert_counts_add_up, assert_same, baseline_of, bench, prompts

from specbatch.kernels.decoder.contract import BLOCK_SIZE
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from support.models import EOS, TinyPair

PARAMS = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, ignore_eos=True)


def request_of(index: int, params: SamplingParams = PARAMS, depth: int | None = 0) -> Request:
    return Request(str(index), prompts(20)[index], params, seed=1000 + index, depth=depth)


def first_new_token(completion: Completion, at_least: int) -> int:
    """The first place from `at_least` on whose token did not occur before it."""
    ids = completion.token_ids
    return next(i for i in range(at_least, len(ids)) if ids[i] not in ids[:i])


@pytest.mark.parametrize("at_least", [0, 1, 3, 7, 12])
@pytest.mark.parametrize("depth", [0, 4, 8], ids=lambda d: f"depth{d}")
def test_a_stop_token_inside_an_accepted_block_cuts_it(
    tiny_pair: TinyPair, at_least: int, depth: int
) -> None:
    plain = request_of(1)
    truth = baseline_of(tiny_pair.verifier)(plain)
    at = first_new_token(truth, at_least)
    stopping = replace(PARAMS, stop_token_ids=(truth.token_ids[at], 10 * VOCAB))
    request = replace(plain, params=stopping, draft_ids=truth.token_ids, depth=depth)
    got = bench(tiny_pair.verifier).add(request).run()["1"]
    assert got.token_ids == truth.token_ids[: at + 1]
    assert got.logprobs == truth.logprobs[: at + 1]
    assert got.finish_reason is FinishReason.STOP
    assert got.verifier_passes == -(-(at + 1) // (depth + 1))
    assert_counts_add_up(got)


@pytest.mark.parametrize("depth", [0, 4, None], ids=lambda d: f"depth-{'auto' if d is None else d}")
def test_min_tokens_keep_stop_tokens_away_until_then(
    tiny_pair: TinyPair, depth: int | None
) -> None:
    asked, least = [], 12
    for i in range(20):
        truth = baseline_of(tiny_pair.verifier)(request_of(i))
        stops = tuple({truth.token_ids[2], truth.token_ids[14], 5 * VOCAB})
        params = replace(PARAMS, min_tokens=least, stop_token_ids=stops, ignore_eos=False)
        asked.append(request_of(i, params, depth))
    got = bench(tiny_pair.verifier, tiny_pair.verifier).add(*asked).run()
    for request in asked:
        completion = got[request.request_id]
        assert_same(completion, baseline_of(tiny_pair.verifier)(request))
        assert len(completion.token_ids) >= least
        early = completion.token_ids[: least - 1]
        assert not {*request.params.stop_token_ids, EOS} & {*early}
    assert {c.finish_reason for c in got.values()} >= {FinishReason.STOP}


@pytest.mark.parametrize("most", [1, 2, 5, 6])
@pytest.mark.parametrize("depth", [0, 4, 8], ids=lambda d: f"depth{d}")
def test_max_tokens_is_never_exceeded(tiny_pair: TinyPair, most: int, depth: int) -> None:
    truth = baseline_of(tiny_pair.verifier)(request_of(2))
    request = request_of(2, replace(PARAMS, max_tokens=most), depth)
    request = replace(request, draft_ids=truth.token_ids)
    got = bench(tiny_pair.verifier, tiny_pair.verifier).add(request).run()["2"]
    assert got.token_ids == truth.token_ids[:most]
    assert got.finish_reason is FinishReason.LENGTH
    assert_counts_add_up(got)


@pytest.mark.parametrize("depth", [0, 8], ids=lambda d: f"depth{d}")
@pytest.mark.parametrize("room", [1, 2, 9, 30])
def test_the_context_limit_ends_a_completion_with_length(
    tiny_pair: TinyPair, room: int, depth: int
) -> None:
    limit = 4 * BLOCK_SIZE
    prompt = prompts(1, limit - room, limit - room)[0]
    request = Request("r", prompt, replace(PARAMS, max_tokens=500), seed=9, depth=depth)
    one = bench(tiny_pair.verifier, tiny_pair.draft, num_blocks=5, draft_blocks=64)
    got = one.add(request).run()["r"]
    assert len(got.token_ids) == room
    assert got.finish_reason is FinishReason.LENGTH
    ample = replace(request, params=replace(PARAMS, max_tokens=room))
    assert got.token_ids == baseline_of(tiny_pair.verifier)(ample).token_ids
    one.assert_all_blocks_are_free()


def test_a_request_that_cannot_run_is_answered_and_stops_no_other(tiny_pair: TinyPair) -> None:
    limit = 4 * BLOCK_SIZE
    good = request_of(3)
    one = bench(tiny_pair.verifier, num_blocks=5).add(
        replace(good, request_id="long", prompt_ids=(1,) * limit),
        good,
        replace(good, request_id="empty", prompt_ids=()),
        replace(good, request_id="beyond", prompt_ids=(1, VOCAB, 2)),
        replace(good, request_id="negative", prompt_ids=(-1,)),
    )
    got = one.run()
    assert_same(got["3"], baseline_of(tiny_pair.verifier)(good))
    reasons = {name: c.error for name, c in got.items() if c.error}
    assert reasons == {
        "long": (
            f"prompt of {limit} tokens does not fit this worker's KV cache of {limit}: "
            "set SPECBATCH_KV_CACHE_MIB higher"
        ),
        "empty": f"prompt of 0 tokens does not fit the context of {limit}",
        "beyond": f"prompt has a token outside the vocabulary of {VOCAB}",
        "negative": f"prompt has a token outside the vocabulary of {VOCAB}",
    }
    for name in reasons:
        assert got[name].finish_reason is FinishReason.ERROR
        assert got[name].token_ids == ()


def test_cancelled_requests_return_what_they_had(tiny_pair: TinyPair) -> None:
    asked = [request_of(i) for i in range(20)]
    one = bench(tiny_pair.verifier, max_sequences=12).add(*asked)
    for _ in range(3):
        one.step()
    gone = {"0", "5", "15"}  # running, running and waiting
    cancelled = one.engine.cancel(lambda request: request.request_id in gone)
    one.keep(cancelled)
    assert {c.request_id for c in cancelled} == gone
    assert one.engine.cancel(lambda request: request.request_id in gone) == []
    got = one.run()
    for request in asked:
        truth, completion = baseline_of(tiny_pair.verifier)(request), got[request.request_id]
        if request.request_id in gone:
            assert completion.finish_reason is FinishReason.CANCELLED
            assert completion.token_ids == truth.token_ids[: len(completion.token_ids)]
            assert bool(completion.token_ids) == (request.request_id != "15")
        else:
            assert_same(completion, truth)
    one.assert_all_blocks_are_free()


def test_origins_tell_accepted_corrected_bonus_and_plain_tokens(tiny_pair: TinyPair) -> None:
    params = replace(PARAMS, max_tokens=11)
    truth = baseline_of(tiny_pair.verifier)(request_of(4, params)).token_ids
    wrong = next(t for t in range(VOCAB) if t not in truth)
    block = (*truth[:3], wrong, *truth[4:8])
    request = replace(request_of(4, params, depth=2), draft_ids=block)
    got = bench(tiny_pair.verifier).add(request).run()["4"]
    a, b, c, p = Origin.ACCEPTED, Origin.BONUS, Origin.CORRECTED, Origin.PLAIN
    assert got.token_ids == truth
    assert got.origins == (a, a, b, c, a, a, b, a, b, p, p)
    assert (got.proposed, got.accepted, got.verifier_passes) == (7, 5, 6)
    assert got.proposed_at_depth == (4, 3)
    assert got.accepted_at_depth == (3, 2)


def test_the_engine_s_totals_are_the_sums_of_its_completions(tiny_pair: TinyPair) -> None:
    one = bench(tiny_pair.verifier, tiny_pair.draft).add(
        *(request_of(i, depth=(0, 3, None)[i % 3]) for i in range(20))
    )
    got, stats = one.run().values(), one.engine.stats
    assert stats.finished == 20
    assert stats.generated_tokens == sum(len(c.token_ids) for c in got) == 600
    assert stats.proposed == sum(c.proposed for c in got)
    assert stats.accepted == sum(c.accepted for c in got)
    assert stats.verifier_passes == sum(c.verifier_passes for c in got)
    assert sum(c.compute_sec for c in got) == pytest.approx(stats.busy_sec)
    assert 0 < stats.forward_sec <= stats.busy_sec


def test_a_prompt_longer_than_a_pass_is_fed_in_parts(tiny_pair: TinyPair) -> None:
    """Such a pass decides nothing; beside a running sequence it decides for that one alone."""
    request = replace(request_of(5), prompt_ids=prompts(1, 70, 70)[0])
    for budget in (1, 2, 7, 69, 70):
        one = bench(tiny_pair.verifier, max_batch_tokens=budget).add(request, request_of(6))
        got = one.run()
        assert_same(got["5"], baseline_of(tiny_pair.verifier)(request))
        assert_same(got["6"], baseline_of(tiny_pair.verifier)(request_of(6)))
