"""Trees of drafts: a row attends to its path alone, and what is emitted is what depth 0 emits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specbatch.kernels.decoder.contract import (
    BLOCK_SIZE,
    DecoderBatch,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
)
from specbatch.kernels.decoder.reference import Decoder
from specbatch.kernels.paged_attention import cpu, triton
from specbatch.kernels.paged_attention.contract import RaggedBatch, path_to
from specbatch.kernels.paged_attention.reference import keep_path, paged_attention
from specbatch.kernels.verify.contract import PLACEHOLDER, SamplingRows
from specbatch.kernels.verify.reference import match_prefix, verify
from specbatch.kernels.verify.tree import follow

Tree = list[tuple[int, int]]  # of each draft token: its parent's row (the root is 0) and itself


# --- which path is followed ---------------------------------------------------------------------
def rows_of(root: int, tree: Tree) -> tuple[list[int], list[int]]:
    """(tokens, parents) of all rows, the root's first."""
    return [root, *(token for _, token in tree)], [-1, *(parent for parent, _ in tree)]


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3, most: int = 12) -> Tree:
    size = draw(st.integers(0, most))
    return [(draw(st.integers(0, row)), draw(st.integers(0, tokens - 1))) for row in range(size)]


@given(st.lists(st.integers(0, 1), max_size=6), st.data())
def test_a_tree_that_is_a_chain_is_verified_as_a_chain(
    drafts: list[int], data: st.DataObject
) -> None:
    rows = len(drafts) + 1
    decided = data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    fed, parents = rows_of(7, [(row, token) for row, token in enumerate(drafts)])
    chain = torch.tensor([*drafts, PLACEHOLDER])
    accepted = int(match_prefix(torch.tensor(decided), chain, torch.tensor([0, rows])))
    assert follow(decided, fed, parents) == list(range(accepted + 1))


@given(trees(), st.integers(0, 2**16))
def test_what_is_emitted_depends_on_no_tree(tree: Tree, seed: int) -> None:
    """The verifier is any function of a path; and no longer path of the tree agrees with it."""

    def decide(path: Sequence[int]) -> int:
        return random.Random(f"{seed} {path}").randrange(3)

    fed, parents = rows_of(0, tree)
    paths = [[fed[r] for r in path_to(row, parents)] for row in range(len(fed))]
    truth = [0]
    while len(truth) < 20:
        truth.append(decide(truth))
    kept = follow([decide(path) for path in paths], fed, parents)
    emitted = [decide(paths[row]) for row in kept]
    assert emitted == truth[1 : len(emitted) + 1]
    assert kept == path_to(kept[-1], parents)
    assert max(len(path) for path in paths if path == truth[: len(path)]) >= len(kept)


def test_of_drafts_of_one_token_the_first_is_followed() -> None:
    fed, parents = rows_of(9, [(0, 4), (0, 5), (0, 5), (3, 6), (2, 6), (5, 7)])
    assert follow([5, 0, 6, 6, 0, 7, 8], fed, parents) == [0, 2, 5, 6]
    assert follow([3, 0, 6, 6, 0, 7, 8], fed, parents) == [0]


# --- attention ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cached:
    """One sequence whose last rows are a tree, in caches whose every other slot is NaN."""

    query: Tensor  # [rows, heads, head_dim]
    keys: Tensor  # [blocks, BLOCK_SIZE, kv_heads, head_dim]
    values: Tensor
    table: list[int]
    length: int  # tokens before the tree

    def slots(self, at: Sequence[int]) -> Tensor:
        return torch.tensor([self.table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in at])

    def attend(self, parents: list[int] | None, rows: slice, end: int, **limits: Any) -> Tensor:
        query = self.query[rows]
        batch = RaggedBatch(
            [0, len(query)],
            [end],
            [self.table],
            torch.zeros(len(query), dtype=torch.int64),
            None if parents is None else [parents],
        )
        return paged_attention(query, self.keys, self.values, batch, 0.3, **limits)


