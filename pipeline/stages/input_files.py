"""The files of a job's input: listed as it begins to read, and the same ones ever after.

A file that comes into a folder later is the next job's. Else it would depend on whether a worker
was restarted which files a job reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import orjson

from specbatch.pipeline.inputs.contract import (
    INPUT_FILES,
    Source,
    changed_since,
    check_same_files,
    files_digest,
    gone_since,
)
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.stages.context import StageContext
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import tidy
from specbatch.pipeline.storage.workspace import put_own, read_own
from specbatch.schemas.records import Artefact, JobRow
from specbatch.schemas.spec import InputSpec

_LIST = "input_list"  # in the report: the file with the list


def keep_files(
    context: StageContext, job: JobRow, given: InputSpec, files: list[ObjectInfo]
) -> dict[str, Any]:
    """What the job's report keeps of its files: their digest, and where the list of a folder is.

    Raises `UsageError` and `ObjectError`.
    """
    digest = files_digest(files)
    if [info.uri for info in files] == [tidy(given.uri)]:
        return {INPUT_FILES: digest}
    data = orjson.dumps([(info.uri, info.version) for info in files])
    artefact = put_own(context.objects, job, f"input-files-{digest[:16]}.json", data)
    return {INPUT_FILES: digest, _LIST: asdict(artefact)}


def open_kept(context: StageContext, job: JobRow, given: InputSpec) -> Source:
    """The input, of which the report names the files. Raises `InputError` if one of them changed
    or is gone, and `ObjectError`."""
    source = open_source(given, context.objects, context.reader_bytes, _those_kept(context, job))
    check_same_files(source.files, job.report)
    return source


def _those_kept(
    context: StageContext, job: JobRow
) -> Callable[[list[ObjectInfo]], list[ObjectInfo]]:
    if (kept := job.report.get(_LIST)) is None:  # a file, or a job of an earlier version
        return list
    listed = orjson.loads(read_own(context.objects, job, Artefact(**kept)))

    def those(files: list[ObjectInfo]) -> list[ObjectInfo]:
        there = {info.uri: info for info in files}
        for uri, version in listed:
            if uri not in there:
                raise gone_since(uri)
            if there[uri].version != version:
                raise changed_since(uri)
        return [there[uri] for uri, _ in listed]

    return those
