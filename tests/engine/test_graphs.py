"""Recorded passes: what is padded into static buffers comes out as if it had run by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE, DecoderBatch
from specbatch.kernels.paged_attention.triton import PREPARED, Tiles, prepare
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model import graphs
from specbatch.pipeline.engines.exact.model.batch import Chunk, build_batch
from specbatch.pipeline.engines.exact.model.graphs import (
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    GraphedDecoder,
    bucket,
    why_not,
)
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.kv_blocks import TRASH_BLOCK, KvState
from specbatch.schemas.records import SamplingParams
from support.architectures import VOCAB, tiny_model
from support.devices import INTERPRETED, TRITON_DEVICE
from support.engines import complete, decided

pytestmark = pytest.mark.pipeline  # runs models

CPU = torch.device("cpu")


def capture_eagerly(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Without CUDA graphs: run the pass again over the same memory."""
    out = run()

    def replay() -> None:
        out.copy_(run())

    return replay, out


CAPTURE = capture_eagerly if INTERPRETED else graphs.CudaCapture


class Sums:
    """Stands for a model: a wanted row says all that the batch says of its token."""

    def __init__(self) -> None:
        self.seen: list[DecoderBatch] = []

    def forward(self, batch: DecoderBatch) -> Tensor:
        self.seen.append(batch)
        if PREPARED not in batch.ragged.prepared:
            batch.ragged.prepared[PREPARED] = prepare(batch.ragged, CPU)
        made = cast(Tiles, batch.ragged.prepared[PREPARED])
        rows = torch.zeros(len(batch.ids), 5)
        rows[:, 0], rows[:, 1], rows[:, 2] = batch.ids, batch.positions, batch.ragged.slots
        for first, count, at, table in made.tiles.tolist():
            for i in range(first, first + count):  # what attention reads: a place and its block
                rows[i, 3] = at + i - first
                rows[i, 4] = made.tables[table + (at + i - first) // BLOCK_SIZE]
        return rows[batch.logit_rows]


def chunks_of(sizes: list[tuple[int, int]], seed: int) -> list[Chunk]:
    """(tokens before, tokens now) of every sequence; logits of the last one of each."""
    generator = random.Random(seed)
    chunks = []
    for before, count in sizes:
        blocks = [generator.randrange(1, 900) for _ in range(-(-(before + count) // BLOCK_SIZE))]
        ids = [generator.randrange(1, 1000) for _ in range(count)]
        chunks.append(Chunk(KvState(blocks=blocks, length=before), ids, 1))
    return chunks


def batch_of(chunks: list[Chunk], graphed: bool) -> DecoderBatch:
    if not graphed:
        return build_batch(chunks, BLOCK_SIZE, lambda count: count, CPU)
    padded, rows = (partial(bucket, buckets) for buckets in (TOKEN_BUCKETS, ROW_BUCKETS))
    return build_batch(chunks, BLOCK_SIZE, padded, CPU, rows)


def graphed(model: Sums, table_blocks: int = 20) -> GraphedDecoder:
    return GraphedDecoder(cast(TorchDecoder, model), capture_eagerly, CPU, table_blocks)


@pytest.mark.parametrize("buckets", [TOKEN_BUCKETS, ROW_BUCKETS], ids=["tokens", "rows"])
def test_a_bucket_holds_its_rows_and_no_smaller_one_does(buckets: tuple[int, ...]) -> None:
    for count in range(1, 700):
        fitting = [size for size in buckets if size >= count]
        assert bucket(buckets, count) == (min(fitting) if fitting else count)


def test_logits_are_those_of_the_pass_itself_whatever_ran_before() -> None:
    model = Sums()
    decoder = graphed(model)
    passes = [
        [(500, 1)] * 40,
        [(0, 3)],
        [(70, 5), (0, 100), (31, 1)],
        [(64, 1), (600, 9)],
        [(5, 1)] * 33,
        [(0, 1)],
    ]
    for seed, sizes in enumerate([*passes, *reversed(passes)]):
        chunks = chunks_of(sizes, seed)
        expected = Sums().forward(batch_of(chunks, graphed=False))
        got = decoder.forward(batch_of(chunks, graphed=True))
        assert torch.equal(got[: len(chunks)], expected)


def test_a_recorded_pass_reads_nothing_from_the_host() -> None:
    model = Sums()
    decoder = graphed(model)
    for seed in range(3):
        decoder.forward(batch_of(chunks_of([(40, 1)] * 20, seed), graphed=True))
    first, *others = model.seen
    assert first.ragged.query_starts == first.ragged.context_lens == []
    assert first.ragged.block_tables == []
    assert all(batch is first for batch in others), "one recording, one batch"


def test_a_bucket_that_cannot_be_recorded_runs_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        tried.append(len(run()))
        if len(tried) == 1:
            raise RuntimeError("no room for the graph")
        return capture_eagerly(run)

    model = Sums()
    decoder = GraphedDecoder(cast(TorchDecoder, model), capture, CPU, 20)
    for seed in range(3):
        chunks = chunks_of([(40, 1)] * 20, seed)
        got = decoder.forward(batch_of(chunks, graphed=True))
        assert torch.equal(got[:20], Sums().forward(batch_of(chunks, graphed=False)))
    assert len(tried) == decoder.recordings == 1, "it is tried once"
    assert caplog.text.count("24 tokens and 32 logit rows cannot be recorded") == 1
    decoder.forward(batch_of(chunks_of([(40, 1)], 0), graphed=True))
    assert decoder.recordings == 2, "other buckets are recorded"


def test_each_bucket_is_recorded_once() -> None:
    recorded: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        recorded.append(1)
        return capture_eagerly(run)

    decoder = GraphedDecoder(cast(TorchDecoder, Sums()), capture, CPU, 20)
    for count, so_far in ((3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (3, 3), (33, 4)):
        decoder.forward(batch_of(chunks_of([(10, 1)] * count, 0), graphed=True))
        assert len(recorded) == so_far, f"{count} rows"


def test_padding_writes_to_the_trash_block_and_attends_to_nothing() -> None:
    model = Sums()
    graphed(model).forward(batch_of(chunks_of([(10, 1)] * 5, 0), graphed=True))
    batch = model.seen[-1]
    assert len(batch.ids) == 8
    assert (batch.ragged.slots[5:] // BLOCK_SIZE == TRASH_BLOCK).all()
    assert (cast(Tiles, batch.ragged.prepared[PREPARED]).tiles[5:, 1] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "table_blocks"),
    [([(0, TOKEN_BUCKETS[-1] + 1)], 20), ([(BLOCK_SIZE * 600, 1)], 1)],
    ids=["long", "wide"],
)
def test_what_fits_no_buffer_runs_as_it_is(sizes: list[tuple[int, int]], table_blocks: int) -> None:
    model, chunks = Sums(), chunks_of(sizes, 0)
    batch = batch_of(chunks, graphed=True)
    got = graphed(model, table_blocks).forward(batch)
    assert len(model.seen) == 1
    assert model.seen[0] is batch
    assert torch.equal(got[:1], Sums().forward(batch_of(chunks, graphed=False)))


# --- a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model("gemma2", tmp_path_factory.mktemp("gemma2"))
    return load_model(inspect_model(str(folder)), "float32", device=TRITON_DEVICE, kernels="triton")


@pytest.mark.parametrize(("rows", "kept"), [(5, 8 * 5), (9, 8 * 4 + 8 + 32)])
def test_the_workspace_counts_buffers_and_what_recordings_keep(
    model: LoadedModel, rows: int, kept: int
) -> None:
    """Passes of at most 16 tokens: five buckets, of which the last can have more than 8 rows."""
    plain = TorchDecoder(model, 4)
    decoder = GraphedDecoder(plain, capture_eagerly, torch.device(TRITON_DEVICE), table_blocks=20)
    most = TOKEN_BUCKETS[-1]
    buffers = 3 * most * 8 + ROW_BUCKETS[-1] * 8 + most * 4 * 4 + most * 20 * 4
    weights, cache_bytes, work = decoder.memory(16, rows, 99)
    assert (weights, cache_bytes) == plain.memory(16, rows, 99)[:2]
    assert work - plain.memory(16, rows, 99)[2] == buffers + kept * VOCAB * 4
    assert min(weights, cache_bytes) > 0


def test_an_engine_writes_the_same_from_recordings(model: LoadedModel) -> None:
    """Parts of prompts and single tokens, in buckets of several sizes."""
    params = SamplingParams(max_tokens=2, temperature=0.8)
    generator = random.Random(0)
    prompts = [tuple(generator.randrange(VOCAB - 1) for _ in range(n)) for n in (1, 18)]
    runs = []
    for capture in (None, CAPTURE if INTERPRETED else CAPTURE()):
        engine = Engine(ModelRunner(model, 16 << 20, capture=capture), (), 64, 16)
        runs.append(decided(complete(engine, prompts, params)))
    assert runs[0] == runs[1]


def test_models_that_ask_the_host_are_not_recorded(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not(model) is None
    assert why_not(replace(model, kernels="torch")) == "its attention works on the host"
    rope = {"sliding_attention": {"rope_type": "dynamic"}}
    monkeypatch.setattr(model.module.config, "rope_parameters", rope, raising=False)
    assert why_not(model) == "rope type dynamic looks at the positions"
    experts = load_model(inspect_model(str(tiny_model("mixtral", tmp_path))), "float32")
    assert why_not(replace(experts, kernels="triton")) == (
        "its experts are called by what the host knows of the rows"
    )
