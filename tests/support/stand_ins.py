"""A job without a model: one store, one workspace, and workers that tests drive step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from ledger.builders import LEASE_SEC, Clock

from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.jobs.chaos.stand_in_model import write_model
from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, Tracing
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.records import DueWork, JobState, Stage
from specbatch.schemas.spec import load_spec
from support.databases import migrated
from support.stage_context import stage_context

MOST_ROUNDS = 500

Outcome = dict[tuple[int, int], tuple[Any, ...]]  # by (row, sample)


class Site:
    """Where workers come and go. Time stands still but for `clock`."""

    def __init__(self, folder: Path, lineage: bool = False) -> None:
        """`lineage`: its jobs are queued for OpenLineage."""
        self.clock = Clock()
        self.lineage = lineage
        self.folder = folder
        self.model = str(write_model(folder / "model"))
        self.store = open_store(migrated(folder / "store.db"), clock=self.clock, lineage=lineage)
        self.enqueued: list[DueWork] = []
        self.client = Client(self.store, self.enqueued.append, f"{folder}/workspace")
        self._keepers: list[LeaseKeeper] = []
        self._hosts: list[StandInHost] = []

    def submit(self, prompts: Sequence[str], group_size: int = 64, n: int = 1) -> str:
        """A job of these prompts; its id."""
        lines = [json.dumps({"id": f"r{i}", "prompt": p}) for i, p in enumerate(prompts)]
        (self.folder / "in.jsonl").write_text("\n".join(lines))
        spec = {
            "input": {"uri": "in.jsonl"},
            "output": {"uri": "out"},
            "verifier": self.model,
            "sampling": {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": n},
            "group_size": group_size,
        }
        return self.client.submit(load_spec(spec).resolved(self.folder))[0].job_id

    def host(self) -> StandInHost:
        self._hosts.append(StandInHost(inspect_model(self.model)))
        return self._hosts[-1]

    def lease_keeper(self) -> LeaseKeeper:
        """Its heart beats when a test says so, and by itself only in tests that take very long."""
        self._keepers.append(LeaseKeeper(self.store, LEASE_SEC))
        return self._keepers[-1]

    def worker(
        self,
        owner: str,
        host: Engines,
        lease_keeper: LeaseKeeper | None = None,
        tracing: Tracing = UNTRACED,
    ) -> StageContext:
        return stage_context(
            self.store,
            lease_keeper or self.lease_keeper(),
            self.enqueued.append,
            LEASE_SEC,
            owner=owner,
            price_microusd=200_000,
            verifying=host,
            tracing=tracing,
            tells_lineage=self.lineage,
        )

    def work(self, context: StageContext, *kinds: Stage) -> None:
        """Do what is due, again and again, until there is nothing more of these kinds."""
        for _ in range(MOST_ROUNDS):
            due = [work for work in self.store.due() if not kinds or work.stage in kinds]
            if not due:
                return
            for work in due:
                run_stage(context, work.stage, work.job_id, work.group_index)
        raise AssertionError("it comes to no end")

    def outcome(self, job_id: str) -> Outcome:
        """What may not depend on how it came about."""
        return {
            (c.row_index, c.sample_index): (c.token_ids, c.logprobs, c.text, c.finish_reason)
            for c in self.store.completions(job_id)
        }

    def output(self) -> pa.Table:
        return read_output(str(self.folder / "out"))

    def state(self, job_id: str) -> JobState:
        return self.store.get_job(job_id).state

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        for lease_keeper in self._keepers:
            lease_keeper.close()
        self.store.close()
