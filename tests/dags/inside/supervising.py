"""A try of a task, as an executor's worker runs it: a process that supervises the task's own.

Only the server that both speak to is in the process itself, and not behind HTTP.
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Each is forked from a process that has imported Airflow and has no threads.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["supervising", "airflow.sdk.execution_time.supervisor"])


def start(ti: Any, log: Path) -> Any:
    """The process, which ends with the try."""
    names = ("task_id", "dag_id", "run_id", "try_number", "map_index")
    values = {name: getattr(ti, name) for name in names}
    ids = {"id": str(ti.id), "dag_version_id": str(ti.dag_version_id)}
    process = CONTEXT.Process(target=_supervise, args=(values | ids, log))
    process.start()
    return process


def _supervise(values: dict[str, Any], log: Path) -> None:
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from airflow.executors.workloads import BundleInfo
    from airflow.sdk.api.datamodels._generated import TaskInstance
    from airflow.sdk.execution_time.supervisor import InProcessTestSupervisor, supervise_task

    code = supervise_task(
        ti=TaskInstance(**values),
        bundle_info=BundleInfo(name="dags-folder"),
        dag_rel_path="jobs_in_airflow.py",
        token="",
        client=InProcessTestSupervisor._api_client(),
        subprocess_logs_to_stdout=True,
    )
    os._exit(abs(code))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in text.split()]
