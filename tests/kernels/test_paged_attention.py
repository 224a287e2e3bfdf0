"""Attention over paged blocks: every implementation against the definition, and bit for bit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specbatch.kernels.paged_attention import cpu, reference
from specbatch.kernels.paged_attention import triton as triton_kernel
from specbatch.kernels.paged_attention.contract import RaggedBatch
from support.devices import INTERPRETED, TRITON_DEVICE, on_triton_device
from support.grids import pairwise

Attention = Callable[..., Tensor]
IMPLEMENTATIONS: dict[str, Attention] = {
    "cpu": cpu.paged_attention,
    "triton": on_triton_device(triton_kernel.paged_attention),
}
BLOCK = 32
HEADS = 4


@dataclass(frozen=True)
class Story:
    """One sequence: all queries, keys and values it will ever have, and its blocks."""

    query: Tensor  # [length, HEADS, head_dim]
    key: Tensor  # [length, kv_heads, head_dim]
    value: Tensor
    blocks: list[int]


@dataclass(frozen=True)
class World:
    """Stories in caches whose every other slot is NaN."""

    stories: list[Story]
    key_cache: Tensor
    value_cache: Tensor

    @property
    def scaling(self) -> float:
        return float(self.key_cache.shape[-1] ** -0.5)


def world(
    lengths: Sequence[int],
    head_dim: int = 32,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> World:
    needed = [-(-length // BLOCK) for length in lengths]
    order = (torch.randperm(sum(needed) + 5) + 1).tolist()  # block 0 is nobody's
    shape = (len(order) + 1, BLOCK, kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    stories = []
    for length, count in zip(lengths, needed, strict=True):
        blocks = [order.pop() for _ in range(count)]
        query = torch.randn(length, HEADS, head_dim).to(dtype)
        key, value = (torch.randn(length, kv_heads, head_dim).to(dtype) for _ in range(2))
        at = torch.arange(length)
        slots = torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK
        for cache, new in zip(caches, (key, value), strict=True):
            cache.view(-1, kv_heads, head_dim)[slots] = new
        stories.append(Story(query, key, value, blocks))
    return World(stories, caches[0], caches[1])


def attend(
    attention: Attention,
    seen: World,
    parts: Sequence[tuple[int, int, int]],  # (story, first position, end): a sequence's newest
    padding: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    batch_invariant: bool = True,
) -> list[Tensor]:
    """Output of each part, and last that of the padding rows."""
    sizes = [end - first for _, first, end in parts]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    rows = [seen.stories[i].query[first:end] for i, first, end in parts]
    rows.append(torch.full((padding, *rows[0].shape[1:]), 3.0, dtype=rows[0].dtype))
    batch = RaggedBatch(
        query_starts=starts,
        context_lens=[end for _, _, end in parts],
        block_tables=[seen.stories[i].blocks for i, _, _ in parts],
        slots=torch.zeros(starts[-1] + padding, dtype=torch.int64),
        batch_invariant=batch_invariant,
    )
    out = attention(
        torch.cat(rows),
        seen.key_cache,
        seen.value_cache,
        batch,
        scaling=seen.scaling,
        window=window,
        softcap=softcap,
    )
    return list(out.split([*sizes, padding]))


def textbook(seen: World, part: tuple[int, int, int], window: int | None = None) -> Tensor:
    """One query and one head at a time, in float64, from the story and not from the cache."""
    i, first, end = part
    story = seen.stories[i]
    group = HEADS // story.key.shape[1]
    rows = []
    for at in range(first, end):
        low = 0 if window is None else max(0, at - window + 1)
        for head in range(HEADS):
            keys = story.key[low : at + 1, head // group].double()
            values = story.value[low : at + 1, head // group].double()
            weights = (keys @ story.query[at, head].double() * seen.scaling).softmax(0)
            rows.append(weights @ values)
    return torch.stack(rows).view(end - first, HEADS, -1)


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=list(IMPLEMENTATIONS), ids=str)
def attention(request: pytest.FixtureRequest) -> Attention:
    return IMPLEMENTATIONS[request.param]


def is_slow(attention: Attention) -> bool:
    """Triton's interpreter takes milliseconds for every chunk of keys: smaller worlds for it."""
    return INTERPRETED and attention is IMPLEMENTATIONS["triton"]


