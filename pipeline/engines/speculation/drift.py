"""How far draft models are from the verifier, measured at a few positions while they work.

In one step of many, one sequence is drawn by the step's number. A draft model that is about to read
on there anyway gives log-probabilities of the next token; so does the verifier's pass, in the row
that decides it. The drift is the Kullback-Leibler divergence of the two, before temperature and
penalties. Nothing is kept of what the draft model read, so no draft changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.recovery import Fault, fault_of, with_type
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Draft

log = logging.getLogger(__name__)

EVERY_STEPS = 251  # a prime: no rhythm of others falls on its steps alone
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it are spread evenly


class DriftWatch:
    """Samples one sequence every `every` steps; 0: never."""

    def __init__(
        self, proposers: Seq[Proposer], on_drift: Callable[[str, float], None], every: int
    ) -> None:
        """`on_drift` hears a proposer's name and the divergence in nats."""
        self._models = [p for p in proposers if p.pass_time is not None] if every else []
        self._on_drift = on_drift
        self._every = every
        self._steps = 0
        self._samples = 0
        self._sample: tuple[Proposer, Sequence, Tensor] | None = None
        self._found: tuple[str, Tensor] | None = None

    def ask(
        self,
        deciding: Seq[Sequence],
        is_off: Callable[[str, Sequence], bool] = lambda *_: False,
    ) -> bool:
        """Before anything is drafted: have a model say what it expects somewhere, if it is time."""
        self._sample = self._found = None
        if not (self._models and deciding):
            return False
        self._steps += 1
        if self._steps % self._every:
            return False
        self._samples += 1
        model = self._models[self._samples % len(self._models)]
        sequence = deciding[(self._samples * _GOLDEN % 2**64) * len(deciding) >> 64]
        if is_off(model.name, sequence):
            return False
        try:
            logprobs = model.next_token_logprobs(sequence)
        except Exception as error:
            if fault_of(error) in (Fault.DEVICE, Fault.KERNEL):
                raise
            log.warning("drift is not measured any more: %s", with_type(error), exc_info=error)
            self._models = []
            return True
        if logprobs is not None:
            self._sample = model, sequence, logprobs
        return True

    def compare(self, deciding: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> None:
        """The verifier's rows are there, and nobody has changed them yet."""
        if self._sample is None:
            return
        model, sequence, logprobs = self._sample
        row = 0
        for other, draft in zip(deciding, drafts, strict=True):
            if other is sequence:
                break
            row += 1 + len(draft)
        else:
            return  # this part of the step goes without it
        self._sample = None
        if logprobs.shape[0] == logits.shape[1]:
            self._found = model.name, divergence(logits[row].log_softmax(dim=0), logprobs)

    def report(self) -> None:
        """The step is over, so nobody waits for the device any more."""
        if self._found is not None:
            name, nats = self._found[0], float(self._found[1])
            self._found = None
            if math.isfinite(nats):
                self._on_drift(name, max(0.0, nats))


def divergence(
    logprobs: Tensor,  # [vocab_size], log-probabilities
    other: Tensor,  # [vocab_size]
) -> Tensor:
    """KL(logprobs ‖ other) in nats."""
    return (logprobs.exp() * (logprobs - other)).nansum()
