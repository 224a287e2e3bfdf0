"""A step with drafts leaves torch's threads asleep: they would spin on the cores of the pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.models import tiny_llama

STEPS = """
import os, sys, threading
from pathlib import Path
import torch
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.contract import Request
from specbatch.schemas.records import SamplingParams

torch.set_num_threads(2)
torch.ones(1 << 20).add_(1.0)  # torch's threads exist from now on
own = threading.get_native_id()
theirs = [task for task in os.listdir("/proc/self/task") if int(task) != own]
assert theirs, "torch has no thread to be woken"

def told(name):
    status = [Path(f"/proc/self/task/{task}/status").read_text() for task in theirs]
    lines = [line for one in status for line in one.splitlines()]
    return [line.split()[1] for line in lines if line.startswith(name)]

def slept():  # how often they fell asleep, once all of them are asleep
    while set(told("State:")) != {"S"}:
        os.sched_yield()
    return sum(map(int, told("voluntary_ctxt")))

model = load_model(inspect_model(sys.argv[1]), "float32")
engine = Engine(ModelRunner(model, kv_cache_bytes=8 << 20), (NgramProposer(),), 4, 64)
for i in range(4):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(Request(str(i), (5, 6, 7) * 6, params, i, depth=4))
while not engine.stats.proposed:
    engine.step()
before = slept()
while not engine.idle:
    engine.step()
print(engine.stats.proposed, slept() - before)
"""


@pytest.mark.pipeline  # runs a model
def test_torchs_threads_are_not_woken(tmp_path: Path) -> None:
    model = tiny_llama(
        tmp_path / "model", vocab_size=300, hidden=128, layers=2, heads=4, kv_heads=2
    )
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(model)],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    proposed, woken = map(int, done.stdout.split())
    assert proposed > 8
    assert woken == 0
