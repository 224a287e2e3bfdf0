"""The Airflow operator: one task instance is one job, however often Airflow tries it.

    SpecbatchOperator(
        task_id="summarise",
        spec={
            "input": {"uri": "s3://bucket/{{ ds }}/prompts.parquet"},
            "output": {"uri": "s3://bucket/{{ ds }}/summaries"},
            "verifier": "llama-70b",
        },
    )

Needs Airflow 3.3, which calls a trigger's `on_kill` only when a user kills the task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from airflow.sdk import Asset, AssetAlias, BaseOperator, Context
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)

from specbatch.jobs.client import Outcome, as_spec, spec_from_text
from specbatch.jobs.dags.airflow_hook import SpecbatchHook, was_killed_in_time
from specbatch.jobs.dags.airflow_trigger import SpecbatchTrigger
from specbatch.jobs.dags.attaching import (
    SPEC_CHANGED,
    Place,
    Verdict,
    attach,
    check_earlier,
    check_on_partial,
    judge,
    remedy,
    revive,
    wait,
    with_input,
)
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.spec import JobSpec

JOB_KEY = "job_id"  # the XCom that exists while the job runs, and what the task's state keeps
POLL_SEC = 0.5  # between two checks whether this process should end
OUTCOME_KEY = "return_value"  # the XCom that exists afterwards, however the task ended


class SpecbatchOperator(BaseOperator):
    """Submits a job, or resumes the job of an earlier try, and waits for its end.

    :param spec: the job as a mapping with the spec file's fields; templated.
    :param spec_path: the spec file instead, relative to the DAG's file; the path and the text in
        the file are templated.
    :param on_partial: what it means when some rows failed: `fail`, `succeed`, or `skip` what
        follows, with a warning. The output is there in any case.
    :param conn_id: a connection whose extra holds specbatch's settings; None: the environment.
    :param deferrable: wait in the triggerer instead of a worker.
    :param poll_sec: seconds between two checks of the job.
    :param outlets: assets get the outcome as the event's extra; an alias gets an asset of the
        output's URI. None: an alias called `specbatch.DAG.TASK`.
    """

    template_fields: Sequence[str] = ("spec", "spec_path", "conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"spec": "json"}
    ui_color = "#dfe7f5"

    def __init__(
        self,
        *,
        spec: Mapping[str, Any] | None = None,
        spec_path: str | None = None,
        on_partial: str = "fail",
        conn_id: str | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poll_sec: float = 15.0,
        outlets: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(outlets=outlets, **kwargs)
        self.spec = spec
        self.spec_path = spec_path
        self.on_partial = check_on_partial(on_partial)
        self.conn_id = conn_id
        self.deferrable = deferrable
        self.poll_sec = poll_sec
        if outlets is None:
            self.outlets = [AssetAlias(f"specbatch.{self.dag_id}.{self.task_id}")]
        self._is_ending = False  # this process was asked to end
        self._running: tuple[str, Place] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit and wait; the outcome goes to XCom. Raises the exception of the outcome."""
        try:
            spec = self._job_spec(context)
            client = SpecbatchHook(self.conn_id).get_conn()
            place = with_input(client, spec, place_of(context))
            earlier = context["task_state_store"].get(JOB_KEY)
            replaced = check_earlier(client, spec, place, earlier)
            job_id = attach(client, spec, place, self.on_partial)
        except UsageError as error:  # every try would fail
            raise AirflowFailException(str(error)) from error
        try:
            if replaced is not None:
                self.log.info("job %s is cancelled: the spec has changed since", replaced)
                client.cancel(replaced, SPEC_CHANGED)
            context["ti"].xcom_push(key=JOB_KEY, value=job_id)
            context["task_state_store"].set(JOB_KEY, job_id)
        finally:
            self._hold(job_id, place)
        if self.deferrable and not client.poll(job_id).is_final:
            self._wait_in_the_triggerer(job_id, place)  # never returns
        return self._end(wait(client, job_id, place, self.poll_sec, self._pause), context)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """The trigger has fired: the job has ended."""
        client, place = SpecbatchHook(self.conn_id).get_conn(), place_of(context)
        if revive(client, client.poll(event["job_id"]), place):
            self._hold(event["job_id"], place)
            self._wait_in_the_triggerer(event["job_id"], place)
        return self._end(client.outcome(event["job_id"]), context)

    def _hold(self, job_id: str, place: Place) -> None:
        """Let kills find the job from here on, and handle an earlier kill now.

        During submission the job had no id, and the connection to Airflow, which says who kills,
        may have been in use.
        """
        self._running = (job_id, place)
        if self._is_ending and self._leave(job_id, place):
            raise AirflowException("ended by a user while its job was submitted")

    def on_kill(self) -> None:
        """Cancel the job if a user ended the task, and leave it running otherwise.

        After a worker's shutdown or a time limit the next try finds the job.
        """
        self._is_ending = True
        if self._running is not None:
            self._leave(*self._running)

    def _leave(self, job_id: str, place: Place) -> bool:
        """Cancel the job if a user ended the task. Returns whether it was cancelled."""
        if was_killed_in_time(place.dag, place.run, place.task, int(place.index)):
            SpecbatchHook(self.conn_id).get_conn().cancel(job_id, place.killed)
            self.log.info("job %s cancelled: its task was ended by a user", job_id)
            return True
        self.log.info("job %s continues without this process", job_id)
        return False

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._is_ending:  # polled, because a signal handler must not take a lock
                raise AirflowException("asked to end while the job runs")
            time.sleep(min(left, POLL_SEC))

    def _wait_in_the_triggerer(self, job_id: str, place: Place) -> None:
        trigger = SpecbatchTrigger(
            job_id=job_id,
            place=[place.dag, place.run, place.task],
            map_index=int(place.index),
            conn_id=self.conn_id,
            poll_sec=self.poll_sec,
        )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=self.execution_timeout)

    def _job_spec(self, context: Context) -> JobSpec:
        folder = Path(getattr(context["dag"], "folder", None) or ".")
        if (self.spec is None) == (self.spec_path is None):
            raise SpecError(f"task {self.task_id} needs `spec` or `spec_path`, and one of them")
        if self.spec is not None:
            return as_spec(self.spec, folder)
        path = folder / str(self.spec_path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"spec file {path} cannot be read: {error.strerror}") from None
        # Render as a template: Airflow would load a name with a template's suffix from a file.
        rendered = self.get_template_env().from_string(text).render(context)
        return spec_from_text(rendered, str(path), path.parent)

    def _end(self, outcome: Outcome, context: Context) -> dict[str, Any]:
        values, verdict = outcome.as_json(), judge(outcome, self.on_partial)
        said = f"{outcome.in_words}; {remedy(outcome)}"
        if verdict is Verdict.SUCCEED:
            say = self.log.info if not outcome.rows_failed else self.log.warning
            say("%s", outcome.in_words)
            self._emit(outcome, values, context)
            return values
        context["ti"].xcom_push(key=OUTCOME_KEY, value=values)
        if verdict is Verdict.SKIP:
            self.log.warning("%s", said)
            raise AirflowSkipException(said)
        raise (AirflowFailException if verdict is Verdict.GIVE_UP else AirflowException)(said)

    def _emit(self, outcome: Outcome, values: dict[str, Any], context: Context) -> None:
        """Emit the output as an asset of its object store."""
        for outlet in self.outlets:
            if isinstance(outlet, AssetAlias):
                found = Asset(name=outcome.output_uri, uri=asset_uri(outcome.output_uri))
                context["outlet_events"][outlet].add(found, extra=values)
            elif isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra.update(values)


def asset_uri(output_uri: str) -> str:
    """The output as a URI, also if it is a local folder."""
    return output_uri if "://" in output_uri else Path(output_uri).as_uri()


def place_of(context: Context) -> Place:
    """The task instance. All its tries have the same place."""
    ti = context["ti"]
    index = -1 if ti.map_index is None else ti.map_index
    return Place("airflow", ti.dag_id, ti.run_id, ti.task_id, str(index))


__all__ = ["SpecbatchHook", "SpecbatchOperator", "SpecbatchTrigger", "asset_uri"]
