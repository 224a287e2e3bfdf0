"""The trigger of a deferred task, which polls the job without using a worker slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from specbatch.jobs.dags.airflow_hook import SpecbatchHook, was_killed
from specbatch.jobs.dags.attaching import Place, Watch


class SpecbatchTrigger(BaseTrigger):
    """Fires when the job has ended. Every poll of the store runs in a thread of its own.

    A restarted triggerer starts another trigger in its place. Only `on_kill` cancels the job;
    Airflow calls it when a user acts on the deferred task.
    """

    def __init__(
        self,
        job_id: str,
        place: list[str],
        map_index: int,
        conn_id: str | None = None,
        poll_sec: float = 15.0,
    ) -> None:
        """`place`: dag, run and task. Only names, because secrets stay in settings."""
        super().__init__()
        self.job_id = job_id
        self.place = list(place)
        self.map_index = map_index
        self.conn_id = conn_id
        self.poll_sec = poll_sec

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "job_id": self.job_id,
            "place": self.place,
            "map_index": self.map_index,
            "conn_id": self.conn_id,
            "poll_sec": self.poll_sec,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        hook, watch = SpecbatchHook(self.conn_id), Watch(self.job_id)
        while True:
            standing = await asyncio.to_thread(watch.poll, hook.get_conn)
            if standing is not None and standing.is_final:
                yield TriggerEvent({"job_id": self.job_id, "state": str(standing.state)})
                return
            await asyncio.sleep(self.poll_sec)

    async def on_kill(self) -> None:
        """Cancel the job, unless the task will run again, which then finds this job."""
        if await asyncio.to_thread(self._cancel):
            self.log.info("job %s cancelled: its task was ended by a user", self.job_id)

    def _cancel(self) -> bool:
        dag, run, task = self.place
        if not was_killed(dag, run, task, self.map_index):
            return False
        reason = Place("airflow", dag, run, task, str(self.map_index)).killed
        SpecbatchHook(self.conn_id).get_conn().cancel(self.job_id, reason)
        return True
