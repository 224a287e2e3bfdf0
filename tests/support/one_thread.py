"""The whole path in the test's own thread: the stages, the stand-in engine, and a queue of bells.

The engine has its thread, as always; what else happens, happens in the order of the bells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.stages.stages import Economy, Stages
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.records import Bell, JobRow
from specbatch.schemas.spec import JobSpec, load_spec

LEASE_SEC = 600.0


@dataclass
class OneThread:
    """A worker of all kinds."""

    store: Store
    stages: Stages
    keeper: LeaseKeeper
    client: Client
    model: str  # the name of the verifier, and of the proposer
    bells: deque[Bell] = field(default_factory=deque)

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
        """Answer bells until none is left, or so many; how many were answered."""
        count = 0
        while self.bells and (most is None or count < most):
            bell = self.bells.popleft()
            self.stages.run(bell.stage, bell.job_id, bell.group_index)
            count += 1
        return count


@contextmanager
def one_thread(
    store: Store,
    folder: Path,
    workspace: str | None = None,
    max_sequences: int = 64,
    **stages: Any,
) -> Iterator[OneThread]:
    """Such a worker; `stages` are further arguments of `Stages`."""
    model = str(stand_in_model.write_model(folder / "model"))
    bells: deque[Bell] = deque()
    host = StandInHost(inspect_model(model), max_sequences=max_sequences)
    keeper = LeaseKeeper(store, LEASE_SEC)
    values: dict[str, Any] = {
        "store": store,
        "objects": Objects(),
        "keeper": keeper,
        "ring": bells.append,
        "owner": "me",
        "lease_sec": LEASE_SEC,
        "economy": Economy(1_000_000),
        "codec": lru_cache(stand_in_model.codec),
        "verifying": host,
        "models": lru_cache(inspect_model),
    }
    client = Client(store, bells.append, workspace or str(folder / "work"), keeper.look)
    try:
        yield OneThread(store, Stages(**{**values, **stages}), keeper, client, model, bells)
    finally:
        host.close()
        keeper.close()
