"""What one step of the engine works on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specbatch.pipeline.engine.proposer import Proposer
from specbatch.pipeline.engine.scheduler import Planned
from specbatch.pipeline.engine.sequence import Sequence


@dataclass(slots=True)
class Work:
    """One step's sequences that decide tokens, with their drafts."""

    plan: list[Planned]
    deciding: list[Sequence]
    drafts: list[list[int]]
    makers: list[Proposer | None]
    begun: float  # seconds, by the performance counter
    proposing_sec: float
    emitted: dict[Sequence, int] = field(default_factory=dict)  # tokens decided
    whole: bool = True  # one pass did it all; else its times say nothing of other steps

    def part(self, plan: list[Planned]) -> Work:
        """Some of it, without drafts, which are only hints; their makers still hear of the end."""
        maker_of = dict(zip(self.deciding, self.makers, strict=True))
        deciding = [p.sequence for p in plan if p.decides]
        makers = [maker_of.get(sequence) for sequence in deciding]
        return replace(
            self, plan=plan, deciding=deciding, drafts=[[] for _ in deciding], makers=makers
        )

    def first_tokens(self, budget: int) -> list[Planned]:
        """The plan's first `budget` tokens."""
        cut = []
        for planned in self.plan:
            take = min(planned.take, budget)
            if take:
                cut.append(Planned(planned.sequence, take))
            budget -= take
        return cut

    @property
    def plain(self) -> bool:
        """A pure decoding step at depth 0: a measurement of the baseline."""
        return not any(self.drafts) and self.decoding

    @property
    def decoding(self) -> bool:
        """No prompt takes part."""
        return len(self.deciding) == len(self.plan) and all(p.take == 1 for p in self.plan)
