"""Finds the files of an input, names their format and chooses the reader."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson

from specbatch.pipeline.inputs.contract import (
    BYTES_PER_BATCH,
    READER_BYTES,
    Format,
    Source,
    as_input_error,
)
from specbatch.pipeline.inputs.delimited import CsvSource
from specbatch.pipeline.inputs.folders import (
    format_of,
    formats_of,
    in_words,
    is_glob,
    is_hidden,
    local_files,
    local_matches,
    odd_kind,
    split_glob,
    wanted_suffixes,
)
from specbatch.pipeline.inputs.jsonl import JsonlSource
from specbatch.pipeline.inputs.saved_datasets import saved_dataset
from specbatch.pipeline.inputs.tables import TableFiles, table_files
from specbatch.pipeline.inputs.text_files import BOM, GZIP, open_text, reading
from specbatch.pipeline.storage.delta import LOG
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects, tidy
from specbatch.schemas.errors import InputError, ObjectError
from specbatch.schemas.openai_formats import format_of_url
from specbatch.schemas.spec import InputSpec


def open_source(
    spec: InputSpec,
    objects: Objects,
    memory_bytes: int = READER_BYTES,
    among: Callable[[list[ObjectInfo]], list[ObjectInfo]] = list,
) -> Source:
    """Find the input's files and choose the reader. `memory_bytes` limits decoding. `among`
    chooses those to be read of the files that are found; a table's snapshot names its own.

    Raises `InputError` if there are none, and `ObjectError` if the store may answer later.
    """
    if spec.table is not None:
        return _table_source(spec, objects, memory_bytes)
    files, name = find_files(spec, objects, among)
    if name in ("parquet", "arrow"):
        from specbatch.pipeline.inputs.columnar import ColumnarSource

        return ColumnarSource(spec, objects, files, name, memory_bytes)
    return text_source(spec, objects, files, name)


def _table_source(spec: InputSpec, objects: Objects, memory_bytes: int) -> Source:
    from specbatch.pipeline.inputs.columnar import ColumnarSource

    table = _table(spec, objects)
    return ColumnarSource(spec, objects, table.files, "parquet", memory_bytes, table)


def _table(spec: InputSpec, objects: Objects) -> TableFiles:
    if spec.delimiter is not None:
        raise InputError("input.delimiter is for CSV files, and this is a table; leave it out")
    try:
        return table_files(spec, objects)
    except ObjectError as error:
        raise as_input_error(error) from error


def text_source(
    spec: InputSpec, objects: Objects, files: list[ObjectInfo], name: Format
) -> CsvSource | JsonlSource:
    """The reader of files of text, which needs no pyarrow. Raises `InputError`."""
    if name == "csv":
        return CsvSource(spec, objects, files)
    return JsonlSource(spec, objects, files, name)


def find_files(
    spec: InputSpec,
    objects: Objects,
    among: Callable[[list[ObjectInfo]], list[ObjectInfo]] = list,
) -> tuple[list[ObjectInfo], Format]:
    """The input's files and their format. Raises as `open_source` does; needs no pyarrow, but
    for tables."""
    if spec.table is not None:
        return _table(spec, objects).files, "parquet"
    files = among(list_files(spec, objects))
    _check_read_once(files)
    name = _format(spec, files, objects)
    if spec.delimiter is not None and name != "csv":
        raise InputError(
            f"input.delimiter is for CSV files, and {files[0].uri} is {name}; leave it out"
        )
    return files, name


_BUCKETS = ("s3", "gs", "az", "abfs")


# --- finding files ------------------------------------------------------------------------------
def list_files(spec: InputSpec, objects: Objects) -> list[ObjectInfo]:
    """The input's files, in the order in which they are read. Raises as `open_source` does."""
    uri = tidy(spec.uri)
    scheme, _, place = uri.rpartition("://")
    if scheme in _BUCKETS and "/" not in place:
        uri += "/"  # a whole bucket
    try:
        if scheme in (*_BUCKETS, "hf") and is_glob(uri):
            return _find_listed_glob(uri, spec, objects)
        if not uri.endswith("/") and (info := objects.head(uri)):
            return [info]
        if "://" in uri:
            return _folder(uri, spec, objects.list(uri.rstrip("/") + "/"), objects)
        if is_glob(uri) and not Path(uri).is_dir():
            return _matched(uri, _infos(local_matches(uri), objects))
        return _folder(uri, spec, _infos(local_files(Path(uri)), objects), objects)
    except ObjectError as error:
        raise as_input_error(error) from error


