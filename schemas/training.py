"""What a training of a draft model is asked for, and what it tells of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specbatch.schemas.errors import UsageError

RECORD = "training.json"  # in the trained model's folder, written last
DEPTH = 4  # of the drafts that estimates of acceptance are made for
MOST_TOKENS = 20_000_000  # of completions, that a data set holds
LEAST_EPOCHS, MOST_EPOCHS = 0.01, 10_000.0


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Which outputs a model learns from: those of one tenant's jobs that ended in a window."""

    tenant: str = "default"
    jobs: tuple[str, ...] = ()  # names or ids; none: all of the tenant's
    since: float | None = None  # seconds since the epoch
    until: float | None = None
    held_out: float = 0.2  # share of the prompts that nothing is learned from
    most_tokens: int = MOST_TOKENS
    verifier: str | None = None  # fingerprint of what wrote them; None: that of the newest job


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a model is trained. Each value that is None follows from the model or the data.

    Raises `UsageError` for numbers that end no training.
    """

    epochs: float = 4.0
    steps: int | None = None  # in place of epochs
    learning_rate: float | None = None
    batch_tokens: int = 4096  # of one step, padding included
    distill: float = 0.5  # share of the recorded probabilities in the target, the rest is the token
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not LEAST_EPOCHS <= self.epochs <= MOST_EPOCHS:
            raise UsageError(
                f"--epochs {self.epochs:g} must be from {LEAST_EPOCHS:g} to {MOST_EPOCHS:,.0f}"
            )
        if self.learning_rate is not None and not math.isfinite(self.learning_rate):
            raise UsageError(f"--learning-rate {self.learning_rate:g} must be a finite number")
