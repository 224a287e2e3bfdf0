"""What an engine has learned of its machine and of its proposers, to be kept for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from specbatch.pipeline.policy.acceptance import Acceptance, Spread, new_level
from specbatch.pipeline.policy.step_cost import LinearCost, StepTime


def _draft_cost() -> LinearCost:
    # Hopeful at first: a proposer that is never tried is never measured.
    return LinearCost([1e-4, 5e-5, 1e-6])


@dataclass(slots=True)
class Knowledge:
    """Of one verifier, draft model and dtype on one kind of device."""

    step_time: StepTime = field(default_factory=StepTime)
    draft_times: dict[str, LinearCost] = field(default_factory=dict)  # by draft model
    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by label
    spreads: dict[str, Spread] = field(default_factory=dict)  # by proposer

    def draft_time_of(self, proposer: str) -> LinearCost:
        """Seconds of a call of a draft model, by (calls, passes, tokens fed)."""
        return self.draft_times.setdefault(proposer, _draft_cost())

    def acceptance_of(self, proposer: str) -> Acceptance:
        return self.acceptance.setdefault(proposer, new_level(4.0))

    def spread_of(self, proposer: str) -> Spread:
        return self.spreads.setdefault(proposer, Spread())

    def state(self) -> dict[str, Any]:
        """What `restored` needs, as JSON knows it."""
        return {
            "pass_time": self.step_time.state(),
            "draft_times": {name: cost.state() for name, cost in self.draft_times.items()},
            "acceptance": {
                name: {"agreed": a.agreed, "tested": a.tested}
                for name, a in self.acceptance.items()
            },
            "spreads": {name: spread.weight for name, spread in self.spreads.items()},
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Knowledge:
        """From `state`. Raises `KeyError`, `TypeError` or `ValueError` if it is something else."""
        # Older prices ("step_time") had the time between passes in them.
        known = state.get("pass_time")
        knowledge = cls(StepTime.restored(known) if known is not None else StepTime())
        for name, cost in state["draft_times"].items():
            knowledge.draft_time_of(name).restore(cost)
        for name, counts in state["acceptance"].items():
            known = knowledge.acceptance_of(name)
            agreed, tested = float(counts["agreed"]), float(counts["tested"])
            if not 0.0 <= agreed <= tested < float("inf"):
                raise ValueError(f"{agreed} of {tested} drafts of {name} cannot have agreed")
            known.agreed, known.tested = agreed, tested
        for name, weight in state.get("spreads", {}).items():  # older ones have none
            knowledge.spreads[name] = Spread.restored(float(weight))
        return knowledge


class KnowledgeKeeper(Protocol):
    """Where knowledge is kept between processes; neither method raises."""

    def load(self, about: str) -> Knowledge | None: ...

    def keep(self, about: str, knowledge: Knowledge) -> None: ...
