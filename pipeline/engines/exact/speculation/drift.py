"""How far draft models are from the verifier, measured at a few places while they work.

In one step of many, one sequence is drawn by the step's number. A draft model that is about to read
on there anyway says its law of the next token; so does the verifier's pass, in the row that decides
it. The drift is the Kullback-Leibler divergence of the two as the models say them, before
temperature and penalties. Nothing is kept of what the draft model read, so no draft changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeGuard

from torch import Tensor

from specbatch.pipeline.engines.exact.proposers.proposer import Proposer
from specbatch.pipeline.engines.exact.state.draft_plan import Draft
from specbatch.pipeline.engines.exact.state.recovery import Fault, fault_of, with_type
from specbatch.pipeline.engines.exact.state.sequence import Sequence

log = logging.getLogger(__name__)

EVERY_STEPS = 251  # a prime: no rhythm of others falls on its steps alone
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it are spread evenly


class Telling(Protocol):
    """A proposer with a model that can say its law of a sequence's next token."""

    name: str

    def next_token_logprobs(self, sequence: Sequence) -> Tensor | None:
        """float32 [vocab_size], log-probabilities; None where it would have to read too much."""
        ...


def tells(proposer: Proposer | Telling) -> TypeGuard[Telling]:
    return hasattr(proposer, "next_token_logprobs")


class DriftWatch:
    """Takes a look every `every` steps; 0: never."""

    def __init__(
        self, proposers: Seq[Proposer], tell: Callable[[str, float], None], every: int
    ) -> None:
        """`tell` hears a proposer's name and the divergence in nats."""
        self._models: list[Telling] = [p for p in proposers if tells(p)] if every else []
        self._tell = tell
        self._every = every
        self._steps = 0
        self._looks = 0
        self._law: tuple[Telling, Sequence, Tensor] | None = None
        self._found: tuple[str, Tensor] | None = None

    def ask(self, deciding: Seq[Sequence]) -> bool:
        """Before anything is drafted: have a model say what it expects somewhere, if it is time."""
        self._law = self._found = None
        if not (self._models and deciding):
            return False
        self._steps += 1
        if self._steps % self._every:
            return False
        self._looks += 1
        model = self._models[self._looks % len(self._models)]
        sequence = deciding[(self._looks * _GOLDEN % 2**64) * len(deciding) >> 64]
        try:
            law = model.next_token_logprobs(sequence)
        except Exception as error:
            if fault_of(error) in (Fault.DEVICE, Fault.KERNEL):
                raise
            log.warning("drift is not measured any more: %s", with_type(error), exc_info=error)
            self._models = []
            return True
        if law is not None:
            self._law = model, sequence, law
        return True

    def compare(self, deciding: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> None:
        """The verifier's rows are there, and nobody has changed them yet."""
        if self._law is None:
            return
        model, sequence, law = self._law
        row = 0
        for other, draft in zip(deciding, drafts, strict=True):
            if other is sequence:
                break
            row += 1 + len(draft)
        else:
            return  # this part of the step goes without it
        self._law = None
        if law.shape[0] == logits.shape[1]:
            self._found = model.name, divergence(logits[row].log_softmax(dim=0), law)

    def tell(self) -> None:
        """The step is over, so nobody waits for the device any more."""
        if self._found is not None:
            name, nats = self._found[0], float(self._found[1])
            self._found = None
            if math.isfinite(nats):
                self._tell(name, max(0.0, nats))


def divergence(
    law: Tensor,  # [vocab_size], log-probabilities
    other: Tensor,  # [vocab_size]
) -> Tensor:
    """KL(law ‖ other) in nats: how much longer it takes to tell `law`'s tokens by `other`."""
    return (law.exp() * (law - other)).nansum()
