"""One model over two processes: the tokens of one, and clear refusals of what cannot be shared."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model import parallel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.parallel import Leader, join_ranks
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.errors import (
    DeviceLostError,
    MissingExtraError,
    ModelError,
    StepHungError,
    UsageError,
)
from specbatch.schemas.records import SamplingParams
from support import forks
from support.architectures import tiny_model
from support.engines import complete
from support.models import TinyPair
from support.servers import free_port

pytestmark = pytest.mark.pipeline  # runs models

PROMPTS = [tuple(range(2, 2 + n)) for n in (1, 9, 33, 60)]
PARAMS = SamplingParams(max_tokens=20, temperature=0.7)

RANK = """
import json, sys
import torch
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.exact.model.parallel import Leader, follow, join_ranks
from specbatch.pipeline.engines.contract import Request
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.spec import EngineSpec

torch.set_num_threads(1)
folder, prompts = json.loads(sys.argv[1])
rank, device = join_ranks(2, "cpu")
if rank:
    follow(device)
    sys.exit()
leader = Leader(2)
verifier = inspect_model(folder)
host = EngineHost(verifier, verifier, 8, 64, kv_cache_bytes=4 << 20, leader=leader)
service = host.service(EngineSpec(dtype="float32", exactness="fast"))
answers = []
for job, depth in (("a", 0), ("b", 3)):
    params = SamplingParams(max_tokens=20, temperature=0.7)
    requests = [
        Request(f"{job}{i}", tuple(prompt), params, 1000 + i, depth=depth)
        for i, prompt in enumerate(prompts)
    ]
    done = service.submit(job, requests).wait(240)
    answers.append([[list(c.token_ids), c.accepted] for c in done])
