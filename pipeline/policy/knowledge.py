"""What an engine has learned of its machine and of its proposers, to be kept for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbatch.pipeline.policy.acceptance import Acceptance
from specbatch.pipeline.policy.linear_cost import LinearCost
from specbatch.pipeline.policy.step_time import StepTime

_OVERALL_DECAY = 0.995  # over all sequences: about the last two hundred tests count


def _draft_cost() -> LinearCost:
    # Hopeful at first: a proposer that is never tried is never measured.
    return LinearCost([1e-4, 5e-5, 1e-6])


@dataclass(slots=True)
class Knowledge:
    """Of one verifier, draft model and dtype on one kind of device."""

    step_time: StepTime = field(default_factory=StepTime)
    draft_time: LinearCost = field(default_factory=_draft_cost)  # (calls, passes, tokens fed)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by proposer

    def acceptance_of(self, proposer: str) -> Acceptance:
        if proposer not in self.acceptance:
            self.acceptance[proposer] = Acceptance(decay=_OVERALL_DECAY)
        return self.acceptance[proposer]

    def state(self) -> dict[str, Any]:
        """What `restored` needs, as JSON knows it."""
        return {
            "step_time": self.step_time.state(),
            "draft_time": self.draft_time.state(),
            "acceptance": {
                name: {"agreed": a.agreed, "tested": a.tested}
                for name, a in self.acceptance.items()
            },
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Knowledge:
        """From `state`. Raises `KeyError`, `TypeError` or `ValueError` if it is something else."""
        knowledge = cls(StepTime.restored(state["step_time"]))
        knowledge.draft_time.restore(state["draft_time"])
        for name, counts in state["acceptance"].items():
            known = knowledge.acceptance_of(name)
            known.agreed, known.tested = float(counts["agreed"]), float(counts["tested"])
        return knowledge
