"""A KV cache is never larger than what the machine can hold."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.memory import (
    Promises,
    available_bytes,
    cache_bytes,
    gpu_caches,
)
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.kv_blocks import BlockManager, KvState
from specbatch.schemas.errors import NoEngineError
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec
from support.models import TinyPair


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """1000 MiB are available."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  9999999 kB\nMemFree:  10 kB\nMemAvailable:  1024000 kB\n")
    return path


def test_available_memory_is_read_in_bytes(meminfo: Path) -> None:
    assert available_bytes(meminfo) == 1000 << 20


@pytest.mark.parametrize(
    ("wanted", "models", "given"), [(800, 1, 800), (801, 1, 800), (400, 2, 400), (500, 2, 400)]
)
def test_a_cache_gets_what_is_wanted_or_what_there_is(
    meminfo: Path, caplog: pytest.LogCaptureFixture, wanted: int, models: int, given: int
) -> None:
    assert cache_bytes(wanted << 20, models, meminfo, Promises()) == given << 20
    assert bool(caplog.records) == (given < wanted)
    if caplog.records:
        assert f"{given} MiB instead of {wanted}" in caplog.text


def test_a_gpus_models_have_room_for_as_many_tokens_unless_a_size_is_set() -> None:
    verifier, draft = 128 << 10, 16 << 10  # bytes of a token
    caches = gpu_caches(None, [verifier, draft], 90 << 30)
    assert sum(caches) <= 72 << 30
    assert caches[0] // verifier == caches[1] // draft == (72 << 30) // (verifier + draft)
    assert gpu_caches(2 << 30, [verifier, draft], 90 << 30) == [2 << 30] * 2
    assert gpu_caches(80 << 30, [verifier, draft], 90 << 30) == [36 << 30] * 2


def test_a_second_engine_gets_what_the_first_was_not_promised(meminfo: Path) -> None:
    promises, first = Promises(), BlockManager(601, 1)
    promises.make(first, 1 << 20)
    assert cache_bytes(800 << 20, 1, meminfo, promises) == 320 << 20
    first.grow(KvState(), 600)  # it is filled: what is available says so
    assert cache_bytes(800 << 20, 1, meminfo, promises) == 800 << 20


def test_an_engine_that_is_no_more_holds_no_memory(meminfo: Path) -> None:
    promises, first = Promises(), BlockManager(601, 1)
    promises.make(first, 1 << 20)
    del first
    gc.collect()
    assert promises.outstanding == 0
    assert cache_bytes(800 << 20, 1, meminfo, promises) == 800 << 20


def test_where_other_engines_were_promised_all_of_it_the_sentence_says_so(meminfo: Path) -> None:
    promises, first = Promises(), BlockManager(991, 1)
    promises.make(first, 1 << 20)
    with pytest.raises(NoEngineError, match="990 MiB of them are promised to KV caches") as told:
        cache_bytes(800 << 20, 1, meminfo, promises)
    assert "lower SPECBATCH_KV_CACHE_MIB" in str(told.value)


@pytest.mark.parametrize("text", [None, "", "MemTotal: 1 kB\n"])
def test_where_the_system_does_not_say_the_wish_is_granted(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    assert available_bytes(path) is None
    assert cache_bytes(5 << 30, 1, path, Promises()) == 5 << 30


@pytest.mark.parametrize("models", [1, 2])
def test_a_worker_s_engines_ask(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, models: int
) -> None:
    asked = []

    def half(wanted: int, models: int) -> int:
        asked.append(models)
        return wanted // 2

    verifier = inspect_model(str(tiny_pair.verifier))
    proposer = inspect_model(str(tiny_pair.draft)) if models == 2 else None
    blocks = []
    for limit in (lambda wanted, _: wanted, half):
        monkeypatch.setattr("specbatch.pipeline.engines.exact.host.cache_bytes", limit)
        host = EngineHost(verifier, proposer, 4, 64, kv_cache_bytes=8 << 20)
        loaded = [host._load(verifier, "float32", "fast", "as-is") for _ in range(models)]
        blocks.append(host._runner(loaded[0], host._cache_shares(loaded)[0]).blocks.num_blocks)
    assert asked == [models]
    assert blocks[1] == blocks[0] // 2


@pytest.mark.parametrize(
    ("share", "why"),
    [(1, "set SPECBATCH_KV_CACHE_MIB higher"), (2, "no more memory was available for it")],
    ids=["set-too-small", "capped"],
)
def test_a_cache_that_is_shorter_than_the_context_is_told_of_once_and_why(
    tiny_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    share: int,
    why: str,
) -> None:
    """Of the verifier's: where a draft model's is too short, prompts only go without its drafts."""
    monkeypatch.setattr(
        "specbatch.pipeline.engines.exact.host.cache_bytes", lambda wanted, _: wanted // share
    )
    folders = [inspect_model(str(folder)) for folder in (tiny_pair.verifier, tiny_pair.draft)]
    host = EngineHost(*folders, 4, 64, kv_cache_bytes=128 << 10)
    engine = host.make_engine(EngineSpec(dtype="float32"))
    limit = engine.runner.context_tokens
    assert [record.getMessage() for record in caplog.records if "context" in record.msg] == [
        f"the KV cache of model {tiny_pair.verifier} has room for {limit} tokens, its context is "
        f"2048: longer prompts are refused, and longer outputs end there; {why}"
    ]
    engine.add(Request("r", (1,) * limit, SamplingParams(max_tokens=1), seed=1))
    (refused,) = engine.step()
    assert refused.error == (
        f"prompt of {limit} tokens does not fit this worker's KV cache of {limit}: {why}"
    )


def test_a_cache_that_holds_the_whole_context_is_not_told_of(
    tiny_pair: TinyPair, caplog: pytest.LogCaptureFixture
) -> None:
    host = EngineHost(inspect_model(str(tiny_pair.verifier)), None, 4, 64, kv_cache_bytes=8 << 20)
    assert host.make_engine(EngineSpec(dtype="float32")).runner.shortage is None
    assert "context" not in caplog.text
