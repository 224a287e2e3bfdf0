"""`make bench-trees`: where trees of drafts would pay beside chains, on this machine.

Outputs do not depend on drafts, so nothing has to be drafted to know what any tree would bring: the
demo's verifier writes, its draft model reads along, and the rank of each token in the draft
model's own choices (with the request's noise, where it is sampled) says which trees hold it. Passes
of both models are timed by rows, and a step of the engine around them. A tree's mask, and moving
the KV of its path, count as free: the figures are the most that trees can bring.

Times are processor time, of one thread unless told otherwise, so that others who use the machine
count little. Shapes are chosen on one half of the texts and counted on the other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from specbatch.benchmarks.acceptance import demo_prompts, demo_runners, logits_along
from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.roofline import without_filters
from specbatch.benchmarks.tree_shapes import (
    RANKS,
    Chances,
    Shape,
    best_tree,
    chain,
    chances_of,
    expected_tokens,
    tokens_per_pass,
    widths,
)
from specbatch.jobs.bench.machine import machine
from specbatch.kernels.counters.cpu import gumbel
from specbatch.kernels.verify.contract import PLACEHOLDER
from specbatch.kernels.verify.reference import process
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.schemas.records import SamplingParams

TEMPERATURES = (0.0, 0.8)
SEQUENCES = (1, 8, 32)
PROMPTS, NEW_TOKENS = 256, 64
MOST = DEEPEST = 16  # draft tokens of a sequence, and passes of the draft model
VERIFIED = range(MOST + 1)  # draft tokens of a sequence in a timed pass
DRAFTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a draft pass
CONTEXT = 96  # tokens that are cached before a timed pass
SWEEPS = 5  # of all sizes in a round
WIDEST = 8  # rows of a sequence in a pass of the draft model
STEPS, CHECKED_DEPTH = 20, 4  # of the engine, and its drafts: what surrounds the passes
Runners = tuple[ModelRunner, ModelRunner]


# --- what a step costs --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds, with so many sequences at once."""

    verify: Callable[[int], float]  # a pass and its verdict, by draft tokens of a sequence
    first: float  # the draft model's call and first pass
    further: Callable[[int], float]  # its later passes, by rows of a sequence
    around: tuple[float, float] = (0.0, 0.0)  # the rest of a step: without drafts, with them

    def step(self, shape: Shape) -> float:
        if not shape:
            return self.verify(0) + self.around[0]
        drafting = self.first + sum(map(self.further, widths(shape)[1:]))
        return self.verify(len(shape)) + drafting + self.around[1]


def flat(row: float, draft: float) -> Prices:
    """A verifier's pass costs 1 and `row` for each draft token, a draft model's pass `draft`."""
    return Prices(lambda drafted: 1.0 + row * drafted, draft, lambda _: draft)


def best(
    shapes: Sequence[Shape], prices: Prices, brings: Callable[[Shape], float]
) -> tuple[Shape, float]:
    """The shape of most tokens per second of one sequence, and these."""
    rates = [brings(shape) / prices.step(shape) for shape in shapes]
    at = int(np.argmax(rates))
    return shapes[at], rates[at]


def trees_of(chances: Chances) -> list[Shape]:
    """The best tree of every size and depth. Some are chains."""
    sizes = [(tokens, depth) for depth in range(1, DEEPEST + 1) for tokens in range(MOST + 1)]
    return list(dict.fromkeys(best_tree(chances, *size) for size in sizes))


CHAINS = [chain(depth) for depth in range(DEEPEST + 1)]


# --- texts and ranks ----------------------------------------------------------------------------
def rank_texts(runners: Runners, temperature: float, prompts: list[list[int]]) -> list[list[int]]:
    """Of each token of each output: how many tokens the draft model would choose before it."""
    verifier, draft = runners
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature)
    engine = Engine(verifier, ())
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), params, i))
    texts: dict[int, tuple[int, ...]] = {}
    while not engine.idle:
        texts |= {int(c.request_id): tuple(c.token_ids) for c in engine.step()}
    return [ranks_of(draft, prompts[i], texts[i], temperature, i) for i in range(len(prompts))]


