"""One model over several processes, each with a part of every layer: rank 0 leads, others follow.

transformers shards the weights by its plan for the architecture; each rank has some of the heads
and their KV. Only rank 0 has an engine. Before it does anything with a model it broadcasts that,
and the others do the same: load, make a cache, feed a batch. Batches are small and travel through
gloo; layers exchange data through the device's own backend.

Tested so far with two processes on CPUs with gloo, and on no GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.kernels.paged_attention.contract import RaggedBatch
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import check_shareable, load_model
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.recovery import Fault, fault_of, with_type
from specbatch.schemas.errors import DeviceLostError, ModelError, UsageError
from specbatch.schemas.spec import Weights

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=365)  # a leader may be idle for long; a dead one breaks the connection


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model; `how` are arguments of `load_model`. Replaces what had this name."""

    name: str
    ref: str
    how: dict[str, Any]
    fingerprint: str  # of rank 0's files


@dataclass(frozen=True, slots=True)
class MakeCache:
    """Make a decoder of the model of this name."""

    name: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Run a pass. The batch lies on the host."""

    name: str
    batch: DecoderBatch


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


def join_ranks(size: int, device: str) -> tuple[int, str]:
    """Join the other processes; returns (rank, this rank's device).

    Raises `UsageError` unless `torchrun` started `size` processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != size:
        raise UsageError(
            f"SPECBATCH_TENSOR_PARALLEL={size} needs {size} processes: "
            f"`torchrun --nproc-per-node {size} --no-python specbatch worker ...`"
        )
    if device != "cpu":
        device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        torch.cuda.set_device(torch.device(device))
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=_PATIENCE)
    return dist.get_rank(), device


def leave_ranks() -> None:
    """Disconnect."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Leader:
    """Rank 0's side. Not thread-safe: engines of one process take turns.

    `lost` is set once the ranks may be out of step: the next exchange of one of them would be taken
    for another one, or never be answered. Nothing is broadcast any more then, and the process must
    end at once; whoever started the ranks ends the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lost: DeviceLostError | None = None

    def load(
        self, name: str, ref: str, device: str, dtype: str, exactness: str, weights: Weights
    ) -> LoadedModel:
        """As `load_model`, on all ranks. Refuses what cannot be shared before asking them.

        Raises `DeviceLostError` if the ranks are out of step, or become so. A model that cannot be
        loaded raises `ModelError` first: its groups fail, and the next call ends the worker.
        """
        folder = inspect_model(ref)
        check_shareable(folder, self.size, exactness, weights)
        how = {"dtype": dtype, "exactness": exactness, "tensor_parallel": self.size}
        with self.in_step():
            _broadcast(Load(name, ref, how, folder.fingerprint.digest))
            return load_model(folder, device=device, **how)  # type: ignore[arg-type] # by their names

    def decoder(self, name: str, decoder: TorchDecoder, num_blocks: int) -> ParallelDecoder:
        """The decoder of a loaded model, and the same on the other ranks.

        Raises `DeviceLostError` if they cannot be reached.
        """
        with self.in_step():
            _broadcast(MakeCache(name, num_blocks))
        return ParallelDecoder(name, decoder, self)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Guards what all ranks do together: an exception here leaves the others in the middle.

        Raises `DeviceLostError`; `UsageError` as it is.
        """
        if self.lost is not None:
            raise DeviceLostError(str(self.lost))  # this caller did not cause it
        try:
            yield
        except Exception as error:
            lost = DeviceLostError(
                f"the ranks are out of step: {with_type(error)}",
                blameless=fault_of(error) is Fault.DEVICE,
            )
            self.give_up(lost)
            if isinstance(error, UsageError):
                raise
            raise lost from error

    def give_up(self, error: DeviceLostError) -> None:
        """Broadcast nothing more: the others may be in the middle of something."""
        self.lost = self.lost or error

    def close(self) -> None:
        """Let the others end and disconnect, unless they are out of step. Raises nothing."""
        try:
            with self.in_step():
                _broadcast(Stop())
                leave_ranks()
        except DeviceLostError as error:
            log.warning("the other ranks cannot be told to stop: %s", error)


class ParallelDecoder:
    """A decoder whose passes run on all ranks at once."""

    def __init__(self, name: str, decoder: TorchDecoder, leader: Leader) -> None:
        self._name, self._decoder, self._leader = name, decoder, leader

    def memory(self, tokens: int, rows: int, context: int) -> tuple[int, int, int]:
        """As `TorchDecoder.memory`, of rank 0's share."""
        return self._decoder.memory(tokens, rows, context)

    def forward(self, batch: DecoderBatch) -> Tensor:
        """As `TorchDecoder.forward`.

        Raises `DeviceLostError` if the pass raises here: the others are still in it, and their next
        exchange would be taken for a part of this one.
        """
        with self._leader.in_step():
            _broadcast(Feed(self._name, _moved(batch, torch.device("cpu"))))
            return self._decoder.forward(batch)


def follow(device: str) -> None:
    """The other ranks' side: do what rank 0 broadcasts until it broadcasts a stop, then disconnect.

    gloo's threads may abort a process that ends without disconnecting.
    """
    try:
        _obey(device)
    finally:
        leave_ranks()


def _obey(device: str) -> None:
    models: dict[str, LoadedModel] = {}
    decoders: dict[str, TorchDecoder] = {}
    while True:
        match _receive():
            case Load(name, ref, how, fingerprint):
                decoders.pop(name, None)
                models.pop(name, None)  # first: both would not fit
                models[name] = load_model(_same(ref, fingerprint), device=device, **how)
            case MakeCache(name, num_blocks):
                decoders.pop(name, None)
                decoders[name] = TorchDecoder(models[name], num_blocks)
            case Feed(name, batch):
                with torch.inference_mode():
                    decoders[name].forward(_moved(batch, torch.device(device)))
            case Stop():
                return
            case other:
                raise RuntimeError(f"rank 0 said {other!r}")


def _same(ref: str, fingerprint: str) -> ModelFolder:
    """The folder on this rank. Raises `ModelError` unless it holds what rank 0's does."""
    folder = inspect_model(ref)
    if folder.fingerprint.digest != fingerprint:
        raise ModelError(
            f"model `{ref}` has different files here than on rank 0: copy them and restart all "
            "ranks"
        )
    return folder


def _broadcast(message: object) -> None:
    dist.broadcast_object_list([message], src=0, device=torch.device("cpu"))


def _receive() -> object:
    box: list[object] = [None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _moved(batch: DecoderBatch, device: torch.device) -> DecoderBatch:
    """The batch on another device, without what was prepared for the first."""
    ragged = batch.ragged
    return DecoderBatch(
        ids=batch.ids.to(device),
        positions=batch.positions.to(device),
        ragged=RaggedBatch(
            ragged.query_starts,
            ragged.context_lens,
            ragged.block_tables,
            ragged.slots.to(device),
            ragged.parents,
        ),
        logit_rows=batch.logit_rows.to(device),
    )