@pairwise(
    kv_heads=[4, 2, 1],
    head_dim=[32, 64],
    dtype=[torch.float32, torch.bfloat16],
    limits=[(None, None), (17, None), (200, None), (None, 2.0), (33, 5.0)],
)
def test_output_is_the_reference_s(
    attention: Attention,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    limits: tuple[int | None, float | None],
) -> None:
    window, softcap = limits
    lengths = [1, 127, 128, 129, 500, 64]
    per_pass = [[1, 1, 1, 1, 1, 1], [1, 5, 8, 9, 64, 63], [1, 64, 7, 17, 2, 64]]
    if is_slow(attention):
        lengths, per_pass = [1, 63, 64, 65, 129], [[1, 1, 8, 9, 3]]
    seen = world(lengths, head_dim, kv_heads, dtype)
    for queries in per_pass:
        parts = [
            (i, len(story.query) - count, len(story.query))
            for (i, story), count in zip(enumerate(seen.stories), queries, strict=True)
        ]
        got = attend(attention, seen, parts, 3, window, softcap)
        expected = attend(reference.paged_attention, seen, parts, 3, window, softcap)
        assert all(out.dtype == dtype for out in got)
        assert_close(got, expected, dtype)


@pytest.mark.parametrize("queries", [1, 3, 8, 30])
def test_output_without_constant_shapes_is_the_reference_s(
    attention: Attention, queries: int
) -> None:
    seen = world([33, 64, 130])
    parts = [(i, len(s.query) - queries + i % 2, len(s.query)) for i, s in enumerate(seen.stories)]
    parts = [part for part in parts if part[1] < part[2]]
    got = attend(attention, seen, parts, 3, 40, batch_invariant=False)
    assert_close(got, attend(reference.paged_attention, seen, parts, 3, 40), torch.float32)


@pytest.mark.parametrize("context", [1, 31, 32, 33, 127, 128, 129, 500])
@pytest.mark.parametrize("queries", [1, 2, 63, 64])
def test_any_context_and_query_length_is_computed_alone(
    attention: Attention, context: int, queries: int
) -> None:
    seen = world([context])
    part = (0, max(0, context - queries), context)
    got = attend(attention, seen, [part])
    assert_close(got, attend(reference.paged_attention, seen, [part]), torch.float32)


@pytest.mark.parametrize("window", [None, 1, 40])
def test_reference_is_textbook_attention(window: int | None) -> None:
    seen = world([5, 129])
    parts = [(0, 0, 5), (1, 120, 129)]
    got = attend(reference.paged_attention, seen, parts, window=window)[:2]
    assert_close(got, [textbook(seen, part, window) for part in parts], torch.float32)


def test_softcap_bounds_the_scores(attention: Attention) -> None:
    seen = world([40])
    mild = attend(attention, seen, [(0, 39, 40)], softcap=1e-4)[0]
    mean = seen.stories[0].value.mean(dim=0).repeat_interleave(2, dim=0)
    torch.testing.assert_close(mild[0], mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 17])
def test_nothing_leaks_from_slots_a_sequence_does_not_own(
    attention: Attention, window: int | None
) -> None:
    """Every unused slot, block 0 included, is NaN in these worlds."""
    seen = world([1, 33, 100, 129, 130])
    parts = [(i, len(s.query) - 1, len(s.query)) for i, s in enumerate(seen.stories)]
    for out in attend(attention, seen, parts, window=window):
        assert torch.isfinite(out).all()


