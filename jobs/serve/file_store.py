"""The service's folder: uploads on their way, files by id, outputs by batch.

A path is made of an id that is ours, checked against the form of ids. Nothing else that a client
sends becomes one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specbatch.jobs.serve.errors import unknown
from specbatch.pipeline.storage.objects import sync_folder
from specbatch.schemas.errors import UsageError
from specbatch.schemas.file_modes import Access, make_folder, new_file

FILE, BATCH = "file-", "batch_"
_TAIL = r"[0-9a-f]{31}"
_FORMS = {FILE: re.compile(f"file-{_TAIL}"), BATCH: re.compile(f"batch_{_TAIL}")}
_MARK = ".pending"  # ends the name of an empty file, or of one that names a copy
_NAMES = {FILE: "file", BATCH: "batch"}


@dataclass(frozen=True, slots=True)
class FileStore:
    """The folders below `root`."""

    root: Path
    access: Access = Access.PRIVATE

    def make(self) -> None:
        """Also its id, which is made once and stays."""
        for folder in (self.uploads, self.files, self.outputs):
            make_folder(folder, self.access)
        if not self._id_file.exists():
            temporary = self._id_file.with_suffix(f".{secrets.token_hex(4)}")
            with new_file(temporary, self.access) as file:
                file.write(secrets.token_hex(16).encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._id_file)
            sync_folder(self._id_file.parent)

    @property
    def service_id(self) -> str:
        """Whose batches and files are this folder's: several services may share a store."""
        return self._id_file.read_text()

    @property
    def _id_file(self) -> Path:
        return self.root / "serve" / "id"

    @property
    def uploads(self) -> Path:
        return self.root / "serve" / "uploads"

    @property
    def files(self) -> Path:
        return self.root / "serve" / "files"

    @property
    def outputs(self) -> Path:
        return self.root / "serve" / "outputs"

    def path_of(self, file_id: str) -> Path:
        return self.files / f"{checked(FILE, file_id)}.jsonl"

    def output_of(self, batch_id: str) -> Path:
        return self.outputs / checked(BATCH, batch_id)

    def keep(self, upload: Path, file_id: str) -> None:
        """Put a whole, synced file in its place; it survives a crash from now on."""
        place = self.path_of(file_id)
        upload.rename(place)
        sync_folder(place.parent)

    def remove(self, file_id: str, copy: Path | None = None) -> None:
        """And its copy, if any, and then its mark."""
        self.path_of(file_id).unlink(missing_ok=True)
        if copy is not None:
            copy.unlink(missing_ok=True)
        self.unmark(file_id)

    def mark(self, file_id: str, copy: Path | None = None) -> None:
        """Say that this file is being added or deleted, before it or its row changes: what is cut
        off then is finished by `finish_changes`. `copy`: goes with it, below `outputs`."""
        self.unmark(file_id)  # of a change that failed
        with new_file(self._mark_of(file_id), self.access) as file:
            file.write(b"" if copy is None else os.fsencode(copy.relative_to(self.outputs)))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.uploads)

    def unmark(self, file_id: str) -> None:
        """The file and its row are there, or neither is."""
        self._mark_of(file_id).unlink(missing_ok=True)

    def _mark_of(self, file_id: str) -> Path:
        return self.uploads / f"{checked(FILE, file_id)}{_MARK}"

    def _marked(self) -> list[str]:
        return [path.stem for path in self.uploads.glob(f"*{_MARK}")]

    def finish_changes(self, known: Collection[str]) -> None:
        """Delete marked files without a row: a crash cut their adding or their deletion off.
        `known` as in `check_store`, which comes first."""
        for file_id in self._marked():
            if file_id in known:
                self.unmark(file_id)
                continue
            copy = os.fsdecode(self._mark_of(file_id).read_bytes())
            self.remove(file_id, self.outputs / copy if copy else None)

    def sweep(self) -> int:
        """Delete uploads that a crash cut off; nothing may upload meanwhile. Returns how many there
        were. A file without a row and a mark stays: it may be another store's."""
        left = list(self.uploads.iterdir())
        for path in left:
            with suppress(FileNotFoundError):
                path.unlink()
        return len(left)

    def check_store(self, known: Collection[str]) -> None:
        """Raise `UsageError` where there are files without a mark and the store knows none.
        `known`: the ids of those that it has of this service."""
        there = {path.stem for path in self.files.iterdir()}.difference(self._marked())
        if there and not known:
            raise UsageError(
                f"the store knows none of the {len(there):,} files in {self.files}: start with the "
                "store that they belong to, or move them elsewhere"
            )


def checked(prefix: str, given: str) -> str:
    """The id, which has the form of ours. Raises `ApiError`: there is none."""
    if _FORMS[prefix].fullmatch(given) is None:
        raise unknown(_NAMES[prefix], given)
    return given
