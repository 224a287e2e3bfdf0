"""What a command checks before a job starts: everything with the engine extra, else the input.

What needs neither torch nor the store is checked first, so a slip is answered within a second.
Without the engine only a local input is checked: is it there, whole, with the column? Workers check
everything again. Where pyarrow is missing only what needs no reader is checked; an input on S3 is
left to the workers, who may be the only ones to have its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specbatch.jobs.cli.console import remark
from specbatch.pipeline.inputs.prompt_template import (
    can_read_templates,
    check_columns,
    columns_of,
)
from specbatch.pipeline.inputs.sources import find_files, text_source
from specbatch.pipeline.inputs.tables import can_read_tables, table_files
from specbatch.pipeline.storage.objects import Objects, tidy
from specbatch.schemas.context_length import beyond_context
from specbatch.schemas.errors import InputError, JobNotFoundError, ObjectError, UsageError
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.notifications import FILE, load_targets
from specbatch.schemas.settings import VLLM, Settings
from specbatch.schemas.spec import InputSpec, JobSpec

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked

_MAGIC = b"PAR1"


def check_first(spec: JobSpec) -> None:
    """Raise a `UsageError` for a local input or model folder that is plainly wrong.

    `check_job` finds the rest, which takes torch and perhaps the store or the hub.
    """
    check_input_here(spec.input)
    check_models_first(spec)


def check_models_first(spec: JobSpec) -> None:
    """Raise a `UsageError` for a model folder that is plainly wrong, or without the engine."""
    require_engine_extra()
    from specbatch.pipeline.engines.models.model_folder import check_folder

    own = None if spec.vllm_proposer is None else spec.vllm_proposer.model
    for ref in (spec.verifier, spec.draft_model, own):
        if ref is not None:
            check_folder(ref)


def check_job(
    settings: Settings,
    spec: JobSpec,
    key: str | None = None,
    is_keys_job: Callable[[str, str], bool] | None = None,
) -> Checked:
    """Raise a `UsageError` naming what is wrong with the models, the input or the output.

    An output that belongs to a job is refused, unless `is_keys_job` says that it is this very
    `key`'s.
    """
    require_engine_extra()
    if spec.vllm_proposer is not None:
        from specbatch.pipeline.bootstrap import with_proposer

        with_proposer(settings, spec.vllm_proposer)
    if settings.engine == VLLM:
        from specbatch.pipeline.engines.vllm.core import vllm_version
        from specbatch.pipeline.engines.vllm.parameters import check_given

        check_given(spec.engine)
        vllm_version()
    from specbatch.pipeline.operations import preflight

    def is_mine(job_id: str) -> bool:
        if key is None or is_keys_job is None:
            return False
        try:
            return is_keys_job(job_id, key)
        except JobNotFoundError:
            return False

    memory = settings.ingest_memory_mib << 20
    checked = preflight.check_job(spec, settings.s3_endpoint_url, is_mine, memory, settings.engine)
    tell_beyond_context(spec, checked.context_tokens)
    return checked


def tell_beyond_context(spec: JobSpec, context_tokens: int | None) -> None:
    """Say so where the model cannot write as many tokens as the job allows."""
    most = max(spec.sampling.max_tokens, spec.output.malformed.max_tokens or 0)
    if words := beyond_context(most, context_tokens):
        remark(words)


def check_input_here(spec: InputSpec, may_be_empty: bool = False) -> None:
    """Raise `InputError` for a local input that is missing, damaged or empty or lacks a column.

    It looks into the first rows of files of text and at the columns of Parquet and Arrow files.
    `may_be_empty` accepts an input without rows. A Jinja template is compiled wherever the input
    is, if jinja2 is here.
    """
    if not can_read_templates(spec):
        return
    columns_of(spec)
    if "://" in tidy(spec.uri) or (spec.table is not None and not can_read_tables(spec)):
        return
    objects = Objects()
    try:
        has_rows = _has_rows(spec, objects)
    except ObjectError as error:
        raise InputError(str(error)) from None
    if not has_rows and not may_be_empty and spec.since is None:
        raise InputError(f"input {spec.uri} has no rows: there is nothing to generate")


def check_scheduled(spec: JobSpec) -> None:
    """The check of a job that comes by schedule: some nights have no rows."""
    check_input_here(spec.input, may_be_empty=True)


def _has_rows(spec: InputSpec, objects: Objects) -> bool:
    """Whether there are rows, or might be. Raises `InputError`, and `ObjectError`."""
    if spec.table is not None:
        return _check_table(spec, objects)
    files, name = find_files(spec, objects)
    if name == "parquet":
        return _check_parquet([Path(file.uri) for file in files], spec)
    if name == "arrow":
        return _check_arrow([Path(file.uri) for file in files], spec)
    source = text_source(spec, objects, files, name)
    source.check()
    return not source.is_empty()


def _check_table(spec: InputSpec, objects: Objects) -> bool:
    """Whether the table has files. Raises `InputError`."""
    table = table_files(spec, objects)
    _check_names(Path(spec.uri), table.schema.names, spec)
    return bool(table.files)


def _check_parquet(files: Sequence[Path], spec: InputSpec) -> bool:
    """Whether there are rows, or might be. Raises `InputError`."""
    for file in files:
        _check_whole(file)
    if find_spec("pyarrow") is None:
        return True
    return sum([_checked_rows(file, spec) for file in files]) > 0


def _check_whole(file: Path) -> None:
    try:
        with file.open("rb") as handle:
            head = handle.read(4)
            handle.seek(-min(4, file.stat().st_size), 2)
            tail = handle.read(4)
    except OSError as error:
        raise InputError(f"cannot read {file}: {(error.strerror or 'error').lower()}") from None
    if head != _MAGIC or tail != _MAGIC:
        raise _damaged(file)


def _damaged(file: Path) -> InputError:
    return InputError(f"{file} is truncated or not Parquet; write it again, or leave it out")


def _checked_rows(file: Path, spec: InputSpec) -> int:
    """How many rows the file has. Raises `InputError` where a column is missing."""
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file)
        names = metadata.schema.to_arrow_schema().names
    except Exception:  # Arrow raises many kinds for one meaning
        raise _damaged(file) from None
    _check_names(file, names, spec)
    return int(metadata.num_rows)


def _check_names(file: Path, names: Sequence[str], spec: InputSpec) -> None:
    check_columns(spec, str(file), names)
    named = (spec.read_prompt_column, spec.id_column, spec.seed_column, spec.tag_column)
    for column in (*named, spec.sampling_column):
        if column is not None and column not in names:
            raise InputError(f"{file} has no column `{column}`; its columns are {', '.join(names)}")


def _check_arrow(files: Sequence[Path], spec: InputSpec) -> bool:
    """The same of Arrow files. Only reading a stream would show whether it has rows."""
    if find_spec("pyarrow") is None:
        return True
    import pyarrow as pa

    from specbatch.pipeline.inputs.decoders import FEATHER_1, IS_FEATHER_1

    has_rows = False
    for file in files:
        head = b""
        try:
            with pa.OSFile(str(file)) as handle:
                head = handle.read(6)
                is_file = head == b"ARROW1"
                handle.seek(0)
                reader = pa.ipc.open_file(handle) if is_file else pa.ipc.open_stream(handle)
                names = reader.schema.names
                has_rows |= not is_file or reader.num_record_batches > 0
        except Exception:  # Arrow raises many kinds for one meaning
            if head.startswith(FEATHER_1):
                raise InputError(f"{file} cannot be read: {IS_FEATHER_1}") from None
            raise InputError(
                f"{file} is truncated or not Arrow; write it again, or leave it out"
            ) from None
        _check_names(file, names, spec)
    return has_rows


def check_targets(settings: Settings, spec: JobSpec, local: bool) -> None:
    """Raise `UsageError` for targets to notify that this machine's file does not have.

    Where it has no file they are the workers' to know, unless the job is done here.
    """
    if not spec.notify:
        return
    if not settings.notify_file:
        if local:
            raise UsageError(
                f"the job is to notify {', '.join(spec.notify)}, and {FILE} is not set: name the "
                "YAML file with these targets"
            )
        return
    targets = load_targets(settings.notify_file)
    if missing := [name for name in spec.notify if name not in targets]:
        raise UsageError(
            f"{settings.notify_file} has no target {missing[0]!r}; "
            f"it has {', '.join(targets) or 'none'}"
        )
