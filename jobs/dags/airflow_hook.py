"""Connects Airflow's tasks and triggers to specbatch, and detects a user's kill.

A connection's extra holds settings by their names (`{"database_url": ..., "broker_url": ...}`).
Without a connection the settings come from the environment, `SPECBATCH_...`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from airflow.sdk import BaseHook
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.client import JobClient, open_client
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import OLD_NAMES, Settings

# A user (or a limit on the run that a user set) gave the task this state; while its worker or its
# triggerer goes down, and between tries, it has another one.
KILLED: Final = frozenset({"failed", "success", "skipped", "removed"})
ASK_SEC: Final = 3.0  # for the task's state: Airflow kills a process 5 s after asking it to end

_open: dict[str, JobClient] = {}  # by settings, as JSON
_opening = threading.Lock()


class SpecbatchHook(BaseHook):
    """A client of the store that a connection names. A process has one client per store."""

    conn_name_attr = "conn_id"
    default_conn_name = "specbatch_default"
    conn_type = "specbatch"
    hook_name = "specbatch"

    def __init__(self, conn_id: str | None = None) -> None:
        """`conn_id`: None takes settings from the environment."""
        super().__init__()
        self.conn_id = conn_id

    def get_conn(self) -> JobClient:
        """The shared client, which stays open: do not close it.

        Raises `UsageError` for invalid settings and `StoreError` for a store out of reach.
        """
        settings = self.settings()
        key = settings.model_dump_json()
        with _opening:
            if key not in _open:
                _open[key] = open_client(settings)
            return _open[key]

    def settings(self) -> Settings:
        """The environment's settings, overridden by the connection's."""
        return load_settings(**self._of_connection())

    def _of_connection(self) -> dict[str, Any]:
        if self.conn_id is None:
            return {}
        given: dict[str, Any] = self.get_connection(self.conn_id).extra_dejson
        unknown = sorted(set(given) - set(Settings.model_fields) - OLD_NAMES)
        if unknown:
            raise UsageError(
                f"connection {self.conn_id}: no setting is called {', '.join(unknown)}; its extra "
                "holds settings by their names, such as database_url and broker_url"
            )
        return given


def was_killed(dag_id: str, run_id: str, task_id: str, map_index: int) -> bool:
    """Whether a user has ended the task instance.

    Airflow ends a process in the same way when a worker shuts down, so only the task's state shows
    the difference. If the state cannot be read the answer is no.
    """
    index = map_index if map_index >= 0 else None
    found = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=index
    )
    name = task_id if index is None else f"{task_id}_{index}"
    return str(found.get(run_id, {}).get(name)) in KILLED


def was_killed_in_time(dag_id: str, run_id: str, task_id: str, map_index: int) -> bool:
    """The same for a signal handler, which may have interrupted a request to Airflow."""
    asking = ThreadPoolExecutor(max_workers=1)
    try:
        return asking.submit(was_killed, dag_id, run_id, task_id, map_index).result(ASK_SEC)
    except Exception:  # without an answer the job continues, and a retry finds it
        return False
    finally:
        asking.shutdown(wait=False)
