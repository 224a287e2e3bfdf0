"""What `specbatch train` does: a data set from the store, then a training."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.models.model_folder import inspect_model, vocabulary_digest
from specbatch.pipeline.learning import speculators
from specbatch.pipeline.learning.checkpoints import LOCK, about_of, locked
from specbatch.pipeline.learning.datasets import DataSet, DataSets, Wanted
from specbatch.pipeline.learning.training import Training, Watcher
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects
from specbatch.schemas.errors import OutputError, UsageError
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.settings import Settings
from specbatch.schemas.training import DataOrder, Parameters


def export(
    settings: Settings, store: Store, proposer: str, out: Path, order: DataOrder, watcher: Watcher
) -> dict[str, Any]:
    """Write the data set for vLLM's `speculators` instead of training, and return what it is.

    The folder must be new or empty. Raises `SpecbatchError`.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"--out {out} is a file: name a folder that is new or empty")
    if out.exists() and any(not file.name.startswith(".") for file in out.iterdir()):
        raise OutputError(f"--out {out} is not empty: name a folder that is new or empty")
    parent = inspect_model(proposer)
    return speculators.write(_data(settings, store, parent, out, order, watcher), out)


def train(
    settings: Settings,
    store: Store,
    proposer: str,
    out: Path,
    order: DataOrder,
    parameters: Parameters,
    watcher: Watcher,
) -> dict[str, Any]:
    """Train, or continue with it, and return the record. Raises `SpecbatchError`.

    Without an end the window ends now; that of a training that is resumed stays.
    """
    DeviceOptions(parameters.device).check()
    parent = inspect_model(proposer)
    with locked(out / LOCK, "another folder"):
        if order.until is None:
            known = about_of(out)
            order = replace(order, until=time.time() if known is None else known["until"])
        data = _data(settings, store, parent, out, order, watcher)
        return Training(parent, data, order, parameters, out, watcher).run()


def _data(
    settings: Settings,
    store: Store,
    parent: ModelFolder,
    out: Path,
    order: DataOrder,
    watcher: Watcher,
) -> DataSet:
    """The data set, after its verifier and what is left out were said."""
    mode = Privacy.of_settings(settings).mode_of(order.tenant)
    if not mode.is_full:
        raise UsageError(
            f"texts of tenant {order.tenant!r} are kept {mode}: nothing is learned from them"
        )
    wanted = Wanted(vocabulary_digest(parent), parent.vocab_size, parent.context_tokens)
    sets = DataSets(store, Objects.of_settings(settings, ASKED_RETRY_SEC), settings.retention_days)

    def on_read(done: int, total: int) -> None:
        watcher.on_read(done, total)
        if watcher.is_stopped():
            raise KeyboardInterrupt

    data = sets.make(order, wanted, str(out), on_read)
    verifier = "not known" if data.verifier is None else shown(data.verifier)
    watcher.say(f"outputs of verifier {verifier}, in {len(data.jobs):,} jobs")
    for text in data.skipped:
        watcher.say(f"left out: {text}")
    for reason, n in data.left_out.most_common():
        if n:
            watcher.say(f"left out: {n:,} completions that {reason}")
    return data


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Ctrl-C and SIGTERM set the event, so that a step ends before a checkpoint is written."""
    stopped = Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
