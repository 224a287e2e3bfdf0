"""What `make bench-trees` counts, without timing anything."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from specbatch.benchmarks.acceptance import demo_prompts, demo_runners
from specbatch.benchmarks.tree_shapes import (
    RANKS,
    Chances,
    Shape,
    best_tree,
    chain,
    chances_of,
    expected_tokens,
    passes,
    tokens_per_pass,
    widths,
)
from specbatch.benchmarks.trees import CHAINS, best, flat, rank_texts, top_2, trees_of
from specbatch.kernels.verify.tree import follow
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.schemas.records import SamplingParams


def chances(*first_ranks: float) -> Chances:
    """Alike wherever they stand."""
    found = np.zeros((3, RANKS))
    found[:, : len(first_ranks)] = first_ranks
    return found


def drawn(law: Chances, length: int, seed: int) -> list[int]:
    weights = [*law[0], 1.0 - law[0].sum()]
    return random.Random(seed).choices(range(RANKS + 1), weights, k=length)


def test_a_text_of_first_choices_takes_a_pass_for_every_chain() -> None:
    assert passes(chain(3), [0] * 12) == 3
    assert passes(chain(3), [0, 0, 1, 0, 0, 0, 0, 5]) == 3
    assert passes(chain(0), [0] * 5) == 5
    assert passes(top_2(4, 1), [1, 0, 1, 3]) == 2


def test_passes_are_those_that_verification_would_take() -> None:
    """Tokens are ranks here: the verifier's are the text's, those of the tree its nodes' last."""
    for seed in range(20):
        ranks = drawn(chances(0.5, 0.3), 30, seed)
        nodes = sorted(best_tree(chances(0.5, 0.3), 7, 4), key=lambda node: (len(node), node))
        parents = [-1, *(nodes.index(n[:-1]) + 1 if n[:-1] else 0 for n in nodes)]
        at = count = 0
        while at < len(ranks):
            coming = [*ranks[at:], *[-5] * 9]
            depths = [0, *map(len, nodes)]
            kept = follow([coming[d] for d in depths], [9, *(n[-1] for n in nodes)], parents)
            at, count = at + len(kept), count + 1
        assert count == passes(frozenset(nodes), ranks)


def test_the_best_tree_is_the_best_of_all() -> None:
    law = chances(0.5, 0.3, 0.1)
    nodes = [n for size in (1, 2, 3) for n in itertools.product(range(2), repeat=size)]
    every = [
        frozenset(some)
        for some in itertools.combinations(nodes, 4)
        if all(len(n) == 1 or n[:-1] in some for n in some)
    ]
    most = max(expected_tokens(shape, law) for shape in every)
    assert expected_tokens(best_tree(law, 4, 3), law) == pytest.approx(most)
    assert max(map(len, best_tree(law, 6, 2))) == 2


def test_what_is_expected_is_what_is_counted() -> None:
    law = chances(0.6, 0.2, 0.1)
    shape = best_tree(law, 6, 4)
    counted = tokens_per_pass(shape, [drawn(law, 40_000, 1)])
    assert counted == pytest.approx(expected_tokens(shape, law), rel=0.02)
    found = chances_of([drawn(law, 40_000, 2)])
    np.testing.assert_allclose(found, law, atol=0.02)


def test_the_draft_model_has_a_pass_for_each_depth_that_is_gone_beyond() -> None:
    assert widths(chain(3)) == [1, 1, 1]
    shape: Shape = frozenset({(0,), (1,), (0, 0), (1, 0), (0, 0, 0)})
    assert widths(shape) == [1, 2, 1]
    assert widths(frozenset()) == []


def test_trees_pay_where_verified_tokens_are_free_and_not_where_they_are_dear() -> None:
    law = chances(0.6, 0.2, 0.1)
    gains = {}
    for row in (0.0, 0.5):
        rates = [
            best(shapes, flat(row, 0.1), lambda shape: expected_tokens(shape, law))[1]
            for shapes in (CHAINS, trees_of(law))
        ]
        gains[row] = rates[1] / rates[0]
    assert gains[0.0] > 1.2
    assert gains[0.5] == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_are_counted_as_the_engine_runs_them(temperature: float) -> None:
    runners, prompts = demo_runners(), demo_prompts(4)
    ranks = rank_texts(runners, temperature, prompts)
    engine = Engine(runners[0], (DraftModelProposer(runners[1]),))
    params = SamplingParams(max_tokens=64, temperature=temperature)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), params, i, depth=3))
    while not engine.idle:
        engine.step()
    counted = sum(passes(chain(3), text) for text in ranks)
    assert engine.stats.verifier_passes == counted
