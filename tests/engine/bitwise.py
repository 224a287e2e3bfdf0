"""The bitwise suite's axes, requests and proposers, and what one case of it runs."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.decoding import Bench, WatchedBlockProposer, assert_counts_add_up

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.stages.text_stop import TextStop
from specbatch.schemas.records import FinishReason, SamplingParams
from support import grids
from support.thirds import Thirds

DEEPEST = 8
LONGEST_PROMPT = 120
MOST_NEW_TOKENS = 20

DEPTHS = (0, 2, DEEPEST, None)  # None: another one at every step of every sequence
CONCURRENT = (1, 7, 64)
DRAFTS = ("right", "random", "none")
DTYPES = ("bfloat16", "float32")

ROOMY_BLOCKS, ROOMY_PASSES = 400, 16_384  # blocks; tokens per pass, of all prompts at once
# By concurrency: for some of the sequences only; prompts are fed in pieces.
TIGHT_BLOCKS, TIGHT_PASSES = {1: 7, 7: 14, 64: 80}, {1: 61, 7: 61, 64: 300}


@dataclass(frozen=True)
class Case:
    """One way to run the requests. No two may differ in a bit."""

    depth: int | None
    concurrent: int
    drafts: str
    share: bool
    preempted: bool
    dtype: str

    def __str__(self) -> str:
        depth = "random" if self.depth is None else self.depth
        sharing = "shared" if self.share else "unshared"
        cache = "preempted" if self.preempted else "roomy"
        parts = (f"depth_{depth}", f"{self.concurrent}_at_once", f"{self.drafts}_drafts")
        return "-".join((*parts, sharing, cache, self.dtype))

    @property
    def drafting(self) -> bool:
        return self.depth != 0 and self.drafts != "none"


# Without a proposer all depths are alike; they run all the same, for they are asked for.
AXES = (DEPTHS, CONCURRENT, DRAFTS, (True, False), (False, True), DTYPES)
EVERY_CASE = tuple(Case(*values) for values in itertools.product(*AXES))
PLAIN = Case(depth=0, concurrent=1, drafts="none", share=False, preempted=False, dtype="")


def covering(strength: int) -> list[Case]:
    """Few cases in which any `strength` axes take all combinations of their values."""
    return [Case(*values) for values in grids.covering(AXES, strength)]


# --- what is asked ------------------------------------------------------------------------------
def mixed_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Of 1 to 120 tokens; most begin like others for more than a KV block, some are the same."""
    generator = random.Random(seed)

    def some(shortest: int, longest: int) -> tuple[int, ...]:
        return tuple(generator.randrange(256) for _ in range(generator.randint(shortest, longest)))

    templates = [*(some(65, 80) for _ in range(2)), some(33, 80), some(33, 80)]
    # Alike but for the first token: blocks of the same tokens that are not the same blocks.
    templates += [((template[0] + 1) % 256, *template[1:]) for template in templates[:2]]
    made: list[tuple[int, ...]] = []
    for i in range(count):
        templated = (*generator.choice(templates), *some(1, 40))
        kinds = (templated, some(1, LONGEST_PROMPT), templated, some(1, 12))
        made.append(kinds[i % 4] if i % 9 else generator.choice([templated, *made]))
    return made


def requests_of(prompts: Seq[tuple[int, ...]], vocab_size: int) -> list[Request]:
    """One request for each, all sampled in different ways."""
    thirds = Thirds(vocab_size)
    return [
        _watched(
            Request(
                *(str(i), prompt, _params(i, vocab_size)),
                seed=(i * 7919 + 1) << 20,
                grammar=thirds if i % 5 == 3 else None,
            )
        )
        for i, prompt in enumerate(prompts)
    ]


