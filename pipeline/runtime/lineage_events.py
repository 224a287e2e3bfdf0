"""OpenLineage's events of one job, built of what the store has of it.

They name files, columns, models and figures. No text of a prompt, of an output or of an error is
in them: an error may quote a row, so a failed run only says which command shows why.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attr import define
from openlineage.client.event_v2 import (
    InputDataset,
    Job,
    OutputDataset,
    Run,
    RunEvent,
    RunState,
)
from openlineage.client.facet_v2 import (
    DatasetFacet,
    JobFacet,
    RunFacet,
    column_lineage_dataset,
    dataset_version_dataset,
    error_message_run,
    input_statistics_input_dataset,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
    schema_dataset,
)
from openlineage.client.uuid import generate_static_uuid

from specbatch.pipeline.inputs.folders import is_glob, split_glob
from specbatch.pipeline.observe.units import version_here
from specbatch.schemas import lineage
from specbatch.schemas.audit import DATA_FOLDER
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.lineage import Fields, InputFacts, OutputFacts
from specbatch.schemas.notifications import Event
from specbatch.schemas.records import JobRow

FACET = "specbatch_generation"
SCHEMA_FILE = "schemas/SpecbatchGenerationRunFacet-1-0-0.json"  # in the documentation
_STATES = {
    Event.DONE: RunState.COMPLETE,
    Event.PARTIAL: RunState.COMPLETE,
    Event.FAILED: RunState.FAIL,
    Event.CANCELLED: RunState.ABORT,
}
# Columns of an output that the verifier writes from the prompt.
_WRITTEN = (
    *("text", "token_ids", "finish_reason", "completion_tokens", "logprobs", "top_logprobs"),
    *("tool_calls", "score"),
)


@define
class SpecbatchGenerationRunFacet(RunFacet):
    """How a job was generated; `SCHEMA_FILE` in the documentation describes it."""

    job: dict[str, Any]
    models: dict[str, Any]
    numerics: dict[str, Any]
    rows: dict[str, Any]
    tokens: dict[str, Any]
    cost: dict[str, Any]


class Events:
    """The events of one job."""

    def __init__(self, job: JobRow, progress: JobProgress, docs_url: str) -> None:
        self._job = job
        self._progress = progress
        self._docs = docs_url.rstrip("/")
        self._producer = f"{self._docs}/?version={version_here()}"
        self._input = lineage.input_in(job.report)
        self._output = lineage.output_in(job.report)

    def start(self, ordinal: int, at: float) -> RunEvent:
        """The start of the job's run `ordinal`: 0, and one more each time an ended job resumes.

        `at`: seconds since the epoch.
        """
        return self._event(RunState.START, ordinal, at)

    def end(self, ordinal: int, event: Event, at: float) -> RunEvent:
        """How the run ended: COMPLETE also if rows failed, ABORT if the job was stopped."""
        return self._event(_STATES[event], ordinal, at)

    def _event(self, state: RunState, ordinal: int, at: float) -> RunEvent:
        source = dataset_name(input_place(_said(self._job, "input", "uri") or "unknown"))
        return RunEvent(
            eventType=state,
            eventTime=_time(at).isoformat(timespec="milliseconds"),
            producer=self._producer,
            run=Run(run_id(self._job, ordinal), self._run_facets(state)),
            job=Job(lineage.namespace(), job_name(self._job), self._job_facets()),
            inputs=[self._read(source)],
            outputs=[self._written(source)],
        )

    # --- facets of the run and the job ------------------------------------------------------
    def _run_facets(self, state: RunState) -> dict[str, RunFacet]:
        job = self._job
        facets: dict[str, RunFacet] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
                version=version_here(), name="specbatch", producer=self._producer
            ),
            FACET: self._generation(),
        }
        if (parent := lineage.parent_in(job.spec.get("lineage_parent"))) is not None:
            facets["parent"] = parent_run.ParentRunFacet(
                run=parent_run.Run(runId=parent.run_id),
                job=parent_run.Job(namespace=parent.namespace, name=parent.name),
                producer=self._producer,
            )
        if state is RunState.FAIL:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                message=f"job {job.job_id} failed; `specbatch show {job.job_id}` says why",
                programmingLanguage="python",
                producer=self._producer,
            )
        return facets

    def _job_facets(self) -> dict[str, JobFacet]:
        kind = job_type_job.JobTypeJobFacet(
            processingType="BATCH",
            integration="SPECBATCH",
            jobType="JOB",
            producer=self._producer,
        )
        return {"jobType": kind}

    def _generation(self) -> SpecbatchGenerationRunFacet:
        job, progress = self._job, self._progress
        facet = SpecbatchGenerationRunFacet(
            job={"id": job.job_id, "tenant": job.tenant, "state": str(progress.state)},
            models=_models(job),
            numerics={
                "class": job.numeric_class,
                "exactness": _said(job, "engine", "exactness"),
                "verification": _said(job, "speculation", "verification"),
            },
            rows={
                "total": progress.rows_total,
                "done": progress.rows_done,
                "failed": progress.rows_failed,
            },
            tokens={
                "prompt": progress.prompt_tokens,
                "completion": progress.completion_tokens,
                "proposed": progress.proposed,
                "accepted": progress.accepted,
                "acceptanceRate": progress.acceptance_rate,
                "verifierPasses": progress.verifier_passes,
            },
            cost={
                "usd": round(progress.cost_usd, 6),
                "computeSeconds": round(progress.compute_sec, 3),
            },
            producer=self._producer,
        )
        facet._schemaURL = f"{self._docs}/{SCHEMA_FILE}#/$defs/SpecbatchGenerationRunFacet"
        return facet

    # --- data sets --------------------------------------------------------------------------
    def _read(self, name: tuple[str, str]) -> InputDataset:
        facts = self._input
        if facts is None:
            return InputDataset(*name)
        facets: dict[str, DatasetFacet] = {
            "schema": self._schema(input_fields(facts, self._output)),
            "version": dataset_version_dataset.DatasetVersionDatasetFacet(
                datasetVersion=facts.version, producer=self._producer
            ),
        }
        figures = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            rowCount=self._job.rows_total or None,
            size=facts.size_bytes,
            fileCount=facts.files,
            producer=self._producer,
        )
        return InputDataset(*name, facets=facets, inputFacets={"inputStatistics": figures})

    def _written(self, source: tuple[str, str]) -> OutputDataset:
        name = dataset_name(f"{self._job.output_uri.rstrip('/')}/{DATA_FOLDER}")
        facts = self._output
        if facts is None:
            return OutputDataset(*name)
        facets: dict[str, DatasetFacet] = {"schema": self._schema(facts.fields)}
        if self._input is not None:
            facets["columnLineage"] = column_lineage_dataset.ColumnLineageDatasetFacet(
                fields=column_lineage(source, self._input, facts), producer=self._producer
            )
        figures = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=facts.rows,
            size=facts.size_bytes,
            fileCount=facts.files,
            producer=self._producer,
        )
        return OutputDataset(*name, facets=facets, outputFacets={"outputStatistics": figures})

    def _schema(self, fields: Fields) -> schema_dataset.SchemaDatasetFacet:
        found = [schema_dataset.SchemaDatasetFacetFields(name, kind) for name, kind in fields]
        return schema_dataset.SchemaDatasetFacet(fields=found, producer=self._producer)


# --- names ----------------------------------------------------------------------------------
def run_id(job: JobRow, ordinal: int) -> str:
    """The run's UUID: always the same for a job and how often it was resumed after an end."""
    return str(generate_static_uuid(_time(job.created_at), f"{job.job_id}/{ordinal}".encode()))


