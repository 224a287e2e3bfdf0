"""Some sites alike, for runs that take turns on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

from specbatch.jobs.chaos.harness import Site

SITES = 3  # a run mostly waits: for leases to run out, for the frozen to thaw


@dataclass
class Sites:
    """Whoever takes one has it alone until it is put back."""

    free: SimpleQueue[Site] = field(default_factory=SimpleQueue)
