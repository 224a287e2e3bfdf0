"""The same float32 bits at every instruction set, and on processors that are not at hand.

The digests below were made once. They change only with the order or the rounding of some operation,
and then the numeric class of native float32 must change its number too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import pytest
import torch

from specbatch.kernels import native
from specbatch.schemas.records import SamplingParams
from support import demo
from support.engines import complete, decided, make_engine
from support.grids import pairwise

pytestmark = pytest.mark.pipeline  # runs models

LEVELS = native.available()
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, top_k=50, min_p=0.01)
WHOLE = {GREEDY: "1fea6674674279e5", SAMPLED: "da63d860552dd7a8"}
FIRST_FOUR = {GREEDY: "6f918ec6b9df560d", SAMPLED: "ef5e1a914d87016b"}


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads, as it was afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def digest(params: SamplingParams, prompts: int) -> str:
    """Of the demo's first prompts: every token and the bits of its log-probability."""
    engine = make_engine(demo.VERIFIER, max_sequences=128, kv_cache_bytes=256 << 20)
    found = hashlib.sha256()
    for tokens, logprobs in decided(complete(engine, demo.prompt_ids()[:prompts], params)):
        found.update(struct.pack(f"<{len(tokens)}q", *tokens))
        found.update(struct.pack(f"<{len(logprobs)}f", *logprobs))
    return found.hexdigest()[:16]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "level", [LEVELS[0], *LEVELS[1:-1][-1:]]
)  # the best, and the least but one
def test_128_prompts_have_the_same_bits_at_the_best_level_and_the_least(
    level: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.FORCED_BY, level)
    torch.set_num_threads(1 + LEVELS.index(level) % 2)
    assert digest(params, 128) == WHOLE[params]


@pytest.mark.usefixtures("threads")
@pairwise(level=LEVELS, count=[1, 2], params={"greedy": GREEDY, "sampled": SAMPLED})
def test_neither_the_level_nor_the_number_of_threads_changes_a_bit(
    level: str, count: int, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.FORCED_BY, level)
    torch.set_num_threads(count)
    assert digest(params, 4) == FIRST_FOUR[params]
