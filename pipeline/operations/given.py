"""What a caller gives in the place of texts that the store does not keep: a row, and a spec.

Both are proved before anything is made of them: the row by its receipt, the spec by its keyed
digest. What is given is never stored or logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from specbatch.pipeline.audit.receipts import is_prompt
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.privacy.tenants import KEPT_FIELDS, TEXT_FIELDS
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.encryption import Cipher, no_key
from specbatch.schemas.errors import UsageError
from specbatch.schemas.openai_formats import OPENAI_FORMATS
from specbatch.schemas.privacy import SEALED
from specbatch.schemas.records import CompletionRecord, JobRow, PromptRow
from specbatch.schemas.spec import JobSpec, spec_of


@dataclass(frozen=True, slots=True)
class Given:
    """A row as the input had it: the text of its prompt alone, or a JSON object of its columns."""

    text: str | None = None
    row: str | None = None

    def lines(self, job: JobRow, spec: JobSpec) -> list[bytes]:
        """The row as a line of a JSONL file; of a text that ends with a line end, without that
        too, because editors add one. Raises `UsageError`."""
        if self.row is not None:
            return [self.row.encode().strip()]
        text = self.text or ""
        if _format(job, spec) in OPENAI_FORMATS or spec.input.is_templated:
            made = (
                "the requests" if _format(job, spec) in OPENAI_FORMATS else "a template and columns"
            )
            raise UsageError(
                f"prompts of job {job.job_id} were made of {made}: give the whole row with --row"
            )
        texts = dict.fromkeys((text, text.removesuffix("\n")))
        return [orjson.dumps({spec.input.prompt_column: one}) for one in texts if one]


def proved_row(
    objects: Objects,
    cipher: Cipher | None,
    job: JobRow,
    spec: JobSpec,
    checker: RowChecker,
    record: CompletionRecord,
    given: Given,
) -> PromptRow:
    """The row of this completion. Raises `UsageError` for any other."""
    where = f"row {record.row_index} of job {job.job_id}"
    if record.receipt is None:
        raise UsageError(
            f"{where} has no receipt, so nothing proves its text: receipts are made by workers "
            "that have SPECBATCH_ENCRYPTION_KEY"
        )
    if cipher is None:
        raise no_key(f"the receipt of {where}")
    for line in given.lines(job, spec):
        row = _read(objects, job, spec, checker, record, line)
        if row is not None and is_prompt(cipher, record.receipt, job.job_id, row):
            return row
    raise UsageError(
        f"what was given is not {where}: give its text as it was in the input, or the whole row "
        "with --row where it had sampling values of its own"
    )


def _read(
    objects: Objects,
    job: JobRow,
    spec: JobSpec,
    checker: RowChecker,
    record: CompletionRecord,
    line: bytes,
) -> PromptRow | None:
    """The row of a line, read and checked as an input's; None where that would quarantine it."""
    name = _format(job, spec) if _format(job, spec) in OPENAI_FORMATS else "jsonl"
    with objects.temp_folder() as folder:
        path = folder / "row.jsonl"
        path.touch(mode=0o600)
        path.write_bytes(line + b"\n")
        here = {"uri": str(path), "format": name, "delimiter": None}
        source = open_source(spec.input.model_copy(update=here), objects)
        for batch in source.read():
            for row in checker.check(batch, record.row_index, has_ids=False):
                if not isinstance(row, PromptRow):
                    return None
                # The seed and the number of samples are the recorded ones, whatever was given.
                samples = max(row.n, record.sample_index + 1)
                return replace(row, seed=record.seed, n=samples)
    return None


def _format(job: JobRow, spec: JobSpec) -> str:
    return str(job.report.get("input_format") or spec.input.format)


# --- the spec of a purged job -----------------------------------------------------------------
def proved_spec(cipher: Cipher | None, job: JobRow, given: Mapping[str, Any] | None) -> JobSpec:
    """The job's whole spec. Of a purged job the store has what is no text; `given` has the texts,
    and may have more. The whole is proved by the job's digest. Raises `UsageError`.
    """
    if not job.spec.get(SEALED) or job.purged_at is None:
        return spec_of(job)
    if cipher is None:
        raise no_key(f"the digest of the spec of job {job.job_id}")
    shown = {name: value for name, value in job.spec.items() if name != SEALED}
    spec = _valid(_with_texts(shown, given or {}))
    if spec is not None and cipher.hashed(spec.digest(), "spec") == job.spec_digest:
        return spec
    what = "other texts than" if given else "not all texts of"
    raise UsageError(
        f"that is {what} the spec of job {job.job_id}, whose own were purged: give its name, stop "
        "strings, token ids, templates, tags, policies and best_by as they were submitted with "
        "--spec FILE"
    )


def _with_texts(shown: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The shown spec with the given values of the fields that were reduced in it."""
    whole = dict(shown)
    for name, value in given.items():
        if name not in KEPT_FIELDS and not isinstance(value, Mapping):
            whole[name] = value
    for part, names in TEXT_FIELDS.items():
        found = given.get(part)
        if isinstance(found, Mapping):
            texts = {name: found[name] for name in names if name in found}
            whole[part] = {**(whole.get(part) or {}), **texts}
    return whole


def _valid(values: Mapping[str, Any]) -> JobSpec | None:
    try:
        return JobSpec.model_validate(dict(values))
    except ValidationError:
        return None


def read_text(path: Path) -> str:
    """A file that the caller names, as it is. Raises `UsageError`."""
    try:
        return path.read_bytes().decode("utf-8", "strict")
    except OSError as error:
        reason = (error.strerror or "no such file").lower()
        raise UsageError(f"cannot read {path}: {reason}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
