"""Worker processes in the store: what each does, and whether it can take messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specbatch.schemas.placement import Site
from specbatch.schemas.records import Stage
from specbatch.schemas.routing import KIND_OF_STAGE


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One process, from its start to its end."""

    process_id: str
    owner: str  # as leases name it
    kinds: tuple[str, ...]  # of work
    verifier: str | None = None  # the model that it verifies with
    proposer: str | None = None  # the model that it drafts groups with
    site: Site | None = None  # None: of an earlier version, which does not tell


@dataclass(frozen=True, slots=True)
class ProcessNow:
    """A process that has not ended as far as the store knows, by the store's clock."""

    process: WorkerProcess
    age_sec: float
    silent_sec: float  # since its last heartbeat
    trouble: str | None = None  # why it can take no messages; None: it can

    def does_kind(self, stage: Stage) -> bool:
        return KIND_OF_STAGE[stage] in self.process.kinds

    def does(self, stage: Stage, model: str | None = None) -> bool:
        """Whether it works on units at this stage, and of this model if the stage needs one."""
        if not self.does_kind(stage):
            return False
        if stage is Stage.PROPOSE:
            return self.process.proposer == model
        return stage is not Stage.VERIFY or self.process.verifier == model


def alive_words(processes: Iterable[ProcessNow]) -> str:
    """The kinds of live workers, in words, and which of them cannot take messages."""
    found = {
        ", ".join(one.process.kinds)
        + (f" on {one.process.owner}, which can take no messages" if one.trouble else "")
        for one in processes
    }
    return "; ".join(sorted(found)) or "none"