@torch.inference_mode()
def ranks_of(
    draft: ModelRunner, prompt: list[int], text: tuple[int, ...], temperature: float, seed: int
) -> list[int]:
    scores = process(logits_along(draft, prompt, text), without_filters(len(text), temperature))
    if temperature:
        at = torch.arange(len(text))
        scores = scores + gumbel(torch.stack((torch.full_like(at, seed), at), 1), scores.shape[1])
    own = scores.gather(1, torch.tensor(text)[:, None])
    ranks: list[int] = (scores > own).sum(dim=1).tolist()
    return ranks


# --- timing -------------------------------------------------------------------------------------
class Timed:
    """Passes of both models with sequences of `CONTEXT` tokens.

    As in an engine's step, the other model was the last to run: it has emptied the caches.
    """

    def __init__(self, runners: Runners, temperature: float) -> None:
        self._runners, self._temperature = runners, temperature
        self._sampler = choose_sampler(runners[0].device)
        self._kv = [
            [self._cached(r) for _ in range(n)] for r, n in zip(runners, most_rows(), strict=True)
        ]

    @staticmethod
    def _cached(runner: ModelRunner) -> KvState:
        kv = KvState()
        runner.blocks.grow(kv, CONTEXT + MOST + 2)
        runner.forward([Chunk(kv, [(7 * i + 3) % 1000 for i in range(CONTEXT)], 0)])
        return kv

    def release(self) -> None:
        for runner, held in zip(self._runners, self._kv, strict=True):
            for kv in held:
                runner.blocks.release(kv)

    @torch.inference_mode()
    def verify(self, sequences: int, drafted: int) -> float:
        """A pass over so many sequences, each with so many draft tokens, and its verdict."""
        rows = sequences * (1 + drafted)
        arguments = (torch.full((rows,), PLACEHOLDER), torch.arange(0, rows + 1, 1 + drafted))
        counters, plain = (
            torch.ones(rows, 2, dtype=torch.int64),
            without_filters(rows, self._temperature),
        )
        self._runners[1].forward(self._chunks(1, 1, 1))
        chunks = self._chunks(0, sequences, 1 + drafted)
        begun = time.process_time()
        logits = self._runners[0].forward(chunks)
        self._sampler.verify(logits, *arguments, counters, plain)
        return time.process_time() - begun

    def draft(self, sequences: int, depth: int) -> float:
        """A call of the draft model for so many sequences and tokens of each."""
        self._runners[0].forward(self._chunks(0, 1, 1))
        counters = torch.ones(sequences, 2, dtype=torch.int64)
        plain, chunks = without_filters(sequences, self._temperature), self._chunks(1, sequences, 1)
        begun = time.process_time()
        self._runners[1].draft(chunks, [depth] * sequences, counters, plain)
        return time.process_time() - begun

    def _chunks(self, which: int, sequences: int, tokens: int) -> list[Chunk]:
        chunks = []
        for i, kv in enumerate(self._kv[which][:sequences]):
            kv.length = CONTEXT
            chunks.append(Chunk(kv, [(11 * i + 5 * j) % 1000 for j in range(tokens)], tokens))
        return chunks


def most_rows() -> tuple[int, int]:
    return max(SEQUENCES), max(DRAFTED)


def engine_step(runners: Runners, n: int, temperature: float, depth: int) -> float:
    """Median seconds of a step of `n` sequences at a fixed depth, behind the prompts' own."""
    verifier, draft = runners
    engine = Engine(verifier, (DraftModelProposer(draft),) if depth else (), n)
    params = SamplingParams(
        max_tokens=(STEPS + 2) * (1 + depth), temperature=temperature, ignore_eos=True
    )
    for i in range(n):
        prompt = tuple((7 * i + 3 * j) % 1000 for j in range(CONTEXT - STEPS))
        engine.add(Request(str(i), prompt, params, i, depth=depth))
    engine.step()
    seconds = []
    for _ in range(STEPS):
        begun = time.process_time()
        engine.step()
        seconds.append(time.process_time() - begun)
    engine.cancel(lambda _: True)
    return statistics.median(seconds)


