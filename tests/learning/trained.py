"""A small training, and a process that dies in it: `python -m learning.trained PARENT OUT SITE`."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning.datasets import DataSet, Example
from specbatch.pipeline.learning.training import Training, Watcher
from specbatch.schemas.training import DataOrder, Parameters

STEPS = 12
CHECKPOINT_STEPS = 5


def example(seed: int) -> Example:
    """A prompt of letters; the completion goes on through the alphabet, which is easily learned."""
    draw = np.random.default_rng(seed)
    begin, length = int(draw.integers(0, 26)), int(draw.integers(3, 9))
    ids = np.array([97 + (begin + i) % 26 for i in range(length + 16)], dtype=np.int32)
    ids[: length - 1] = draw.integers(97, 123, length - 1)
    digest = hashlib.sha256(ids.tobytes()).digest()
    prompt = hashlib.sha256(ids[:length].tobytes()).digest()
    return Example(digest, prompt, ids, length)


def data(train: int = 96, held_out: int = 24) -> DataSet:
    made = sorted((example(i) for i in range(train + 2 * held_out)), key=lambda one: one.digest)
    parts = (made[:train], made[train : train + held_out], made[train + held_out :])
    return DataSet(*map(tuple, parts), jobs=(), verifier="of-the-verifier")  # type: ignore[arg-type]  # three of them


def training(parent: str, out: Path, **more: Any) -> Training:
    options = {"steps": STEPS, "learning_rate": 3e-3, "batch_tokens": 256}
    parameters = Parameters(**options | more.pop("parameters", {}))
    order = DataOrder(until=1.0)
    made = more.pop("data", None) or data()
    more = {"checkpoint_steps": CHECKPOINT_STEPS, **more}
    return Training(inspect_model(parent), made, order, parameters, out, **more)


def die_at(site: str) -> dict[str, Any]:
    """`step:3`, `fsync:2`, `replace:1`: before the so-manieth one. `none`: not at all."""
    what, _, number = site.partition(":")
    count = [int(number or 0)]

    def dying(*_: Any) -> None:
        count[0] -= 1
        if count[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if what == "step":
        return {"watcher": Watcher(on_step=dying)}
    if what != "none":
        holder: Any = os if what == "fsync" else Path
        real = getattr(holder, what)

        def instead(*args: Any) -> Any:
            dying()
            return real(*args)

        setattr(holder, what, instead)
    return {}


def main() -> None:
    parent, out, site = sys.argv[1:]
    training(parent, Path(out), **die_at(site)).run()