def _params(index: int, vocab_size: int) -> SamplingParams:
    generator = random.Random(index)
    some, tokens = generator.choice, range(vocab_size)
    params = SamplingParams(
        max_tokens=some([4, 16, 16, MOST_NEW_TOKENS]),
        min_tokens=some([0, 0, 3]),
        temperature=some([0.0, 0.8, 1.2]),
        ignore_eos=some([True, False]),
    )
    if index % 4 == 0:  # as most jobs are: greedy, or temperature and top-p
        return replace(params, top_p=0.95)
    return replace(
        params,
        top_k=some([0, 0, 20]),
        top_p=some([1.0, 0.9]),
        min_p=some([0.0, 0.0, 0.02]),
        stop_token_ids=tuple(generator.sample(tokens, some([0, 0, 10]))),
        repetition_penalty=some([1.0, 1.0, 1.2, 0.8]),
        presence_penalty=some([0.0, 0.0, 0.7]),
        frequency_penalty=some([0.0, 0.0, 0.4, -0.6]),
        logit_bias=tuple((t, generator.uniform(-4, 4)) for t in generator.sample(tokens, 5))
        if some([True, False, False])
        else (),
        bad_token_ids=tuple(generator.sample(tokens, some([0, 0, 30]))),
        bad_words=tuple(
            tuple(some(tokens) for _ in range(some([1, 2, 2, 3]))) for _ in range(some([0, 0, 60]))
        ),
        stop=tuple(chr(some(tokens)) for _ in range(some([0, 0, 6]))),
    )


def _watched(request: Request) -> Request:
    params = request.params
    if not params.stop:
        return request
    return replace(
        request, watch_text=lambda: TextStop(_as_text, params.stop, min_tokens=params.min_tokens)
    )


def _as_text(ids: Seq[int]) -> str:
    """A character for each token, so that stop strings need no tokenizer."""
    return "".join(map(chr, ids))


# --- who drafts ---------------------------------------------------------------------------------
class Replay(WatchedBlockProposer):
    """Drafts what each request brings; how far is drawn anew each time, or is not its affair."""

    def __init__(self, draw_depth: bool) -> None:
        super().__init__()
        self._draw = _Draw() if draw_depth else None

    def available(self, sequence: Sequence) -> int:
        return min(super().available(sequence), self._draw() if self._draw else DEEPEST)


class Guess(Proposer):
    """Drafts made-up tokens, in half of the drafts behind some right ones."""

    name = "guess"

    def __init__(self, truths: dict[str, tuple[int, ...]], draw_depth: bool) -> None:
        self._truths = truths
        self._draw = _Draw() if draw_depth else None
        self._random = random.Random(1)

    def available(self, sequence: Sequence) -> int:  # noqa: ARG002 - it never runs out
        return self._draw() if self._draw else DEEPEST

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [self._draft(s, depth) for s, depth in zip(sequences, depths, strict=True)]

    def _draft(self, sequence: Sequence, depth: int) -> list[int]:
        at = sequence.num_output
        kept = self._random.choice([0, self._random.randint(0, depth)])
        right = self._truths[sequence.request.request_id][at : at + kept]
        return [*right, *(self._random.randrange(256) for _ in range(depth - len(right)))]


class _Draw:
    """Depths from 0 to the deepest, the same ones in every run."""

    def __init__(self) -> None:
        self._random = random.Random(2)

    def __call__(self) -> int:
        return self._random.randint(0, DEEPEST)


# --- what came out ------------------------------------------------------------------------------
def run(
    one: Bench, requests: Seq[Request], squeeze: bool = False
) -> tuple[dict[str, Completion], int]:
    """All completions, and how many sequences ran at once at most.

    `squeeze`: now and then, for some steps, all free blocks are taken away, so that a sequence that
    grows has others preempted for it, or itself when it is alone.
    """
    one.add(*requests)
    blocks, generator, peak = one.runners[0].blocks, random.Random(3), 0
    away = KvState()
    while not one.engine.idle:
        if squeeze and not away.blocks and generator.random() < 0.4:
            blocks.grow(away, blocks.free_blocks * blocks.block_size)
        elif away.blocks and generator.random() < 0.3:
            blocks.release(away)
        done = one.engine.step()
        one.keep(done)
        peak = max(peak, len(one.engine._scheduler.running) + len(done))
    blocks.release(away)
    return one.finished, peak


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes, FinishReason]:
    """Tokens, the bytes of their log-probabilities, and why it ended."""
    logprobs = array("d", completion.logprobs).tobytes()
    return completion.token_ids, logprobs, completion.finish_reason


def assert_same_bits(got: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert got.keys() == expected.keys()
    differing = [name for name in expected if bits(got[name]) != bits(expected[name])]
    first = differing[:1]
    assert not differing, (
        f"{len(differing)} of {len(expected)} requests differ, first {first}: "
        f"{[bits(got[n]) for n in first]} for {[bits(expected[n]) for n in first]}"
    )
    for completion in got.values():
        assert_counts_add_up(completion)
