"""The Airflow operator in the real Airflow, with SQLite for its metadata."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import supervising
from conftest import GROUP, WAIT_SEC, Site
from killing import MOMENTS, killed_while
from supervising import children

from specbatch.jobs.dags.attaching import SPEC_CHANGED

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "jobs" / "examples" / "airflow_nightly.py"
_days = iter(range(10_000))


@dataclass
class Ran:
    """What is left of a DAG run."""

    state: str
    states: dict[str, str]  # by task, mapped ones as task[index]
    xcoms: dict[str, Any]  # return values, alike
    events: list[tuple[str, dict[str, Any]]]  # URI and extra of assets
    run_id: str


@dataclass
class Airflow:
    """Airflow's own `dag.test`, which `airflow dags test` calls, and its supervisor of tasks."""

    dags: dict[str, Any]
    logs: Path

    def test(self, dag_id: str, **conf: Any) -> Ran:
        """Run a DAG to its end."""
        day = datetime(2027, 1, 1, tzinfo=UTC) + timedelta(days=next(_days))
        run = self.dags[dag_id].test(logical_date=day, run_after=day, run_conf=conf)
        return self.ran(dag_id, run.run_id)

    def ran(self, dag_id: str, run_id: str) -> Ran:
        from airflow.models.asset import AssetEvent
        from airflow.models.dagrun import DagRun
        from airflow.models.xcom import XComModel
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session() as session:
            run = session.scalar(select(DagRun).filter_by(dag_id=dag_id, run_id=run_id))
            tasks = run.get_task_instances(session=session)
            kept = session.scalars(
                select(XComModel).filter_by(dag_id=dag_id, run_id=run_id, key="return_value")
            )
            values = {named(x.task_id, x.map_index): XComModel.deserialize_value(x) for x in kept}
            events = session.scalars(
                select(AssetEvent).filter_by(source_dag_id=dag_id, source_run_id=run_id)
            )
            return Ran(
                str(run.state),
                {named(t.task_id, t.map_index): str(t.state) for t in tasks},
                values,
                [(e.asset.uri, dict(e.extra)) for e in events],
                run_id,
            )

    def begin(self, dag_id: str, **conf: Any) -> str:
        """A run as the scheduler would make it, with no task started; its id."""
        from airflow.models.dagrun import get_or_create_dagrun
        from airflow.serialization.serialized_objects import DagSerialization
        from airflow.utils.session import create_session
        from airflow.utils.types import DagRunTriggeredByType

        day = datetime(2027, 1, 1, tzinfo=UTC) + timedelta(days=next(_days))
        dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(self.dags[dag_id]))
        with create_session() as session:
            run = get_or_create_dagrun(
                dag=dag,
                run_id=f"manual__{day.isoformat()}",
                logical_date=day,
                data_interval=(day, day),
                run_after=day,
                conf=conf,
                triggered_by=DagRunTriggeredByType.TEST,
                triggering_user_name="test",
                start_date=day,
                session=session,
            )
            return run.run_id

    def task(self, dag_id: str, run_id: str) -> Any:
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session() as session:
            return session.scalar(
                select(TaskInstance).filter_by(dag_id=dag_id, run_id=run_id, task_id="job")
            )

    def task_state(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """What the task's state store keeps."""
        from airflow.models.task_state_store import TaskStateStoreModel
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session() as session:
            found = select(TaskStateStoreModel).filter_by(dag_id=dag_id, run_id=run_id)
            return {row.key: json.loads(row.value) for row in session.scalars(found)}

    def set_conf(self, dag_id: str, run_id: str, **conf: Any) -> None:
        """Change what its specs are made of, as a change of the DAG's file does."""
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session() as session:
            run = session.scalar(select(DagRun).filter_by(dag_id=dag_id, run_id=run_id))
            run.conf = conf

    def set_state(self, dag_id: str, run_id: str, state: str, tries: int = 0) -> None:
        """As the scheduler does, and the UI for "mark as failed"."""
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session() as session:
            found = session.scalar(
                select(TaskInstance).filter_by(dag_id=dag_id, run_id=run_id, task_id="job")
            )
            found.try_number += tries
            found.max_tries = 1
            found.state = state

    def start(self, dag_id: str, run_id: str) -> Any:
        """The next try of its task, supervised in a process of its own as an executor's worker
        does; the task itself is a child of that."""
        self.set_state(dag_id, run_id, "queued", tries=1)
        ti = self.task(dag_id, run_id)
        return supervising.start(ti, self.log(dag_id, run_id))

    def triggerer(self) -> subprocess.Popen[bytes]:
        """Airflow's own, as a service runs it."""
        with (self.logs / "triggerer.log").open("wb") as log:
            command = [sys.executable, "-m", "airflow", "triggerer", "--skip-serve-logs"]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def triggers_begun(self, dag_id: str, run_id: str) -> int:
        """How often a run's trigger was begun: each time has a file of its own. Tasks that other
        tests have left deferred get their triggers, too.
        """
        files = (self.logs / "logs").rglob("*.trigger.*.log")
        return sum(f"dag_id={dag_id}" in path.parts and run_id in str(path) for path in files)

    def log(self, dag_id: str, run_id: str) -> Path:
        """What the last try and its supervisor said."""
        return self.logs / f"{dag_id}-{run_id}-{self.task(dag_id, run_id).try_number}.log"


def named(task_id: str, map_index: int) -> str:
    return task_id if map_index < 0 else f"{task_id}[{map_index}]"


@pytest.fixture(scope="session")
def airflow(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """An Airflow of the run's own, with the DAGs of the tests and the example."""
    home = tmp_path_factory.mktemp("airflow")
    dags = home / "dags"
    dags.mkdir()
    for file in [*(HERE / "airflow_dags").iterdir(), EXAMPLE]:
        if file.is_file():
            (dags / file.name).write_text(file.read_text())
    os.environ.update(
        {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "1",
            "AIRFLOW_CONN_SITE": json.dumps(
                {"conn_type": "specbatch", "extra": {"database_url": site.env[DATABASE]}}
            ),
        }
    )
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db
    from airflow.utils.db import initdb

    initdb()
    DagBundlesManager().sync_bundles_to_db()
    bag = BundleDagBag(dag_folder=dags, bundle_path=dags, bundle_name="dags-folder")
    assert bag.import_errors == {}
    sync_bag_to_db(bag, "dags-folder", None)
    return Airflow(bag.dags, home)


DATABASE = "SPECBATCH_DATABASE_URL"


def conf_of(site: Site, prompts: str) -> dict[str, str]:
    spec = site.spec(prompts)
    return {
        "input": prompts,
        "output": spec["output"]["uri"],
        "verifier": spec["verifier"],
    }


def test_a_job_is_done_and_its_figures_are_in_xcom_and_in_the_assets_event(
    airflow: Airflow, site: Site
) -> None:
    conf = conf_of(site, site.prompts(6))
    ran = airflow.test("waits_in_the_task", **conf)
    assert ran.states == {"job": "success", "after": "success"}
    (job,) = site.jobs(conf["output"])
    told = ran.xcoms["job"]
    assert told == site.client.outcome(job).as_json()
    assert (told["state"], told["rows"], told["completion_tokens"]) == ("done", 6, 6 * 12)
    assert told["cost_usd"] > 0
    assert told["output_uri"] == conf["output"]
    assert Path(told["manifest_uri"]).is_file()
    assert Path(told["data_uri"]).is_dir()
    assert ran.xcoms["after"] == "done"
    ((uri, extra),) = ran.events
    assert uri == Path(conf["output"]).as_uri()
    assert extra == told


@pytest.mark.parametrize(
    ("word", "job_state", "after"),
    [
        ("fail", "failed", "upstream_failed"),
        ("succeed", "success", "success"),
        ("skip", "skipped", "skipped"),
    ],
)
def test_partial_is_what_the_user_says(
    airflow: Airflow, site: Site, word: str, job_state: str, after: str
) -> None:
    conf = conf_of(site, site.prompts(3, refused=2))
    ran = airflow.test(f"partial_{word}", **conf)
    assert ran.states == {"job": job_state, "after": after}
    told = ran.xcoms["job"]
    assert (told["state"], told["rows"], told["rows_failed"]) == ("partial", 5, 2)
    assert sum(told["quarantined"].values()) == 2
    assert len(ran.events) == (word == "succeed")
    assert len(site.jobs(conf["output"])) == 1
    # Rows that were refused are refused again: there is nothing that a retry could do.
    assert airflow.task(f"partial_{word}", ran.run_id).try_number == 1


def test_a_spec_file_is_a_template_and_a_connection_says_where_the_store_is(
    airflow: Airflow, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE, "sqlite:////nowhere/specbatch.db")
    conf = conf_of(site, site.prompts(2))
    ran = airflow.test("from_a_file", connection="site", **conf)
    assert ran.states == {"job": "success"}
    assert ran.xcoms["job"]["name"] == "from-a-file"
    ((uri, _),) = ran.events
    assert uri == Path(conf["output"]).as_uri()


def test_the_example_has_one_job_for_each_mapped_task(airflow: Airflow, site: Site) -> None:
    folder = Path(site.prompts(4))
    parts = [folder.stem, Path(site.prompts(3)).stem]
    output = str(site.folder / "nightly")
    ran = airflow.test(
        "specbatch_nightly",
        input=str(site.folder),
        output=output,
        verifier=site.model,
        parts=parts,
    )
    assert ran.state == "success"
    outcomes = [ran.xcoms["summarise[0]"], ran.xcoms["summarise[1]"]]
    assert [o["rows"] for o in outcomes] == [4, 3]
    assert len({o["job_id"] for o in outcomes}) == 2
    assert ran.xcoms["report"] == sum(o["cost_usd"] for o in outcomes)
    assert sorted(uri for uri, _ in ran.events) == sorted(
        Path(o["output_uri"]).as_uri() for o in outcomes
    )


def test_a_task_that_is_killed_and_retried_goes_on_with_its_job_and_pays_once(
    airflow: Airflow, site: Site
) -> None:
    conf = conf_of(site, site.prompts(4 * GROUP))
    run = airflow.begin("waits_in_the_task", **conf)
    first = airflow.start("waits_in_the_task", run)
    job = site.freeze_in_the_middle(conf["output"])
    try:
        (task,) = children(first.pid)
        os.kill(task, signal.SIGKILL)
        first.join(WAIT_SEC)
        assert first.exitcode == signal.SIGKILL  # then the scheduler queues the next try
    finally:
        site.thaw()
    second = airflow.start("waits_in_the_task", run)
    second.join(WAIT_SEC)
    assert second.exitcode == 0
    ran = airflow.ran("waits_in_the_task", run)
    assert ran.states["job"] == "success"
    assert airflow.task("waits_in_the_task", run).try_number == 2
    assert airflow.task_state("waits_in_the_task", run) == {"job_id": job}
    assert site.jobs(conf["output"]) == [job]
    outcome = site.client.outcome(job)
    assert ran.xcoms["job"] == outcome.as_json()
    assert (outcome.completions, outcome.completion_tokens) == (4 * GROUP, 4 * GROUP * 12)


def test_a_try_with_another_spec_ends_the_job_of_the_try_before(
    airflow: Airflow, site: Site
) -> None:
    conf = conf_of(site, site.prompts(4 * GROUP))
    run = airflow.begin("waits_in_the_task", **conf)
    first = airflow.start("waits_in_the_task", run)
    job = site.freeze_in_the_middle(conf["output"])
    try:
        (task,) = children(first.pid)
        os.kill(task, signal.SIGKILL)
        first.join(WAIT_SEC)
        other = conf | {"output": conf["output"] + "-other"}
        airflow.set_conf("waits_in_the_task", run, **other)
        second = airflow.start("waits_in_the_task", run)
        site.until(lambda: site.client.poll(job).stop_reason, "the job to be cancelled")
    finally:
        site.thaw()
    second.join(WAIT_SEC)
    assert second.exitcode == 0
    assert site.end(job).stop_reason == SPEC_CHANGED
    (new,) = site.jobs(other["output"])
    assert site.end(new).state == "done"
    assert airflow.task_state("waits_in_the_task", run) == {"job_id": new}


def test_a_job_is_cancelled_when_a_user_ends_its_running_task(airflow: Airflow, site: Site) -> None:
    conf = conf_of(site, site.prompts(4 * GROUP))
    run = airflow.begin("waits_in_the_task", **conf)
    process = airflow.start("waits_in_the_task", run)
    job = site.freeze_in_the_middle(conf["output"])
    try:
        airflow.set_state("waits_in_the_task", run, "failed")
        process.join(WAIT_SEC)
        standing = site.client.poll(job)
        assert standing.stop_reason == "cancelled with its task in airflow"
    finally:
        site.thaw()
    assert site.end(job).state == "cancelled"
    # Clearing the task afterwards asks for the remaining rows.
    again = airflow.start("waits_in_the_task", run)
    again.join(WAIT_SEC)
    assert airflow.ran("waits_in_the_task", run).states["job"] == "success"
    assert site.jobs(conf["output"]) == [job]
    assert site.client.outcome(job).completions == 4 * GROUP


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_user_s_kill_that_comes_before_the_job_is_known_cancels_it_all_the_same(
    airflow: Airflow, site: Site, moment: str
) -> None:
    assert airflow.dags
    job = killed_while(site, moment, by_a_user=True)
    assert site.client.poll(job).stop_reason == "cancelled with its task in airflow"
    assert site.end(job).state == "cancelled"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_goes_on_when_a_worker_is_shut_down_before_the_job_is_known(
    airflow: Airflow, site: Site, moment: str
) -> None:
    assert airflow.dags
    assert site.end(killed_while(site, moment, by_a_user=False)).state == "done"


def test_a_job_goes_on_when_the_worker_of_its_task_is_shut_down(
    airflow: Airflow, site: Site
) -> None:
    conf = conf_of(site, site.prompts(4 * GROUP))
    run = airflow.begin("waits_in_the_task", **conf)
    process = airflow.start("waits_in_the_task", run)
    job = site.freeze_in_the_middle(conf["output"])
    try:
        os.kill(process.pid, signal.SIGTERM)
        process.join(WAIT_SEC)
        assert airflow.task("waits_in_the_task", run).state == "up_for_retry"
        assert site.client.poll(job).stop_reason is None
    finally:
        site.thaw()
    assert site.end(job).state == "done"


def test_a_trigger_looks_at_the_store_without_holding_up_the_others(
    airflow: Airflow, site: Site
) -> None:
    """Its look lasts as long as the store's lock does; the loop goes round meanwhile."""
    assert airflow.dags
    job = site.client.submit(site.spec(site.prompts(1))).job_id
    site.end(job)
    looking, may_answer = threading.Event(), threading.Event()

    class Slow:
        def poll(self, job_id: str) -> Any:
            looking.set()
            assert may_answer.wait(WAIT_SEC)
            return site.client.poll(job_id)

    from specbatch.jobs.dags.airflow_hook import SpecbatchHook
    from specbatch.jobs.dags.airflow_trigger import SpecbatchTrigger

    class Hook(SpecbatchHook):
        def get_conn(self) -> Any:
            return Slow()

    async def run() -> dict[str, Any]:
        trigger = SpecbatchTrigger(job, ["dag", "run", "task"], -1)
        fired = asyncio.ensure_future(anext(trigger.run()))
        while not looking.is_set():
            await asyncio.sleep(0.01)
        for _ in range(10):  # the loop is free while the look goes on
            await asyncio.sleep(0)
        assert not fired.done()
        may_answer.set()
        return (await fired).payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbatch.jobs.dags.airflow_trigger.SpecbatchHook", Hook)
        assert asyncio.run(run()) == {"job_id": job, "state": "done"}


def test_a_trigger_is_made_again_from_what_it_says_of_itself(airflow: Airflow) -> None:
    assert airflow.dags
    from airflow.sdk._shared.module_loading import import_string

    from specbatch.jobs.dags.airflow_trigger import SpecbatchTrigger

    path, values = SpecbatchTrigger("job", ["dag", "run", "task"], 3, "site", 2.0).serialize()
    assert import_string(path)(**values).serialize() == (path, values)
    assert "://" not in json.dumps(values)


def test_a_deferred_tasks_job_is_cancelled_by_a_user_and_not_by_the_triggerers_end(
    airflow: Airflow, site: Site
) -> None:
    dag = "partial_fail"
    conf = conf_of(site, site.prompts(4 * GROUP))
    run = airflow.begin(dag, **conf)
    site.freeze()  # so that the job is not over before it is waited for
    try:
        first_part = airflow.start(dag, run)
        first_part.join(WAIT_SEC)
        assert airflow.task(dag, run).state == "deferred", airflow.log(dag, run).read_text()
        (job,) = site.jobs(conf["output"])
        triggerer = airflow.triggerer()
        site.until(lambda: airflow.triggers_begun(dag, run) == 1, "the trigger to run")
        triggerer.terminate()
        triggerer.wait(WAIT_SEC)
        assert site.client.poll(job).stop_reason is None
        triggerer = airflow.triggerer()
        try:
            site.until(lambda: airflow.triggers_begun(dag, run) == 2, "the trigger to run again")
            airflow.set_state(dag, run, "failed")
            site.until(lambda: site.client.poll(job).stop_reason, "the job to be cancelled")
        finally:
            triggerer.terminate()
            triggerer.wait(WAIT_SEC)
        assert site.client.poll(job).stop_reason == "cancelled with its task in airflow"
    finally:
        site.thaw()
    assert site.end(job).state == "cancelled"
