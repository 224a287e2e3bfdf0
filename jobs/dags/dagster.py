"""Dagster: a resource, an op and an asset that run one job, however often Dagster tries them.

    summaries = specbatch_asset(
        name="summaries",
        spec=lambda context: {
            "input": {"uri": f"s3://bucket/{context.partition_key}/prompts.parquet"},
            "output": {"uri": f"s3://bucket/{context.partition_key}/summaries"},
            "verifier": "llama-70b",
        },
        partitions_def=DailyPartitionsDefinition("2026-11-01"),
        retry_policy=RetryPolicy(max_retries=3),
    )
    definitions = Definitions(assets=[summaries], resources={"specbatch": SpecbatchResource()})

A retry, and a re-execution of a run that failed, resume its job: these have the run at the
root of their group in common. A new run is a new job.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from dagster import (
    AssetExecutionContext,
    AssetMaterialization,
    AssetsDefinition,
    ConfigurableResource,
    DagsterRunStatus,
    Failure,
    InitResourceContext,
    MaterializeResult,
    MetadataValue,
    OpDefinition,
    OpExecutionContext,
    Out,
    Output,
    asset,
    op,
)
from dagster._core.errors import DagsterExecutionInterruptedError
from pydantic import PrivateAttr

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.client import JobClient, Outcome, Spec, as_spec, open_client
from specbatch.jobs.dags.attaching import (
    OnPartial,
    Place,
    Verdict,
    attach,
    cancel_with_task,
    check_on_partial,
    judge,
    remedy,
    wait,
    with_input,
)
from specbatch.schemas.errors import UsageError
from specbatch.schemas.spec import JobSpec

RESOURCE = "specbatch"  # the key under which the op and the asset ask for the resource
_ENDED_BY_A_USER = (DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED)

SpecOf = Spec | Callable[[OpExecutionContext], Spec]


class SpecbatchResource(ConfigurableResource):
    """The store and the broker. Empty fields take the environment's `SPECBATCH_...`.

    `settings` holds any other settings by their names. Give secrets as `EnvVar`.
    """

    database_url: str = ""
    broker_url: str = ""
    workspace: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 - a field, which pydantic copies
    poll_sec: float = 15.0
    base: str = ""  # folder of relative paths in specs; empty: the working folder

    _client: JobClient | None = PrivateAttr(default=None)

    @contextmanager
    def yield_for_execution(self, context: InitResourceContext) -> Iterator[Self]:  # noqa: ARG002 - the hook's signature
        """Keep the client open while the step runs."""
        try:
            yield self
        finally:
            if self._client is not None:
                self._client.close()
                self._client = None

    @property
    def client(self) -> JobClient:
        """The client, opened on first use. Raises `UsageError` for invalid settings."""
        if self._client is None:
            named = ("database_url", "broker_url", "workspace")
            given = {name: getattr(self, name) for name in named if getattr(self, name)}
            self._client = open_client(load_settings(**self.settings | given))
        return self._client

    def run(
        self, context: OpExecutionContext, spec: Spec, on_partial: OnPartial = "fail"
    ) -> Outcome:
        """Submit the step's job, or resume it, and wait for its end.

        Raises `Failure` with the outcome's metadata if the job failed, without retries if another
        try cannot succeed. The caller must check the outcome's state for a skip.
        """
        place, base = place_of(context), Path(self.base) if self.base else None
        wanted = None
        try:
            try:
                wanted = as_spec(spec, base)
                place = with_input(self.client, wanted, place)
                job_id = attach(self.client, wanted, place, on_partial)
            except UsageError as error:
                raise Failure(str(error), allow_retries=False) from error
            context.log.info(f"waiting for job {job_id}")
            outcome = wait(self.client, job_id, place, self.poll_sec)
        except (DagsterExecutionInterruptedError, KeyboardInterrupt):
            if wanted is not None:
                self._interrupted(context, wanted, place)
            raise
        verdict = judge(outcome, on_partial)
        if verdict in (Verdict.FAIL, Verdict.GIVE_UP):
            raise Failure(
                f"{outcome.in_words}; {remedy(outcome)}",
                metadata=metadata_of(outcome),
                allow_retries=verdict is Verdict.FAIL,
            )
        (context.log.warning if outcome.rows_failed else context.log.info)(outcome.in_words)
        return outcome

    def _interrupted(self, context: OpExecutionContext, spec: JobSpec, place: Place) -> None:
        """Cancel the job if a user ends the run. A process that shuts down leaves the job running.

        An interrupt may come when the job exists and its id is not known yet.
        """
        run = context.instance.get_run_by_id(context.run_id)
        if run is None or run.status not in _ENDED_BY_A_USER:
            return
        if (job_id := cancel_with_task(self.client, spec, place)) is not None:
            context.log.info(f"job {job_id} cancelled: its run was ended by a user")


def specbatch_op(
    name: str, spec: SpecOf, *, on_partial: OnPartial = "fail", **of_op: Any
) -> OpDefinition:
    """An op whose output is the outcome as plain values. It reports the job's output as an asset.

    `spec`: a mapping, a spec file's path, or a function of the op's context that gives one.
    `on_partial`: `skip` gives no output, so that downstream ops do not run.
    """
    check_on_partial(on_partial)

    @op(
        name=name,
        out=Out(dict, is_required=on_partial != "skip"),
        required_resource_keys={RESOURCE},
        **of_op,
    )
    def run_job(context: OpExecutionContext) -> Iterator[Any]:
        outcome = _run(context, spec, on_partial)
        if judge(outcome, on_partial) is Verdict.SUCCEED:
            metadata = metadata_of(outcome)
            yield AssetMaterialization(
                asset_key_of(outcome.output_uri), metadata=metadata, partition=_partition(context)
            )
            yield Output(outcome.as_json(), metadata=metadata)

    return run_job


def specbatch_asset(
    name: str | None = None, *, spec: SpecOf, on_partial: OnPartial = "fail", **of_asset: Any
) -> AssetsDefinition:
    """An asset that a job produces, with its counts, cost, acceptance and output as metadata.

    `spec` and `on_partial` are those of `specbatch_op`; everything else is `dagster.asset`'s.
    """
    check_on_partial(on_partial)

    @asset(
        name=name,
        required_resource_keys={RESOURCE},
        output_required=on_partial != "skip",
        **of_asset,
    )
    def materialize_job(context: AssetExecutionContext) -> Iterator[Any]:
        outcome = _run(context.op_execution_context, spec, on_partial)
        if judge(outcome, on_partial) is Verdict.SUCCEED:
            yield MaterializeResult(metadata=metadata_of(outcome))

    return materialize_job


def _run(context: OpExecutionContext, spec: SpecOf, on_partial: OnPartial) -> Outcome:
    resource: SpecbatchResource = getattr(context.resources, RESOURCE)
    return resource.run(context, spec(context) if callable(spec) else spec, on_partial)


def place_of(context: OpExecutionContext) -> Place:
    """The step of a root run, with its job name, mapping key and partition."""
    run = context.run
    index = [context.get_mapping_key() or "", _partition(context) or ""]
    return Place(
        "dagster",
        run.job_name,
        run.root_run_id or run.run_id,
        str(context.op_handle),
        "/".join(index) if any(index) else "",
    )


def _partition(context: OpExecutionContext) -> str | None:
    if context.has_partition_key:
        return str(context.partition_key)
    if context.has_partition_key_range:
        return f"{context.partition_key_range.start}...{context.partition_key_range.end}"
    return None


def metadata_of(outcome: Outcome) -> dict[str, Any]:
    """A job's metadata for Dagster. Figures are numbers, so that Dagster can plot them."""
    values = outcome.as_json()
    found = {f"specbatch/{key}": value for key, value in values.items() if value is not None}
    found["specbatch/output_uri"] = _place(outcome.output_uri)
    for key in ("data_uri", "manifest_uri"):
        if values[key] is not None:
            found[f"specbatch/{key}"] = _place(values[key])
    found["specbatch/quarantined"] = MetadataValue.json(dict(outcome.quarantined))
    return found | {"dagster/row_count": outcome.completions}


def _place(uri: str) -> Any:
    return MetadataValue.url(uri) if "://" in uri else MetadataValue.path(uri)


def asset_key_of(output_uri: str) -> list[str]:
    """The asset of an output: its URI, part by part."""
    return [part for part in output_uri.replace("://", "/").split("/") if part]
