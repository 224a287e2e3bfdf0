"""What a command checks before a job starts: everything with the engine extra, else the input.

Without the engine only a local input is checked: is it there, whole, with the column? Workers check
everything again. Where pyarrow is missing only what needs no reader is checked; an input on S3 is
left to the workers, who may be the only ones to have its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specbatch.pipeline.bootstrap import require_engine_extra
from specbatch.pipeline.inputs.folders import is_glob, local_files, local_matches, wanted_suffixes
from specbatch.schemas.errors import InputError, JobNotFoundError, ObjectError, UsageError
from specbatch.schemas.notifications import FILE, load_targets
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import InputSpec, JobSpec

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked

_MAGIC = b"PAR1"


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
    from specbatch.pipeline.operations import preflight

    def is_mine(job_id: str) -> bool:
        if key is None or is_keys_job is None:
            return False
        try:
            return is_keys_job(job_id, key)
        except JobNotFoundError:
            return False

    memory = settings.ingest_memory_mib << 20
    return preflight.check_job(spec, settings.s3_endpoint_url, is_mine, memory)


def check_input_here(spec: InputSpec) -> None:
    """Raise `InputError` for a local input that is missing or damaged or lacks the column."""
    if "://" in spec.uri:
        return
    try:
        files = _files(spec)
    except ObjectError as error:
        raise InputError(str(error)) from None
    if not files:
        raise InputError(
            f"no file matches input {spec.uri}"
            if is_glob(spec.uri)
            else f"input {spec.uri} does not exist or is empty"
        )
    for file in files:
        if spec.format == "parquet" or (spec.format == "auto" and file.suffix == ".parquet"):
            _check_parquet(file, spec)


def _files(spec: InputSpec) -> list[Path]:
    """Those that workers will read."""
    path = Path(spec.uri)
    if path.is_file():
        return [path]
    if path.is_dir():
        wanted = wanted_suffixes(spec.format)
        return [p for p in local_files(path) if p.name.endswith(wanted)]
    if not is_glob(str(path)):
        return []
    return [p for p in local_matches(str(path)) if p.is_file()]


def _check_parquet(file: Path, spec: InputSpec) -> None:
    try:
        with file.open("rb") as handle:
            head = handle.read(4)
            handle.seek(-min(4, file.stat().st_size), 2)
            tail = handle.read(4)
    except OSError as error:
        raise InputError(f"cannot read {file}: {(error.strerror or 'error').lower()}") from None
    if head != _MAGIC or tail != _MAGIC:
        raise InputError(f"{file} is not a whole Parquet file: it is damaged or cut short")
    if find_spec("pyarrow") is not None:
        _check_columns(file, spec)


def _check_columns(file: Path, spec: InputSpec) -> None:
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(file).names
    except Exception as error:  # Arrow raises many kinds for one meaning
        first = str(error).partition("\n")[0]
        raise InputError(f"{file} is not a readable Parquet file: {first}") from None
    named = (spec.prompt_column, spec.id_column, spec.seed_column, spec.tag_column)
    for column in (*named, spec.sampling_column):
        if column is not None and column not in names:
            raise InputError(f"{file} has no column `{column}`; its columns are {', '.join(names)}")


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