def cached(length: int, rows: int, dtype: torch.dtype = torch.float32) -> Cached:
    table = (torch.randperm(-(-(length + rows) // BLOCK_SIZE) + 2) + 1).tolist()
    shape = (len(table) + 1, BLOCK_SIZE, 2, 32)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    found = Cached(torch.randn(rows, 4, 32).to(dtype), keys, values, table, length)
    for kv in (keys, values):
        kv.view(-1, 2, 32)[found.slots(range(length + rows))] = torch.randn(
            length + rows, 2, 32
        ).to(dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (40, None), (None, 5.0)])
@pytest.mark.parametrize("length", [0, 1, 31, 70, 129])
def test_a_row_has_the_bits_of_its_path_fed_alone(
    length: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    parents = [-1, 0, 0, 1, 2, 2, 5, -1]
    limits = {"window": window, "softcap": softcap}
    for row in range(len(parents)):
        seen = cached(length, len(parents), dtype)
        out = seen.attend(parents, slice(None), length + len(parents), **limits)
        path = path_to(row, parents)
        slots = seen.slots(range(length, length + len(parents)))
        for kv in (seen.keys, seen.values):
            keep_path(kv, slots, path)
        alone = seen.attend(None, slice(row, row + 1), length + len(path), **limits)
        assert torch.equal(out[row : row + 1], alone), f"row {row}"


def test_nothing_leaks_from_other_branches() -> None:
    seen = cached(40, 4)
    before = seen.attend([-1, 0, 1, 0], slice(None), 44)
    other = seen.slots([41, 42])
    for kv in (seen.keys, seen.values):
        kv.view(-1, 2, 32)[other] = torch.nan
    after = seen.attend([-1, 0, 1, 0], slice(None), 44)
    assert torch.equal(before[[0, 3]], after[[0, 3]])
    assert after[[1, 2]].isnan().all()


def test_a_chain_spelt_as_a_tree_is_the_chain() -> None:
    seen = cached(70, 5)
    tree, chain = (seen.attend(p, slice(None), 75) for p in ([-1, 0, 1, 2, 3], None))
    torch.testing.assert_close(tree, chain, rtol=3e-6, atol=3e-6)


def test_whoever_does_not_heed_trees_refuses_them() -> None:
    batch = RaggedBatch([0, 1], [1], [[1]], torch.zeros(1, dtype=torch.int64), [[-1]])
    with pytest.raises(AssertionError, match="trees"):
        cpu.paged_attention(torch.zeros(1, 1, 32), *[torch.zeros(2, 32, 1, 32)] * 2, batch, 1.0)
    with pytest.raises(AssertionError, match="trees"):
        triton.prepare(batch, torch.device("cpu"))


# --- whole passes -------------------------------------------------------------------------------
# Products of plain torch give a row the same bits at any place of a pass, but not in passes of any
# size. So every pass has ROWS rows, those that fill it up included.
VOCAB, ROWS, MOST, STEPS = 64, 48, 12, 24
SHAPE = DecoderShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inter=64,
    vocab=VOCAB,
    window=0,
    eps=1e-6,
    scaling=0.25,
)


def tiny(window: int) -> Decoder:
    """A random model that does not repeat itself."""
    made = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made) * shape[-1] ** -0.5

    def layer() -> LayerWeights:
        norms = (torch.ones(32), torch.ones(32))
        sizes = ((64, 32), (32, 32), (32, 32), (32, 64), (64, 32), (64, 32), (32, 64))
        return LayerWeights(*norms, *(weight(*size) for size in sizes))

    turns = torch.arange(256)[:, None] * 100.0 ** (-torch.arange(8) / 8)[None, :]
    angles = torch.cat((turns, turns), dim=1)
    weights = DecoderWeights(
        embedding=weight(VOCAB, 32) * 6,
        head=weight(VOCAB, 32) * 2,
        norm=torch.ones(32),
        cos=angles.cos(),
        sin=angles.sin(),
        layers=(layer(), layer()),
    )
    shape = DecoderShape(**{n: getattr(SHAPE, n) for n in SHAPE.__slots__} | {"window": window})
    return Decoder(shape, weights, num_blocks=1 + 3 * 3)


@dataclass
class Run:
    """A sequence, of which all tokens but the last are cached."""

    tokens: list[int]
    table: list[int]
    seed: int
    temperature: float
    logprobs: list[float] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.tokens) - 1


class Part(NamedTuple):
    """A sequence's rows of a pass."""

    fed: list[int]
    parents: list[int]
    positions: list[int]
    slots: list[int]


def part_of(run: Run, tree: Tree) -> Part:
    fed, parents = rows_of(run.tokens[-1], tree)
    positions = [run.cached + len(path_to(row, parents)) - 1 for row in range(len(fed))]
    places = range(run.cached, run.cached + len(fed))
    slots = [run.table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in places]
    return Part(fed, parents, positions, slots)