def test_a_poisoned_sequence_spoils_no_other(attention: Attention) -> None:
    seen = world([70, 200, 40])
    parts = [(0, 62, 70), (1, 150, 200), (2, 39, 40)]
    before = attend(attention, seen, parts)
    blocks = torch.tensor(seen.stories[1].blocks)
    seen.key_cache[blocks] = torch.nan
    seen.value_cache[blocks] = torch.nan
    after = attend(attention, seen, parts)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert after[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (40, None), (None, 5.0)], ids=["full", "window", "cap"]
)
def test_a_token_has_the_same_bits_alone_in_a_draft_in_a_prompt_and_in_company(
    attention: Attention, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    length, sizes = 300, (2, 4, 5, 8, 9, 64, 300)
    if is_slow(attention):
        length, sizes = 70, (3, 9, 70)
    seen = world([length, 64, 1, 500, 131], dtype=dtype)
    alone = torch.cat(
        [attend(attention, seen, [(0, at, at + 1)], 0, window, softcap)[0] for at in range(length)]
    )
    for size in sizes:
        for first in range(0, length, size):
            end = min(first + size, length)
            out = attend(attention, seen, [(0, first, end)], 0, window, softcap)[0]
            assert torch.equal(out, alone[first:end]), f"{size} tokens at {first}"
    others = [(1, 0, 64), (2, 0, 1), (3, 437, 500), (4, 126, 131)]
    places = [(299, 300), (120, 135), (0, 300), (127, 128), (64, 128)]
    if is_slow(attention):
        others, places = [(1, 60, 64), (2, 0, 1), (3, 499, 500), (4, 126, 131)], [(60, 66)]
    for first, end in places:
        parts = [*others[:2], (0, first, end), *others[2:]]
        out = attend(attention, seen, parts, 5, window, softcap)[2]
        assert torch.equal(out, alone[first:end]), f"{first} to {end} in company"


@pytest.mark.parametrize("companions", [1, 7, 63, 200])
def test_a_token_has_the_same_bits_in_a_batch_of_any_size(
    attention: Attention, companions: int
) -> None:
    if is_slow(attention):
        companions = min(companions, 20)
    seen = world([129, 1, 300])
    alone = attend(attention, seen, [(0, 128, 129)])[0]
    parts = [(1 + i % 2, 0, 1) for i in range(companions)]
    assert torch.equal(attend(attention, seen, [*parts, (0, 128, 129)])[-2], alone)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS.values(), reference.paged_attention])
def test_padding_rows_are_zero(implementation: Attention) -> None:
    seen = world([20, 130])
    padding = attend(implementation, seen, [(0, 13, 20), (1, 129, 130)], padding=9)[-1]
    assert padding.shape[0] == 9
    assert torch.equal(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_signatures_agree(name: str) -> None:
    ours = inspect.signature(IMPLEMENTATIONS[name]).parameters.values()
    theirs = inspect.signature(reference.paged_attention).parameters.values()
    assert [(p.name, p.kind, p.default, p.annotation) for p in ours] == [
        (p.name, p.kind, p.default, p.annotation) for p in theirs
    ]


def test_what_is_prepared_for_one_window_is_not_used_for_another(attention: Attention) -> None:
    """Layers of one pass share a batch and may differ in their window."""
    seen = world([100])
    story = seen.stories[0]
    batch = RaggedBatch([0, 1], [100], [story.blocks], torch.zeros(1, dtype=torch.int64))
    outs = [
        attention(
            story.query[99:], seen.key_cache, seen.value_cache, batch, seen.scaling, window=window
        )
        for window in (None, 10, None)
    ]
    assert torch.equal(outs[0], outs[2])
    assert not math.isclose(float(outs[0].sum()), float(outs[1].sum()), rel_tol=1e-3)


def test_tiles_without_tokens_do_nothing() -> None:
    """A pass of a constant number of tiles, as a recorded one needs."""
    seen = world([100, 40])
    query = torch.cat([story.query[-9:] for story in seen.stories])
    tables = [story.blocks for story in seen.stories]
    outs = []
    for least in (0, 30):
        batch = RaggedBatch([0, 9, 18], [100, 40], tables, torch.zeros(18, dtype=torch.int64))
        device = torch.device(TRITON_DEVICE)
        prepared = triton_kernel.prepare(batch, device, least)
        assert len(prepared.tiles) == max(4, least)
        batch.prepared[triton_kernel.PREPARED] = prepared
        outs.append(
            IMPLEMENTATIONS["triton"](
                query, seen.key_cache, seen.value_cache, batch, seen.scaling, window=50
            )
        )
    assert torch.equal(*outs)
