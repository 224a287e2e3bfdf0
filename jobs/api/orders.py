"""What a call asks for, made ready: the data where the job reads it, the spec, the key.

A frame becomes a Parquet file in the workspace, in a folder named by what the file and the spec
hold. So the same call finds the job that an interrupted one left, and resumes it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from specbatch.jobs.api.frames import (
    check_frame,
    check_kept,
    columns_for,
    library_of,
    parquet_of,
)
from specbatch.jobs.api.options import Asked, Place, spec_of
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.storage.objects import Objects, join
from specbatch.pipeline.storage.workspace import frame_file
from specbatch.schemas.errors import SpecError
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

OUTPUT_NAME = "output"  # beside a frame's file
_DIGITS = 24  # of a digest that names a folder
_LATER = "frame://later"  # stands for the folder, which the spec's own digest names


@dataclass(frozen=True, slots=True)
class Order:
    """A job to submit. `frame_file`: the Parquet file that was written for it, if one was."""

    spec: JobSpec
    key: str
    frame_file: str | None = None


class Request:
    """The data, the output and the options of one call.

    Making it checks all that needs no server, no model and no pyarrow. Raises `SpecError` and
    `InputError`. `whole`: a frame's columns are all written, for others to read them.
    """

    def __init__(self, data: Any, output: Place | None, asked: Asked, whole: bool) -> None:
        self.data = data
        self.library = None if data is None else library_of(data)
        self._output = None if output is None else os.fspath(output)
        self.whole = whole
        if self.library is None:
            self._asked = asked
            self._check_places()
            self.spec = self._spec_of_path()
            return
        self._asked = self._of_frame(asked)
        self.spec = self._spec_of_frame(frame_file(_LATER, "later"))
        if self.spec.input.format not in ("auto", "parquet"):
            raise SpecError(f"format {self.spec.input.format} is for files, and data is a frame")
        check_frame(data, self.spec.input)

    def _check_places(self) -> None:
        if self._asked.spec is not None:
            return
        if self.data is None:
            raise SpecError("no data is given: name a frame or a path, or spec= with an input")
        if self._output is None:
            raise SpecError("output= is missing: the folder or s3:// prefix for the completions")

    def _of_frame(self, asked: Asked) -> Asked:
        if self.whole:
            if "keep_columns" in asked.fields or spec_of(asked, _LATER, _LATER).output.keep_columns:
                return asked
            return replace(asked, fields={**asked.fields, "keep_columns": "all"})
        for name in ("keep_columns", "output_format"):
            if name in asked.fields:
                raise SpecError(
                    f"{name} is for jobs with output=; without it a frame comes back, and has all "
                    "of its columns"
                )
        own = {"keep_columns": [], "output_format": "parquet"}  # whatever a spec file says
        return replace(asked, fields={**asked.fields, **own})

    def _spec_of_path(self) -> JobSpec:
        given = None if self.data is None else os.fspath(self.data)
        return spec_of(self._asked, given, self._output)

    def _spec_of_frame(self, file: str) -> JobSpec:
        output = self._output or join(file.rpartition("/")[0], OUTPUT_NAME)
        return spec_of(self._asked, file, output)

    def order(self, c: Client, settings: Settings, objects: Objects, key: str | None) -> Order:
        """Write a frame's file, and choose the key unless the caller did.

        It is that of the unfinished job which the same call made before, else a new one. Raises
        `InputError`, and `ObjectError` where the workspace cannot be written.
        """
        data = b"" if self.library is None else self._parquet(self.library)
        said = _digest(data + self.spec.digest().encode())
        if key is not None:
            order = self._placed(settings, f"{said}-{_digest(key.encode())}", key)
        else:
            order = self._unfinished(c, settings, said)
        if order.frame_file is not None:
            objects.put_new(order.frame_file, data)  # a job that reads it must not see it change
        return order

    def _unfinished(self, c: Client, settings: Settings, said: str) -> Order:
        for number in count(1):
            order = self._placed(settings, f"{said}-{number}", f"python/{said}-{number}")
            job = c.find(order.spec.tenant, order.key)
            if job is None or not job.state.is_final:
                return order
        raise AssertionError("numbers do not end")

    def _parquet(self, library: str) -> bytes:
        check_kept(self.data, self.spec)
        columns = None if self.whole else columns_for(self.data, self.spec.input)
        return parquet_of(self.data, library, columns)

    def _placed(self, settings: Settings, name: str, key: str) -> Order:
        if self.library is None:
            return Order(self.spec, key)
        file = frame_file(settings.workspace, name)
        return Order(self._spec_of_frame(file), key, file)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