def time_round(runners: Runners, temperature: float) -> dict[int, Prices]:
    """One round of all prices."""
    timed = Timed(runners, temperature)
    calls = medians(timed.draft, [(rows, depth) for rows in DRAFTED for depth in (1, 5)])
    later = [(calls[rows, 5] - calls[rows, 1]) / 4 for rows in DRAFTED]
    passes = medians(timed.verify, [(n, drafted) for n in SEQUENCES for drafted in VERIFIED])
    verified = {n: [passes[n, drafted] for drafted in VERIFIED] for n in SEQUENCES}
    timed.release()
    prices = {}
    for n in SEQUENCES:
        apart = Prices(between(VERIFIED, verified[n]), calls[n, 1], between(DRAFTED, later, n))
        around = tuple(
            engine_step(runners, n, temperature, depth) - apart.step(chain(depth))
            for depth in (0, CHECKED_DEPTH)
        )
        prices[n] = Prices(apart.verify, apart.first, apart.further, (around[0], around[1]))
    return prices


def medians(
    call: Callable[[int, int], float], sizes: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Of every size, over several sweeps in random order."""
    seconds = defaultdict(list)
    for sweep in range(1 + SWEEPS):
        for size in random.Random(sweep).sample(sizes, len(sizes)):
            taken = call(*size)
            if sweep:  # the first warms up
                seconds[size].append(taken)
    return {size: statistics.median(seconds[size]) for size in sizes}


def between(
    sizes: Sequence[int], seconds: Sequence[float], times: int = 1
) -> Callable[[int], float]:
    return lambda size: float(np.interp(size * times, sizes, seconds))


def median_prices(rounds: Sequence[Prices]) -> Prices:
    median, wide = statistics.median, range(1, WIDEST + 1)
    return Prices(
        between(VERIFIED, [median(of.verify(k) for of in rounds) for k in VERIFIED]),
        median(of.first for of in rounds),
        between(wide, [median(of.further(k) for of in rounds) for k in wide]),
        (median(of.around[0] for of in rounds), median(of.around[1] for of in rounds)),
    )


# --- the tables ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Halves:
    """Ranks of texts: those by which shapes are chosen, and those on which they are counted."""

    chosen_on: list[list[int]]
    counted_on: list[list[int]]


def by_budget(halves: Halves) -> list[dict[str, Any]]:
    """Tokens per pass of a chain and of the best tree of as many draft tokens."""
    chances, rows = chances_of(halves.chosen_on), []
    for tokens in range(1, MOST + 1):
        shapes = {
            "chain": chain(tokens),
            "tree": best_tree(chances, tokens, MOST),
            "top_2_first": top_2(tokens, 1),
            "top_2_twice": top_2(tokens, 2),
        }
        found = {k: round(tokens_per_pass(s, halves.counted_on), 3) for k, s in shapes.items()}
        rows.append({"draft_tokens": tokens, **found, "tree_depth": len(widths(shapes["tree"]))})
    return rows


def top_2(tokens: int, levels: int) -> Shape:
    """A chain with a leaf of the second choice at its first few places, of so many tokens."""
    leaves = min(levels, tokens // 2)
    extra = {(*(0,) * i, 1) for i in range(leaves)}
    return chain(tokens - leaves) | extra


def at_prices(halves: Halves, rounds: Sequence[Mapping[int, Prices]]) -> list[dict[str, Any]]:
    chances, rows = chances_of(halves.chosen_on), []
    trees, brings = trees_of(chances), counted(halves.chosen_on)
    for n in SEQUENCES:
        prices = median_prices([of[n] for of in rounds])
        chosen = {k: best(s, prices, brings)[0] for k, s in (("chain", CHAINS), ("tree", trees))}
        tokens = {k: tokens_per_pass(s, halves.counted_on) for k, s in chosen.items()}
        gains = [
            tokens["tree"]
            / of[n].step(chosen["tree"])
            * of[n].step(chosen["chain"])
            / tokens["chain"]
            for of in rounds
        ]
        rates = {k: round(n * tokens[k] / prices.step(s), 1) for k, s in chosen.items()}
        rows.append(
            {
                "n": n,
                "depth_0_tokens_per_sec": round(n / prices.step(frozenset()), 1),
                "chain_depth": len(chosen["chain"]),
                "chain_tokens_per_pass": round(tokens["chain"], 3),
                "chain_tokens_per_sec": rates["chain"],
                "tree": sorted(map(list, chosen["tree"])),
                "tree_tokens_per_pass": round(tokens["tree"], 3),
                "tree_tokens_per_sec": rates["tree"],
                "tree_over_chain": round(rates["tree"] / rates["chain"], 3),
                "drafted_over_depth_0": over_depth_0(halves, prices, trees),
                "tree_over_chain_by_round": [round(gain, 3) for gain in sorted(gains)],
                "pass_usec": {k: round(prices.verify(k) * 1e6) for k in VERIFIED},
                "draft_first_usec": round(prices.first * 1e6),
                "draft_further_usec": {k: round(prices.further(k) * 1e6) for k in (1, 2, 4, 8)},
                "around_usec": [round(sec * 1e6) for sec in prices.around],
            }
        )
    return rows


def over_depth_0(halves: Halves, prices: Prices, trees: list[Shape]) -> dict[str, float]:
    """Tokens per second of the best chain and the best tree that are no depth 0, over depth 0's."""
    brings, found = counted(halves.chosen_on), {}
    for kind, shapes in (("chain", CHAINS), ("tree", trees)):
        shape = best([s for s in shapes if s], prices, brings)[0]
        rate = tokens_per_pass(shape, halves.counted_on) / prices.step(shape)
        found[kind] = round(rate * prices.step(frozenset()), 3)
    return found


def counted(texts: Sequence[Sequence[int]]) -> Callable[[Shape], float]:
    known: dict[Shape, float] = {}

    def brings(shape: Shape) -> float:
        if shape not in known:
            known[shape] = tokens_per_pass(shape, texts)
        return known[shape]

    return brings


def at_other_prices(halves: Halves) -> list[dict[str, Any]]:
    """The best tree beside the best chain where passes cost otherwise, with the demo's drafts."""
    trees, brings = trees_of(chances_of(halves.chosen_on)), counted(halves.chosen_on)
    counts, rows = counted(halves.counted_on), []
    for row in (0.0, 0.01, 0.03, 0.1):
        for draft in (0.0, 0.03, 0.1, 0.3):
            prices = flat(row, draft)
            one, many = (best(shapes, prices, brings)[0] for shapes in (CHAINS, trees))
            gain = counts(many) / prices.step(many) * prices.step(one) / counts(one)
            rows.append(
                {
                    "row": row,
                    "draft_pass": draft,
                    "chain_depth": len(one),
                    "tree_tokens": len(many),
                    "tree_over_chain": round(gain, 3),
                }
            )
    return rows


def at_other_acceptances(second: float) -> list[dict[str, Any]]:
    """The same for drafts that are right more or less often; `second` is the share of misses that
    the next choice makes up for."""
    rows = []
    for acceptance in (0.3, 0.5, 0.7, 0.9):
        chances = np.zeros((3, RANKS))
        chances[:, 0] = acceptance
        for rank in range(1, RANKS):
            chances[:, rank] = (1.0 - acceptance) * second * (1.0 - second) ** (rank - 1)
        trees = trees_of(chances)
        for row in (0.0, 0.01, 0.03, 0.1):
            prices = flat(row, 0.1)
            brings = partial(expected_tokens, chances=chances)
            rates = [best(shapes, prices, brings)[1] for shapes in (CHAINS, trees)]
            gain = round(rates[1] / rates[0], 3)
            rows.append({"acceptance": acceptance, "row": row, "tree_over_chain": gain})
    return rows


def chance_table(halves: Halves) -> dict[str, list[float]]:
    names = ("first", "behind_a_first_choice", "behind_another")
    found = chances_of(halves.chosen_on + halves.counted_on)
    return {name: [round(float(c), 4) for c in row] for name, row in zip(names, found, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runners, prompts = demo_runners(), demo_prompts(PROMPTS)
    rounds: dict[float, list[dict[int, Prices]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for temperature in TEMPERATURES:
            rounds[temperature].append(time_round(runners, temperature))
    result: dict[str, Any] = {"machine": machine(), "pair": "demo", "dtype": "float32"}
    for temperature in TEMPERATURES:
        ranks = rank_texts(runners, temperature, prompts)
        halves = Halves(ranks[::2], ranks[1::2])
        chances = chance_table(halves)
        second = chances["first"][1] / (1.0 - chances["first"][0])
        result["greedy" if not temperature else f"temperature_{temperature}"] = {
            "chance_of_rank": chances,
            "tokens_per_pass": by_budget(halves),
            "at_prices": at_prices(halves, rounds[temperature]),
            "at_other_prices": at_other_prices(halves),
            "at_other_acceptances": at_other_acceptances(second),
        }
    print(json.dumps(result, indent=1))
    (RESULTS / "trees-demo.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