def job_name(job: JobRow) -> str:
    """A job's name in its namespace: all nights of a job are runs of the same."""
    return job.name if job.tenant == "default" else f"{job.tenant}/{job.name}"


def input_place(uri: str) -> str:
    """The file or folder of an input; of a glob the folder before its first special character."""
    if not is_glob(uri):
        return uri
    folder, _ = split_glob(uri)
    return folder.rstrip("/") or "/"


def dataset_name(uri: str) -> tuple[str, str]:
    """Namespace and name by OpenLineage's rules: (file, path), or (s3://bucket, key)."""
    scheme, there, rest = uri.partition("://")
    if not there or scheme == "file":
        return "file", (rest if there else uri).rstrip("/") or "/"
    place, _, key = rest.partition("/")
    return f"{scheme}://{place}", key.strip("/") or "/"


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


# --- what comes of what ---------------------------------------------------------------------
def input_fields(read: InputFacts, written: OutputFacts | None) -> Fields:
    """The noted columns of an input, and those that `column_lineage` names besides.

    It may name only columns of the schema. A column can lie beyond those that are noted, or be in
    none of the first lines.
    """
    kept = () if written is None else written.kept
    used = (*read.prompt, read.id, read.seed, read.sampling, *kept)
    there = {name for name, _ in read.fields}
    more = dict.fromkeys(name for name in used if name is not None and name not in there)
    return (*read.fields, *((name, None) for name in more))


def column_lineage(
    source: tuple[str, str], read: InputFacts, written: OutputFacts
) -> dict[str, column_lineage_dataset.Fields]:
    """Which columns of the input each column of the output comes from; others have no entry."""
    there = {name for name, _ in written.fields}

    def column(name: str, kind: str, subtype: str) -> column_lineage_dataset.InputField:
        how = column_lineage_dataset.Transformation(type=kind, subtype=subtype)
        return column_lineage_dataset.InputField(*source, name, transformations=[how])

    prompt = [column(name, "DIRECT", "TRANSFORMATION") for name in read.prompt]
    chosen = [read.seed, read.sampling]
    sampled = [column(name, "INDIRECT", "CONDITIONAL") for name in chosen if name is not None]
    found = {name: [*prompt, *sampled] for name in _WRITTEN} | {"prompt_tokens": prompt}
    if read.id is not None:
        found["id"] = [column(read.id, "DIRECT", "IDENTITY")]
        found["seed"] = [column(read.id, "DIRECT", "TRANSFORMATION")]
    if read.seed is not None:
        found["seed"] = [column(read.seed, "DIRECT", "IDENTITY")]
    found |= {name: [column(name, "DIRECT", "IDENTITY")] for name in written.kept}
    return {
        name: column_lineage_dataset.Fields(inputFields=fields)
        for name, fields in found.items()
        if name in there and fields
    }


def _models(job: JobRow) -> dict[str, Any]:
    """The models by name and digest; a value that is not known is left out."""
    report = job.report
    verifier = {
        "name": job.verifier,
        "fingerprint": job.model_fingerprint,
        "sha256": report.get("verifier_sha256"),
        "weights": report.get("verifier_weights"),
        "revision": report.get("verifier_revision"),
    }
    found = {"verifier": _known(verifier)}
    if job.proposer is not None:
        proposer = {
            "name": job.proposer,
            "fingerprint": job.proposer_fingerprint,
            "sha256": report.get("proposer_sha256"),
        }
        found["proposer"] = _known(proposer)
    return found


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _said(job: JobRow, part: str, field: str) -> str | None:
    """A word of the job's spec."""
    value = job.spec.get(part, {}).get(field)
    return None if value is None else str(value)
