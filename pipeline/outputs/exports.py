"""Writes exported sets as Parquet: one file, or numbered parts and then a manifest.

A file is written to a local temporary folder, uploaded under its final name in one piece, and
compared there by size and SHA-256, so a file that exists is complete. In a folder
`<set>-manifest.json` lists the parts `<set>/<set>-00000.parquet` and so on. It is written last:
without it an export is not finished. Nothing but the parts is in `<set>/`, so that any reader of
Parquet opens it. Equal batches give equal bytes, because the files contain nothing that differs
between runs.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.outputs.outputs import check_writable
from specbatch.pipeline.storage.object_store import explained
from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.schemas.errors import ObjectError, OutputError
from specbatch.schemas.export_arrow import SCHEMA_VERSION
from specbatch.schemas.exports import ExportKind, WrittenFile

SUFFIX = ".parquet"
ROW_GROUP_BYTES = 16 << 20  # in memory, before compression
PART_BYTES = 256 << 20  # of a file among several

Batches = Iterator[pa.RecordBatch]


class ExportWriter:
    """Writes one set to one place. `to` is a file if it ends in `.parquet`, else a folder."""

    def __init__(
        self,
        objects: Objects,
        to: str,
        kind: ExportKind,
        overwrite: bool = False,
        part_bytes: int = PART_BYTES,
        row_group_bytes: int = ROW_GROUP_BYTES,
    ) -> None:
        self._objects = objects
        self._to = tidy(to)
        self._kind = kind
        self._overwrite = overwrite
        self._row_group_bytes = row_group_bytes
        self._folder, self._name = _split(self._to)
        self._part_bytes = part_bytes if self._name is None else None

    def check(self, objects: Objects | None = None) -> None:
        """Raise `OutputError` unless the place can be written and is free. Changes nothing.

        `objects` replaces the writer's own for the check; it may have less patience.
        """
        objects = objects or self._objects
        local, is_file = "://" not in self._to, self._name is not None
        if local and is_file and Path(self._to).is_dir():
            raise OutputError(f"export {self._to} is a folder; name a file, or a folder like `out`")
        if local and not is_file and Path(self._to).is_file():
            raise OutputError(
                f"export {self._to} is a file; name a folder, or a file ending in .parquet"
            )
        try:
            found, strays = self._existing(objects), self._strays(objects)
        except ObjectError as error:
            raise OutputError(f"export {self._to} cannot be used: {error}") from error
        if found and not self._overwrite:
            raise OutputError(
                f"{join(self._folder, min(found))} exists already; choose another name, or "
                "replace it with --overwrite"
            )
        if strays:
            raise OutputError(
                f"{join(self._folder, min(strays))} is not of such an export, and would be read as "
                "part of it; remove it, or choose another name"
            )
        if local:
            check_writable(Path(self._folder))
            if not is_file:
                check_writable(Path(self._folder, self._kind))

    def write(
        self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], about: Mapping[str, str]
    ) -> tuple[WrittenFile, ...]:
        """Write all batches, at least one file. `about` goes into each file and the manifest.

        Raises `OutputError` and `ObjectError`.
        """
        self.check()
        schema = schema.with_metadata({"specbatch_export_version": str(SCHEMA_VERSION), **about})
        with self._objects.temp_folder() as folder, explained("write", str(folder)):
            if self._name is not None:
                (file,) = self._parts(schema, iter(batches), folder)
                return (file,)
            self._unfinish()
            files = tuple(self._parts(schema, iter(batches), folder))
        self._finish(files, about)
        return files

    def _unfinish(self) -> None:
        if self._manifest in self._existing(self._objects):
            self._objects.delete(join(self._folder, self._manifest))

    def _finish(self, files: tuple[WrittenFile, ...], about: Mapping[str, str]) -> None:
        """Remove surplus parts of an earlier export, then write the manifest."""
        for name in self._existing(self._objects) - {file.name for file in files}:
            self._objects.delete(join(self._folder, name))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": self._kind.value,
            "about": dict(about),
            "rows": sum(file.rows for file in files),
            "files": [asdict(file) for file in files],
        }
        options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
        self._objects.put_bytes(
            join(self._folder, self._manifest), orjson.dumps(manifest, option=options)
        )

    @property
    def _manifest(self) -> str:
        return f"{self._kind}-manifest.json"

    def _existing(self, objects: Objects) -> set[str]:
        """Names that this export would replace. Earlier versions had no folder for the parts."""
        if self._name is not None:
            return {name for name in self._beside(objects) if name == self._name}
        own = rf"{self._kind}-manifest\.json|({self._kind}/)?{self._kind}-\d{{5}}\.parquet"
        names = [*self._beside(objects), *self._in_set(objects)]
        return {name for name in names if re.fullmatch(own, name)}

    def _strays(self, objects: Objects) -> set[str]:
        """Names in the folder of the parts that are none of an export, except hidden ones."""
        if self._name is not None:
            return set()
        names = set(self._in_set(objects)) - self._existing(objects)
        return {name for name in names if not name.rpartition("/")[2].startswith((".", "_"))}

    def _beside(self, objects: Objects) -> list[str]:
        if "://" not in self._folder:
            with explained("look at", self._folder):
                folder = Path(self._folder)
                return [path.name for path in folder.iterdir()] if folder.is_dir() else []
        # A listing also reports a missing bucket.
        return self._listed(objects, self._name or f"{self._kind}-")

    def _in_set(self, objects: Objects) -> list[str]:
        return self._listed(objects, f"{self._kind}/")

    def _listed(self, objects: Objects, prefix: str) -> list[str]:
        found = objects.list(join(self._folder, prefix))
        return [info.uri.removeprefix(join(self._folder, "")) for info in found]

    def _parts(self, schema: pa.Schema, batches: Batches, folder: Path) -> Iterator[WrittenFile]:
        """Yield each part as soon as it is complete, at least one."""
        number, first = 0, next(batches, None)
        while first is not None or number == 0:
            name = self._name or f"{self._kind}/{self._kind}-{number:05d}{SUFFIX}"
            path = folder / "part"
            with _Part(path, schema, self._row_group_bytes) as part:
                while first is not None:
                    part.add(first)
                    first = next(batches, None)
                    if self._part_bytes is not None and part.size_bytes >= self._part_bytes:
                        break
            yield self._publish(path, name, part)
            number += 1

    def _publish(self, path: Path, name: str, part: _Part) -> WrittenFile:
        """Upload a part under its own name and check what arrived."""
        uri = join(self._folder, name)
        if not self._overwrite and self._objects.exists(uri):
            raise OutputError(f"{uri} was written by another process meanwhile; it is left alone")
        artefact = self._objects.put_file(uri, path, staging=self._folder)
        found = self._objects.head(uri)
        meant = (part.size_bytes, part.sha256)
        if found is None or (found.size, artefact.sha256) != meant:
            self._objects.delete(uri)
            raise ObjectError(
                f"{uri} did not arrive whole (size or SHA-256 differ after the upload); it was "
                "deleted, try again"
            )
        path.unlink()
        return WrittenFile(name, part.rows, artefact.size_bytes, artefact.sha256)


def _split(to: str) -> tuple[str, str | None]:
    """The folder or prefix, and the file's name for a single file."""
    if not to.endswith(SUFFIX):
        return to, None
    if "://" not in to:
        return str(Path(to).parent), Path(to).name
    folder, _, name = to.rpartition("/")
    return (to, None) if folder.endswith(":/") else (folder, name)  # a bucket may be called so


class _Part:
    """One local Parquet file being written. A context manager that closes the file."""

    def __init__(self, path: Path, schema: pa.Schema, row_group_bytes: int) -> None:
        self.rows = 0
        self._row_group_bytes = row_group_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._schema = schema
        self._sink = _Sink(path)
        self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd")

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._sink:
            try:
                if kind is None and self._waiting:
                    self._flush()
            finally:
                try:
                    self._writer.close()
                finally:
                    self._writer.is_open = False  # else the garbage collector closes it again

    @property
    def size_bytes(self) -> int:
        return self._sink.size_bytes

    @property
    def sha256(self) -> str:
        return self._sink.digest.hexdigest()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch; batches are gathered into row groups."""
        self.rows += batch.num_rows
        self._waiting.append(batch)
        if sum(waiting.nbytes for waiting in self._waiting) >= self._row_group_bytes:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._waiting).replace_schema_metadata(self._schema.metadata)
        self._waiting = []
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)


class _Sink(io.BufferedWriter):
    """A file that counts and hashes the bytes written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size_bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size_bytes += len(data)
        return super().write(data)