heads = service._engine._runner._decoder._decoder._caches[0][0].shape[2]
host.close()
leader.close()
print(json.dumps([answers, heads, host.memory.weights, host.memory.kv_cache]))
"""


Answers = list[list[tuple[list[int], int]]]


def two_ranks(folder: Path) -> tuple[Answers, int, int, int]:
    """Tokens and accepted drafts of every prompt at depth 0 and 3; KV heads of rank 0.

    And the bytes that its budget says for weights and caches, of verifier and proposer together.
    """
    port = free_port()

    def be(rank: int) -> subprocess.CompletedProcess[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = ("-c", RANK, json.dumps([str(folder), PROMPTS]))
        return forks.run(*code, environment=place, cwd=folder, timeout=400)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(be, range(2)))
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
    answers, heads, weights, kv_cache = json.loads(ranks[0].stdout.splitlines()[-1])
    return answers, heads, weights, kv_cache


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_two_ranks_write_what_one_writes(tmp_path: Path, model_type: str) -> None:
    folder = tiny_model(model_type, tmp_path)
    model = load_model(inspect_model(str(folder)), "float32", "fast", native=False)
    alone = complete(Engine(ModelRunner(model, 4 << 20)), PROMPTS, PARAMS, depth=0)
    (plain, drafted), heads, weights, kv_cache = two_ranks(folder)
    assert heads == model.num_kv_heads // 2 == 1
    for got in (plain, drafted):
        assert [tuple(tokens) for tokens, _ in got] == [c.token_ids for c in alone]
    assert sum(accepted for _, accepted in drafted) > 0
    whole = TorchDecoder(model, 2).memory(1, 1, 1)[0]
    assert whole * 1.5 < weights < whole * 2, "the proposer's, and more than half of the verifier's"
    assert kv_cache <= 2 * (4 << 20)


def refusal(folder: Path, **how: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(inspect_model(str(folder)), "float32", **how)  # type: ignore[arg-type] # by name
    return str(caught.value)


def test_what_cannot_be_shared_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    llama, gpt2 = (tiny_model(name, tmp_path / name) for name in ("llama", "gpt2"))
    assert "cannot run over several GPUs: that is for gemma2, " in refusal(
        gpt2, exactness="fast", tensor_parallel=2
    )
    assert "has 2 heads of keys and values, which 3 GPUs cannot share evenly" in refusal(
        llama, exactness="fast", tensor_parallel=3
    )
    for how in ({"exactness": "bitwise"}, {"exactness": "fast", "weights": "int8"}):
        assert "only with `exactness: fast` and its weights as they are" in refusal(
            llama, tensor_parallel=2, **how
        )


def test_a_job_that_cannot_be_shared_does_not_end_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(parallel, "_broadcast", said.append)
    folder = str(tiny_model("llama", tmp_path))
    with pytest.raises(ModelError):
        parallel.Leader(2).load("name", folder, "cpu", "float32", "bitwise", "as-is")
    assert said == []


def test_a_process_started_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError) as caught:
        join_ranks(2, "cpu")
    assert str(caught.value) == (
        "SPECBATCH_TENSOR_PARALLEL=2 needs 2 processes: "
        "`torchrun --nproc-per-node 2 --no-python specbatch worker ...`"
    )
    assert not torch.distributed.is_initialized()


def test_without_accelerate_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.pipeline.engines.exact.model.loader.find_spec", lambda _: None)
    folder = inspect_model(str(tiny_model("llama", tmp_path)))
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[parallel\]'"):
        load_model(folder, "float32", "fast", tensor_parallel=2)


class Raising:
    """A decoder, as far as a pass asks for one."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def forward(self, _batch: object) -> None:
        raise self.error


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the other ranks hear, there being none; and `"left"` when they are parted from."""
    heard: list[object] = []
    monkeypatch.setattr(parallel, "_broadcast", heard.append)
    monkeypatch.setattr(parallel, "_moved", lambda batch, _device: batch)
    monkeypatch.setattr(parallel, "leave_ranks", lambda: heard.append("left"))
    return heard


@pytest.mark.parametrize(
    ("error", "blameless"),
    [
        (MemoryError("none left"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
    ],
    ids=["memory", "kernel", "device"],
)
def test_a_pass_that_raises_on_one_rank_is_the_last_that_the_others_hear_of(
    said: list[object], error: Exception, blameless: bool
) -> None:
    leader = Leader(2)
    decoder = leader.decoder("model", Raising(error), 4)  # type: ignore[arg-type]  # all that is asked of it
    with pytest.raises(DeviceLostError, match="out of step: ") as caught:
        decoder.forward(None)  # type: ignore[arg-type]  # nobody looks at it
    assert str(error) in str(caught.value)
    assert caught.value.blameless is blameless
    assert leader.lost is caught.value
    heard = [type(message) for message in said]
    assert heard == [parallel.MakeCache, parallel.Feed]
    with pytest.raises(DeviceLostError) as later:
        decoder.forward(None)  # type: ignore[arg-type]  # nobody looks at it
    assert later.value.blameless, "what comes later has not caused it"
    leader.close()
    assert [type(message) for message in said] == heard


@pytest.mark.parametrize(
    ("error", "raised"), [(ModelError("bad"), ModelError), (OSError("bad"), DeviceLostError)]
)
def test_a_load_that_raises_leaves_the_ranks_out_of_step(
    tiny_pair: TinyPair,
    said: list[object],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
) -> None:
    """A model that cannot be served fails its groups first, so that they are not tried for ever."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(parallel, "load_model", fail)
    leader = Leader(2)
    load = partial(leader.load, "name", str(tiny_pair.verifier), "cpu", "float32", "fast", "as-is")
    for kind in (raised, DeviceLostError):
        with pytest.raises(kind, match="bad"):
            load()
    leader.close()
    assert [type(message) for message in said] == [parallel.Load]


def test_ranks_that_are_gone_do_not_keep_a_worker_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def say(_message: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(parallel, "_broadcast", say)
    leader = Leader(2)
    with pytest.raises(DeviceLostError, match="Connection closed"):
        leader.decoder("model", Raising(ValueError()), 4)  # type: ignore[arg-type]  # it is not asked
    ended = Leader(2)
    ended.close()
    assert "Connection closed" in str(ended.lost)


def test_nothing_is_said_to_ranks_that_may_be_in_a_step_that_hangs(
    tiny_pair: TinyPair, said: list[object]
) -> None:
    leader = Leader(2)
    verifier = inspect_model(str(tiny_pair.verifier))
    host = EngineHost(verifier, None, 8, 64, kv_cache_bytes=4 << 20, leader=leader)
    hung = StepHungError("hangs")
    host.give_up(hung)
    host.close()
    leader.close()
    assert leader.lost is hung
    assert said == []


def test_ranks_in_step_are_told_of_the_end(said: list[object]) -> None:
    leader = Leader(2)
    leader.close()
    assert said == [parallel.Stop(), "left"]
    assert leader.lost is None
