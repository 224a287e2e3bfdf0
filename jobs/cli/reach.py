"""What a submitter can say about an input without the engine: is it there, whole, with the column?

Workers check everything again. Where pyarrow is missing only what needs no reader is checked; an
input on S3 is left to the workers, who may be the only ones to have its keys.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specbatch.pipeline.inputs.folders import is_glob, local_files, local_matches, wanted_suffixes
from specbatch.schemas.errors import InputError, ObjectError
from specbatch.schemas.spec import InputSpec

_MAGIC = b"PAR1"


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
