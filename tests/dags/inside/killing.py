"""An operator that is asked to end at a moment of the test's choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import GROUP, Site

MOMENTS = ("submitting", "storing_id", "reviving")  # the job, its id, the resumption


def killed_while(site: Site, moment: str, by_a_user: bool) -> str:
    """The id of the task's job, once the task has ended."""
    from airflow.sdk.exceptions import AirflowException, TaskDeferred

    from specbatch.jobs.dags import airflow

    spec = site.spec(site.prompts(4 * GROUP))
    operator = airflow.SpecbatchOperator(
        task_id=moment, spec=spec, poll_sec=0.1, deferrable=False, outlets=[]
    )

    def kill_at_the_end_of(call: Callable[..., Any], when: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            done = call(*args, **kwargs)
            if moment == when:
                operator.on_kill()
            return done

        return called

    ti = SimpleNamespace(dag_id="dag", run_id=f"{by_a_user}", task_id=moment, map_index=-1)
    ti.xcom_push = kill_at_the_end_of(lambda **_: None, "storing_id")
    store = SimpleNamespace(get=lambda _: None, set=lambda *_: None)
    context: Any = {"ti": ti, "dag": None, "task_state_store": store}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(airflow, "was_killed_in_time", lambda *_: by_a_user)
        patch.setattr(airflow, "attach", kill_at_the_end_of(airflow.attach, "submitting"))
        patch.setattr(airflow, "revive", kill_at_the_end_of(airflow.revive, "reviving"))
        with contextlib.suppress(AirflowException, TaskDeferred):
            if moment == "reviving":
                job = site.client.submit(spec).job_id
                site.client.cancel(job, airflow.place_of(context).killed)
                site.end(job)
                operator.execute_complete(context, {"job_id": job})
            else:
                airflow.SpecbatchOperator.execute.__wrapped__(operator, context)
    (job,) = site.jobs(spec["output"]["uri"])
    return job
