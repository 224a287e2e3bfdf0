"""The whole path in the test's own thread: the stages, the stand-in engine, a queue of messages.

The engine has its thread, as always; what else happens, happens in the order of the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.records import DueWork, JobRow, Stage
from specbatch.schemas.spec import JobSpec, load_spec
from support.stage_context import stage_context

LEASE_SEC = 600.0


@dataclass
class OneThread:
    """A worker of all kinds."""

    store: Store
    context: StageContext
    lease_keeper: LeaseKeeper
    client: Client
    model: str  # the name of the verifier, and of the proposer
    messages: deque[DueWork] = field(default_factory=deque)

    def submit(self, uri: str | Path, output: str | Path, **values: Any) -> JobRow:
        return self.client.submit(self.spec(uri, output, **values))[0]

    def spec(self, uri: str | Path, output: str | Path, **values: Any) -> JobSpec:
        """Without drafts, groups of 4 rows and up to 8 tokens, unless they say otherwise."""
        known: Mapping[str, Any] = {
            "input": {"uri": str(uri)},
            "output": {"uri": str(output)},
            "verifier": self.model,
            "group_size": 4,
            "sampling": {"max_tokens": 8},
            "speculation": {"depth": "off"},
        }
        return load_spec({**known, **values})

    def run(self, most: int | None = None) -> int:
        """Answer messages until none is left, or so many; how many were answered."""
        count = 0
        while self.messages and (most is None or count < most):
            message = self.messages.popleft()
            self.do(message.stage, message.job_id, message.group_index)
            count += 1
        return count

    def do(self, stage: Stage, job_id: str, index: int | None = None) -> None:
        """Answer one message, whether it was sent or not."""
        run_stage(self.context, stage, job_id, index)


@contextmanager
def one_thread(
    store: Store,
    folder: Path,
    workspace: str | None = None,
    max_sequences: int = 64,
    **more: Any,
) -> Iterator[OneThread]:
    """Such a worker; `more` are further fields of its `StageContext`."""
    model = str(stand_in_model.write_model(folder / "model"))
    messages: deque[DueWork] = deque()
    host = StandInHost(inspect_model(model), max_sequences=max_sequences)
    lease_keeper = LeaseKeeper(store, LEASE_SEC)
    values: dict[str, Any] = {"verifying": host, **more}
    context = stage_context(store, lease_keeper, messages.append, LEASE_SEC, **values)
    client = Client(
        store, messages.append, workspace or str(folder / "work"), lease_keeper.check_cancelled
    )
    try:
        yield OneThread(store, context, lease_keeper, client, model, messages)
    finally:
        host.close()
        lease_keeper.close()
