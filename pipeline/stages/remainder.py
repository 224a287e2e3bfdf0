"""The remainder of a job that was stopped, as a job of its own: its prompts and their spec.

    remainder-<job>.parquet   every unfinished row, read or not, in the order of the input
    remainder-<job>.yaml      the job's spec for it; `submit-job` takes it as it is

The Parquet file is as `outputs/prompt_file.py` writes it. The outputs of both jobs together are
those of the undisturbed job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import yaml

from specbatch.pipeline.inputs.planner import PlannedGroup
from specbatch.pipeline.outputs.names import remainder_name
from specbatch.pipeline.outputs.prompt_file import PromptFile, input_values, rows_in
from specbatch.pipeline.storage.objects import join
from specbatch.schemas.arrow import output_schema
from specbatch.schemas.errors import ObjectError, SpecbatchError
from specbatch.schemas.records import JobRow, PromptRow, RejectedRow
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.table_spec import JOB_COLUMN

_LIMITS = ("deadline_sec", "budget_usd")


@dataclass(frozen=True, slots=True)
class Remainder:
    """Files in a local folder. `problem`: why the input could not be read to its end."""

    prompts: Path
    spec: Path
    quarantined: Path  # rows that were met only now, as JSON lines
    rows: int
    unread: int  # of these, rows that were in no group
    problem: str | None = None

    @property
    def files(self) -> list[tuple[Path, int]]:
        """What is published, with the number of rows; nothing where nothing is left."""
        return [(self.prompts, self.rows), (self.spec, self.rows)] if self.rows else []

    def unread_rows(self, samples: int) -> Iterator[PromptRow]:
        """The rows that were in no group; `samples` of each that does not say."""
        return islice(rows_in(self.prompts, samples), self.rows - self.unread, None)

    def newly_quarantined(self) -> Iterator[RejectedRow]:
        with self.quarantined.open() as lines:
            for line in lines:
                yield RejectedRow(**json.loads(line))


def write_remainder(
    folder: Path,
    job: JobRow,
    spec: JobSpec,
    unfinished: Iterable[PromptRow],
    unread: Iterable[PlannedGroup],
    tries_again: bool = False,
) -> Remainder:
    """Write it all, a few rows in memory at a time.

    `unfinished` rows were in groups, `unread` ones follow them in the input. Raises what reading
    the former raises. If the latter cannot be read, the `problem` says why; a caller that
    `tries_again` gets the `ObjectError` of storage that is out of reach for a while.
    """
    name = remainder_name(job.job_id)
    prompts, quarantined = folder / f"{name}.parquet", folder / "quarantined.jsonl"
    problem = None
    with ExitStack() as stack:
        lines = stack.enter_context(quarantined.open("w"))
        writer = stack.enter_context(closing(PromptFile(prompts, spec.sampling.n)))
        for row in unfinished:
            writer.add(row)
        read = writer.rows
        try:
            for group in unread:
                for rejected in group.rejected:
                    lines.write(json.dumps(asdict(rejected)) + "\n")
                for row in group.rows:
                    writer.add(row)
        except SpecbatchError as error:
            if tries_again and isinstance(error, ObjectError) and error.passing:
                raise
            problem = f"the rest of the input is not in the remainder: {error}"
    spec_file = folder / f"{name}.yaml"
    spec_file.write_text(_spec_text(job, spec, prompts.name), encoding="utf-8")
    return Remainder(prompts, spec_file, quarantined, writer.rows, writer.rows - read, problem)


def _spec_text(job: JobRow, spec: JobSpec, prompts: str) -> str:
    """The spec file. Beside a local output it finds its prompts wherever the folder is moved."""
    output = spec.output.uri
    values = spec.model_dump(mode="json", exclude_defaults=True)
    values = {name: value for name, value in values.items() if name not in _LIMITS}
    values["input"] = input_values(join(output, prompts) if "://" in output else prompts)
    values["output"] |= {"uri": f"{output.rstrip('/')}-remainder"}
    values["output"].pop("keep_columns", None)  # they are in the job's own input
    reason = " ".join((job.stop_reason or "it was cancelled").split())
    notes = [
        f"What is left of job {job.job_id} ({reason}).",
        "Submit it as it is; its deadline and its budget, if it had any, are left out.",
    ]
    if (table := spec.output.table) is not None:
        own = {*output_schema(spec.output.best_by is not None).names, JOB_COLUMN}
        if table.mode == "merge" and not own.issuperset(table.key):
            del values["output"]["table"]
            notes += [
                f"So is its table, whose key has columns of the input, which these rows lack: with "
                f"`specbatch retry {job.job_id}` instead, they get there.",
            ]
        elif table.partition_by:  # of which the table is made if it is missing
            values["output"]["table"]["partition_by"] = [c for c in table.partition_by if c in own]
    return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True
    )
