"""Everything that can be wrong with a job, found before anything is stored or started.

Needs the engine extra. The parts are those the stages themselves work with, so what passes here
passes there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from specbatch.pipeline.bootstrap import require_engine_extra
from specbatch.schemas.errors import InputError, JobNotFoundError, ObjectError, OutputError
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

MARKER = "_specbatch_job.json"  # in an output: names the job it belongs to
_NOBODY = "-"

KeyOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Checked:
    """The input of a job that can be done, and what checks its rows."""

    source: Any
    checker: Any
    context_tokens: int


def check_job(
    settings: Settings, spec: JobSpec, key: str | None = None, key_of: KeyOf | None = None
) -> Checked:
    """Raise a `UsageError` naming what is wrong with the models, the input or the output.

    An output that belongs to a job is refused, unless `key_of` says that job has this very `key`.
    """
    require_engine_extra()
    from specbatch.pipeline.stages import (  # type: ignore[attr-defined]  # the stages' own parts
        Objects,
        RowChecker,
        TextCodec,
        check_pair,
        inspect_model,
        open_source,
    )

    objects = Objects(settings.s3_endpoint_url)
    verifier = inspect_model(spec.verifier)
    if spec.proposer:
        check_pair(verifier, inspect_model(spec.proposer))
    codec = TextCodec.load(str(verifier.path))
    try:
        source = open_source(spec.input, objects)
        source.check()
    except ObjectError as error:
        raise InputError(str(error)) from None
    check_output(settings, spec.output.uri, key, key_of)
    checker = RowChecker(spec, codec, verifier.context_tokens, verifier.vocab_size)
    return Checked(source, checker, verifier.context_tokens)


def check_output(
    settings: Settings, uri: str, key: str | None = None, key_of: KeyOf | None = None
) -> None:
    """Raise `OutputError` when the location is taken or cannot be written. Writes nothing."""
    from specbatch.pipeline.stages import (  # type: ignore[attr-defined]  # the stages' own parts
        Objects,
        OutputWriter,
        join,
    )

    class Rehearsal(Objects):
        """Objects to which the claim of an output only seems to be written."""

        claimed: bytes | None = None

        def put_new(self, uri: str, data: bytes) -> bool:  # noqa: ARG002 - the real one needs it
            self.claimed = data
            return True

        def exists(self, uri: str) -> bool:
            return self._is_claim(uri) or bool(super().exists(uri))

        def get_bytes(self, uri: str, expect: Any = None) -> bytes:
            return self.claimed or b"" if self._is_claim(uri) else super().get_bytes(uri, expect)

        def _is_claim(self, uri: str) -> bool:
            return self.claimed is not None and uri.endswith(MARKER)

    objects = Rehearsal(settings.s3_endpoint_url)
    marker = join(uri, MARKER)
    try:
        owner = _owner(objects.get_bytes(marker)) if objects.exists(marker) else _NOBODY
    except ObjectError as error:
        raise OutputError(f"output {uri} cannot be used: {error}") from None
    mine = key is not None and key_of is not None and key_of(owner) == key
    OutputWriter(objects, uri, owner if mine else _NOBODY).claim()
    if "://" not in uri:
        _check_writable(Path(uri))


def key_in(get_job: Callable[[str], Any]) -> KeyOf:
    """The idempotency key of a job in a store that may not know it."""

    def key_of(job_id: str) -> str | None:
        try:
            key: str | None = get_job(job_id).idempotency_key
        except JobNotFoundError:
            return None
        return key

    return key_of


def _owner(marker: bytes) -> str:
    try:
        return str(orjson.loads(marker)["job_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return _NOBODY  # the claim says what is wrong with it


def _check_writable(folder: Path) -> None:
    """Make the missing folders, and remove them again."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"output {folder} cannot be written: {there} is not a writable folder")
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
    except OSError as error:
        raise OutputError(f"output {folder} cannot be made: {error.strerror}") from None
    finally:
        for path in reversed(made):
            path.rmdir()
