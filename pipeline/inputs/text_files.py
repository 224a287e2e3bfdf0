"""Opens text files, compressed with gzip or not, and names what is wrong with one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from specbatch.pipeline.inputs.contract import as_input_error, changed_since
from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects, is_unchanged
from specbatch.schemas.errors import InputError, ObjectError

GZIP = ".gz"
BOM = b"\xef\xbb\xbf"


class _Unzipped(gzip.GzipFile):
    """The text of a gzip file. Offsets count its own bytes; a seek reads up to there."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def open_text(objects: Objects, info: ObjectInfo) -> BinaryIO:
    """A reader of a file's text at its version. Raises `InputError`, and `ObjectError` if the store
    may answer later."""
    try:
        file = objects.open(info.uri, info.version)
    except ObjectError as error:
        raise as_input_error(error) from error
    return cast(BinaryIO, _Unzipped(file)) if info.uri.endswith(GZIP) else file


@contextmanager
def reading(info: ObjectInfo) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an `InputError` that names the file, or an
    `ObjectError` if it passes."""
    try:
        yield
    except ObjectError as error:
        raise as_input_error(error) from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(
            f"{info.uri} is truncated or not gzip; write it again, or leave it out"
        ) from error
    except OSError as error:
        raise InputError(f"{info.uri} cannot be read: {error.strerror}") from error


def check_unchanged(file: BinaryIO, info: ObjectInfo) -> None:
    """Raise `InputError` if the file was written to meanwhile: offsets would belong to other rows,
    and rows would be lost or cut in half."""
    if not is_unchanged(file, info):
        raise changed_since(info.uri)
