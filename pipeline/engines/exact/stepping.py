"""What a service needs of an engine. `Engine` is one; a stand-in without a model is another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from specbatch.pipeline.engines.exact.proposers.block_proposer import Wanted
from specbatch.pipeline.engines.exact.state.sequence import Completion, Request, Sequence
from specbatch.pipeline.engines.exact.state.stats import EngineStats
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.speculation import AcceptanceCount


class SteppingEngine(Protocol):
    """Continuous batching, a step at a time. Only one thread uses it."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def knowledge(self) -> Knowledge:
        """What it has learned of its machine."""
        ...

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        ...

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """What earlier nights of the job found about drafts."""
        ...

    def add(self, request: Request) -> None:
        """Take it into the batch at the next step."""
        ...

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        """Drop requests; their completions so far."""
        ...

    @property
    def begun(self) -> list[Sequence]:
        """All sequences that are not finished; any thread may look at them."""
        ...

    def unstarted(self) -> list[str]:
        """Ids of the requests that no pass has seen yet."""
        ...

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """What may follow the first `position` output tokens of a request."""
        ...

    def step(self) -> list[Completion]:
        """One pass; what it finished."""
        ...

    def wanted(self) -> list[Wanted]:
        """Requests that a hint is wanted for."""
        ...

    def lessons(self, job: str) -> Lessons:
        """What the job taught since it was last asked."""
        ...