def step(model: Decoder, runs: Sequence[Run], drafted: Sequence[Tree] | None) -> list[int]:
    """One pass over all, with trees or (None) at depth 0; how many draft tokens each accepted."""
    trees = [[]] * len(runs) if drafted is None else drafted
    parts = [part_of(run, tree) for run, tree in zip(runs, trees, strict=True)]
    ends = list(itertools.accumulate(len(part.fed) for part in parts))
    starts, rest = [0, *ends], [0] * (ROWS - ends[-1])
    batch = DecoderBatch(
        torch.tensor([x for part in parts for x in part.fed] + rest),
        torch.tensor([x for part in parts for x in part.positions] + rest),
        RaggedBatch(
            starts,
            [run.cached + len(part.fed) for run, part in zip(runs, parts, strict=True)],
            [run.table for run in runs],
            torch.tensor([x for part in parts for x in part.slots] + rest),
            None if drafted is None else [part.parents for part in parts],
        ),
        torch.arange(ROWS),
    )
    owners = [run for run, part in zip(runs, parts, strict=True) for _ in part.fed]
    counters = [
        (run.seed, at + 1) for run, at in zip(owners, batch.positions.tolist(), strict=False)
    ]
    verdict = verify(
        model.forward(batch),
        torch.full((ROWS,), PLACEHOLDER),
        torch.tensor([0, ROWS]),
        torch.tensor(counters + [(0, 0) for _ in rest]),
        sampling(torch.tensor([run.temperature for run in owners] + [0.0 for _ in rest])),
    )
    accepted = []
    for run, part, start, end in zip(runs, parts, starts, ends, strict=False):
        path = follow(verdict.tokens[start:end].tolist(), part.fed, part.parents)
        for kv in itertools.chain(*model.caches):
            keep_path(kv, torch.tensor(part.slots), path)
        kept = [start + row for row in path]
        run.tokens += verdict.tokens[kept].tolist()
        run.logprobs += verdict.logprobs[kept].tolist()
        accepted.append(len(path) - 1)
    return accepted


def sampling(temperature: Tensor) -> SamplingRows:
    rows, none = len(temperature), torch.empty(0, dtype=torch.int64)
    return SamplingRows(
        temperature,
        torch.zeros(rows, dtype=torch.int64),
        torch.ones(rows),
        torch.zeros(rows),
        none,
        none,
        any_sampled=bool((temperature > 0).any()),
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
    )


def fresh(temperature: float) -> list[Run]:
    """Three sequences whose prompts are of several lengths; block 0 is nobody's."""
    rng = random.Random(3)
    return [
        Run(
            [rng.randrange(VOCAB) for _ in range(length)],
            [1 + i, 4 + i, 7 + i],
            40 + i,
            temperature,
        )
        for i, length in enumerate((2, 9, 33))
    ]


def prefill(model: Decoder, runs: Sequence[Run]) -> None:
    """Token by token, as all runs do it alike."""
    for run in runs:
        tokens, run.tokens = run.tokens, run.tokens[:1]
        for token in tokens[1:]:
            step(model, [run], None)
            run.tokens[-1:] = [token]
        run.logprobs.clear()


@cache
def at_depth_0(window: int, temperature: float) -> tuple[list[list[int]], list[list[float]]]:
    model, runs = tiny(window), fresh(temperature)
    prefill(model, runs)
    for _ in range(STEPS + MOST):
        step(model, runs, None)
    return [run.tokens for run in runs], [run.logprobs for run in runs]


def random_tree(rng: random.Random, truth: Sequence[int]) -> Tree:
    """Some of its paths begin as the sequence goes on; `truth` is what comes."""
    tree: Tree = []
    right = {0: 0}  # rows that are right so far, with their depth
    for row in range(1, rng.randrange(MOST) + 1):
        parent = rng.choice([*right]) if rng.random() < 0.6 else rng.randrange(row)
        token = rng.randrange(VOCAB)
        if parent in right and rng.random() < 0.6:
            token, right[row] = truth[right[parent]], right[parent] + 1
        tree.append((parent, token))
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_log_probabilities_have_the_bits_of_depth_0(
    seed: int, window: int, temperature: float
) -> None:
    tokens, logprobs = at_depth_0(window, temperature)
    model, runs, rng = tiny(window), fresh(temperature), random.Random(seed)
    prefill(model, runs)
    accepted = 0
    while min(len(run.logprobs) for run in runs) < STEPS:
        going = [run for run in runs if len(run.logprobs) < STEPS]
        truths = [tokens[runs.index(run)][len(run.tokens) :] for run in going]
        accepted += sum(step(model, going, [random_tree(rng, truth) for truth in truths]))
    assert accepted > STEPS
    for run, true, sure in zip(runs, tokens, logprobs, strict=True):
        assert run.tokens == true[: len(run.tokens)]
        assert run.logprobs == sure[: len(run.logprobs)]
    assert len({*tokens[0]}) > 8, "the model repeats itself, and hides mistakes"
