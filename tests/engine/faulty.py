"""Stand-ins that raise what real parts raise: after their work is done, so that traces stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.decoding import Bench
from torch import Tensor

from specbatch.kernels.decoder.contract import DecoderBatch
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence


class FaultyDecoder:
    """A decoder that does its pass, keys and values and all, and then raises `trouble(batch)`."""

    def __init__(self, decoder: Any, trouble: Callable[[DecoderBatch], Exception | None]) -> None:
        self.passes = 0
        self._decoder, self._trouble = decoder, trouble

    def forward(self, batch: DecoderBatch) -> Tensor:
        self.passes += 1
        logits: Tensor = self._decoder.forward(batch)
        if error := self._trouble(batch):
            raise error
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def spoil(
    one: Bench, trouble: Callable[[DecoderBatch], Exception | None], model: int = 0
) -> FaultyDecoder:
    """Put a faulty decoder in place of the verifier's (0) or the draft model's (1)."""
    runner = one.runners[model]
    faulty = FaultyDecoder(runner._decoder, trouble)
    runner._decoder = faulty
    return faulty


def real_tokens(batch: DecoderBatch) -> int:
    """Tokens of the batch without its padding."""
    return batch.ragged.query_starts[-1]


class FaultyProposer(Proposer):
    """A proposer whose `method` raises while `broken`, after it has done its work."""

    def __init__(self, proposer: Proposer, method: str, error: Exception) -> None:
        self.name = proposer.name
        self.pass_time = proposer.pass_time
        self.broken = True
        self.calls = 0
        self._proposer, self._method, self._error = proposer, method, error

    def available(self, sequence: Sequence) -> int:
        with self._raising("available"):
            return self._proposer.available(sequence)

    def confidence_bucket(self, sequence: Sequence) -> int:
        with self._raising("confidence_bucket"):
            return self._proposer.confidence_bucket(sequence)

    def propose(self, sequences: Any, depths: Any) -> list[list[int]]:
        with self._raising("propose"):
            return self._proposer.propose(sequences, depths)

    def on_verified(self, sequence: Sequence) -> None:
        with self._raising("on_verified"):
            self._proposer.on_verified(sequence)

    def forget(self, sequence: Sequence) -> None:
        with self._raising("forget"):
            self._proposer.forget(sequence)

    @contextmanager
    def _raising(self, method: str) -> Iterator[None]:
        try:
            yield
        finally:
            if method == self._method and self.broken:
                self.calls += 1
                raise self._error