def _find_listed_glob(uri: str, spec: InputSpec, objects: Objects) -> list[ObjectInfo]:
    """Find files of a store with one list and no HEAD: with rights only to list a prefix, S3
    refuses to say that a key does not exist."""
    root, pattern = split_glob(uri)
    listed = objects.list(root)
    folder = uri.rstrip("/") + "/"
    if exact := [info for info in listed if info.uri == uri]:
        return exact
    if below := [info for info in listed if info.uri.startswith(folder)]:
        return _folder(uri, spec, below, objects)
    whole = _glob_pattern(uri)
    found = [info for info in listed if whole.fullmatch(info.uri)]
    return _matched(uri, [i for i in found if not is_hidden(i.uri.removeprefix(root), pattern)])


def _infos(paths: list[Path], objects: Objects) -> list[ObjectInfo]:
    return [info for path in paths if (info := objects.head(str(path)))]


def _matched(uri: str, files: list[ObjectInfo]) -> list[ObjectInfo]:
    if not files:
        raise InputError(f"no file matches input {uri}")
    return files


def _folder(
    uri: str, spec: InputSpec, listed: list[ObjectInfo], objects: Objects
) -> list[ObjectInfo]:
    """The files of a folder that are inputs."""
    root = "" if uri == "." else uri.rstrip("/") + "/"
    if spec.format == "auto" and _is_delta(root, listed):
        raise InputError(
            f"input folder {spec.uri} is a Delta table, some of whose files may be of other "
            "versions; set input.format to delta"
        )
    if spec.format in ("auto", "arrow") and (saved := saved_dataset(root, listed, objects)):
        return saved
    found = [info for info in listed if not is_hidden(info.uri.removeprefix(root))]
    wanted = wanted_suffixes(spec.format)
    files = [info for info in found if info.uri.endswith(wanted)]
    if not found:
        raise _nothing_at(spec.uri, uri)
    if not files:
        *most, last = (f"*{suffix}" for suffix in wanted if not suffix.endswith(GZIP))
        names = f"{', '.join(most)} or {last}" if most else last
        raise InputError(f"input folder {spec.uri} holds no {names} files")
    if spec.format != "auto":
        return files
    kinds = formats_of(info.uri for info in files)
    if len(kinds) > 1:
        raise InputError(
            f"input folder {spec.uri} holds {in_words(kinds)} files; set input.format to choose"
        )
    return [info for info in files if info.uri.endswith(wanted_suffixes(kinds[0]))]


def _is_delta(root: str, listed: list[ObjectInfo]) -> bool:
    if "://" in root:
        return any(info.uri.startswith(f"{root}{LOG}/") for info in listed)
    return Path(root, LOG).is_dir()


def _check_read_once(files: list[ObjectInfo]) -> None:
    names = {info.uri for info in files}
    for name in (info.uri for info in files):
        if name.endswith(GZIP) and (unpacked := name.removesuffix(GZIP)) in names:
            raise InputError(
                f"{unpacked} and {name} seem to be the same file, whose rows would be read twice; "
                "move one of them away"
            )


def _nothing_at(named: str, uri: str) -> InputError:
    """Why no file was found at a uri. Object stores have no empty folders."""
    if "://" in uri:
        return InputError(f"input {named} does not exist or is empty")
    path = Path(uri)
    if path.is_dir():
        return InputError(f"input folder {named} holds no files, or only hidden ones")
    return InputError(f"input {named} {odd_kind(path) or 'does not exist'}")


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """`*` stays within a folder, `**` does not. Raises `InputError`."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    written = "".join(
        meaning.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )
    try:
        return re.compile(written)
    except re.error as error:
        raise InputError(f"input {glob} is not a glob: {error.msg}") from None


# --- naming the format --------------------------------------------------------------------------
def _format(spec: InputSpec, files: list[ObjectInfo], objects: Objects) -> Format:
    if spec.format != "auto":
        return cast(Format, spec.format)
    first = files[0]
    if (said := format_of(first.uri)) is not None:
        return cast(Format, said)
    with reading(first), open_text(objects, first) as file:
        head = file.read(6)
        if head.startswith(b"PAR1") or head == b"ARROW1":
            return "arrow" if head == b"ARROW1" else "parquet"
        file.seek(0)
        line = _first_line(file)
    if line is None and not first.uri.endswith(wanted_suffixes("jsonl")):
        raise InputError(
            f"{first.uri} is neither Parquet nor JSONL; if it is one of these or CSV, set "
            "input.format"
        )
    if line and "custom_id" in line and "body" in line:
        return cast(Format, format_of_url(line.get("url")))
    return "jsonl"


def _first_line(file: Any) -> dict[str, Any] | None:
    line = file.readline(BYTES_PER_BATCH)
    while line and not line.strip():
        line = file.readline(BYTES_PER_BATCH)
    try:
        value = orjson.loads(line.removeprefix(BOM))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
