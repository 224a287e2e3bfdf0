"""The published output of a job: parts in `data/`, and at the end `manifest.json`.

Columns of `data/part-00000.parquet` and so on, or fields of `data/part-00000.jsonl`, one row per
(input row, sample), in input order:

    id                 string   the row's id; null when the row had none that could be read
    row_index          int64    number of the input row, from 0
    sample_index       int32    0 to n - 1
    text               string   the completion; null for an error
    token_ids          list     the completion's token ids; null for a quarantined row
    finish_reason      string   stop, tool_calls, length, error or cancelled
    prompt_tokens      int32    tokens of the prompt
    completion_tokens  int32    tokens of the completion
    seed               int64    seed of this sample
    acceptance_rate    double   accepted ÷ proposed draft tokens; null when nothing was proposed
    cost_usd           double   what this completion cost
    verifier           string   the model whose output this is
    proposer           string   the draft model, if any, or what vLLM drafted with by itself
    error              string   "code: reason" of a quarantined row or failed completion, else null
    logprobs           list     the log-probability of each token; null if not asked for
    top_logprobs       list     the most likely tokens at each place: token_id, logprob
    numeric_class      string   the class in which the tokens were decided; null if unknown
    tool_calls         list     calls of functions: name, arguments (JSON text); null if none
    score              double   only with `output.best_by`: what it gave; null if nothing

A quarantined row has finish_reason "error", sample_index 0 and null in the columns that do not
apply. Nothing else is in `data/`, so that any reader of the format opens the folder. Beside it, for
OpenAI batch input, `output.jsonl` and `errors.jsonl` are written as well (`openai.py`). With
`output.malformed.then: quarantine` `malformed.jsonl` has the texts that are kept out of `data/`
(`quarantine.py`). Of a job that was stopped there is also `remainder-<job>.parquet` with all
unfinished rows, and the spec for them (`pipeline/stages/remainder.py`). `_specbatch_job.json` names
the job that owns the location; a location without `manifest.json` is not finished, and writing it
again is safe.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from specbatch.pipeline.outputs.names import (
    LISTED,
    MALFORMED,
    MANIFEST,
    MARKER,
    OPENAI,
    STAGING,
    around,
    is_part,
    is_read_as_data,
    owner_of,
    part_name,
    remainder_names,
    staged_name,
)
from specbatch.pipeline.outputs.openai import OpenAIFiles
from specbatch.pipeline.outputs.parts import (
    Columns,
    Kept,
    OutputRow,
    columns_of_job,
    read_part,
    write_part,
)
from specbatch.pipeline.outputs.quarantine import QuarantineFile
from specbatch.pipeline.storage.object_store import MOST_MOVED_BYTES, explained
from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.schemas import arrow
from specbatch.schemas.audit import DATA_FOLDER
from specbatch.schemas.crash_points import CrashPoint, reach
from specbatch.schemas.errors import ObjectError, OutputError
from specbatch.schemas.exports import WrittenFile
from specbatch.schemas.picks import ID as PICK
from specbatch.schemas.records import Artefact, CompletionRecord, RejectedRow
from specbatch.schemas.spec import OutputFormat
from specbatch.schemas.staging import PartClaim, PartPlace, StagedPart

ROWS_PER_PART = 50_000


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`. `rows` = `completions` + `rejected`."""

    job_id: str
    rows: int
    completions: int
    rejected: int
    parts: tuple[WrittenFile, ...]
    openai_files: tuple[WrittenFile, ...] = ()
    remainder: tuple[WrittenFile, ...] = ()  # a stopped job's remaining rows, and their spec
    quarantine: tuple[WrittenFile, ...] = ()  # malformed outputs, of a job that wants them apart
    info: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = arrow.SCHEMA_VERSION

    def to_json(self) -> bytes:
        values = asdict(self)
        if not self.quarantine:  # so that earlier versions can read it
            del values["quarantine"]
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        values = orjson.loads(data)
        for name in LISTED:
            values[name] = tuple(WrittenFile(**item) for item in values.get(name, ()))
        return cls(**values)


class OutputWriter:
    """Writes one job's output to one location."""

    def __init__(
        self,
        objects: Objects,
        output_uri: str,
        job_id: str,
        rows_per_part: int | None = None,
        kind: OutputFormat = "parquet",
        columns: Columns | None = None,
    ):
        """`columns`: those of a job, if none are given."""
        self._still_mine: Callable[[], None] = _unasked
        self._objects = objects
        self._uri = tidy(output_uri)
        self._job_id = job_id
        self.rows_per_part = rows_per_part or ROWS_PER_PART
        self._kind = kind
        self._own = columns or columns_of_job()
        self._usable: dict[int, Artefact] = {}  # the files of staged parts, by number

    def check(self, is_mine: Callable[[str], bool] | None = None) -> None:
        """Raise `OutputError` unless the location can be claimed. Leaves nothing behind.

        `is_mine` decides by id whether the job that holds it may.
        """
        try:
            owner = self._free_or_owner()
            if owner is not None and not (is_mine(owner) if is_mine else owner == self._job_id):
                raise self._taken(owner)
        except ObjectError as error:
            raise OutputError(f"output {self._uri} cannot be used: {error}") from error
        if "://" not in self._uri:
            check_writable(Path(self._uri))
            check_writable(Path(self._uri, DATA_FOLDER))

    def claim(self) -> None:
        """Claim the location for this job; an earlier claim of the same job is fine.

        Raises `OutputError` if another job's output is there, and `ObjectError` if the store
        refuses or is out of reach; then a retry may succeed.
        """
        owner = self._free_or_owner()
        if owner is None:
            marker = orjson.dumps({"job_id": self._job_id, "schema_version": arrow.SCHEMA_VERSION})
            self._objects.put_new(join(self._uri, MARKER), marker)
            owner = owner_of(self._objects, self._uri)
        if owner != self._job_id:
            raise self._taken(owner)

    def _free_or_owner(self) -> str | None:
        """The job that holds the location; None when it is free."""
        if not self._uri.startswith("s3://") and self._objects.exists(self._uri):
            raise OutputError(f"output {self._uri} is a file; name a folder")
        owner = owner_of(self._objects, self._uri)
        if owner is None:
            self._refuse_places_within_another()
            self._refuse_foreign_files()
        return owner

    def _refuse_places_within_another(self) -> None:
        """One job would delete the parts of the other, or who reads them would read both."""
        for place in around(self._uri):
            try:
                owner = owner_of(self._objects, place)
            except ObjectError as error:
                if error.passing:
                    raise
                continue  # who may not look there has no output there
            if owner is not None:
                raise OutputError(
                    f"output {self._uri} lies in the data of output {place}, which holds job "
                    f"{owner}: choose another location"
                )

    def _taken(self, owner: str | None) -> OutputError:
        if str(owner).startswith(PICK):
            return OutputError(
                f"output {self._uri} holds {owner}, which `specbatch pick` has for another spec or "
                "input: choose another location"
            )
        if self._objects.exists(join(self._uri, MANIFEST)):
            return OutputError(
                f"output {self._uri} holds job {owner}, which has ended: choose another location "
                f"for a new job, or do what that one left undone with `specbatch retry {owner}`"
            )
        return OutputError(
            f"output {self._uri} holds job {owner}: choose another location, or see with "
            f"`specbatch show {owner}` how to resume that job"
        )

    def write(
        self,
        completions: Iterable[CompletionRecord],
        rejected: Iterable[RejectedRow],
        *,
        openai: str | None = None,
        created: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        info: Mapping[str, Any] | None = None,
        beside: Sequence[tuple[Path, int]] = (),
        still_mine: Callable[[], None] | None = None,
        kept: Kept | None = None,
        quarantines: bool = False,
        commit: Callable[[Sequence[WrittenFile]], Mapping[str, Any]] | None = None,
        staged: Sequence[StagedPart] = (),
    ) -> Manifest:
        """Publish everything and return the manifest; both inputs must be in input order.

        `staged`: the first parts, as `usable` found them. Both inputs have the rows of their last
        place on: those of that place that they hold are skipped.

        `openai`, a format of `OPENAI_FORMATS`, adds its batch files, with `created` (seconds since
        the epoch) in them; `decode` turns tokens into text, only for their log-probabilities.
        `info` goes into the manifest unchanged. `beside` are local files of the remaining work,
        with their row counts; they move to the output. `still_mine` is called before each change.
        It raises if another worker publishes the job by now, whose finished files must stay
        untouched. `kept` adds columns of the input. `quarantines`: malformed texts go into a file
        of their own. `commit` is called with the parts, once all files are in place and the
        manifest is not; what it returns goes into the manifest. Raises `OutputError`,
        `ObjectError`, and what reading them raises.
        """
        self._still_mine = still_mine or _unasked
        self.claim()
        self._unfinish()
        with self._objects.temp_folder() as folder, explained("write", str(folder)):
            apart = QuarantineFile(folder) if quarantines else None
            taken = apart.watching(completions) if apart else completions
            inputs: list[Iterable[OutputRow]] = [taken, rejected]
            rows = _merged(inputs, staged[-1].then.skip if staged else 0)
            extra = OpenAIFiles(folder, self._job_id, created, decode, openai) if openai else None
            counts = _counts(staged)
            counted = _counted(extra.watching(rows) if extra else rows, counts)
            moved = [self._take(part) for part in staged]
            parts = (*moved, *self._write_parts(counted, folder, kept, len(staged)))
            files = self._publish_all(extra.finish() if extra else ())
            malformed = self._publish_all(apart.finish() if apart else ())
        remainder = self._publish_all(beside)
        self._still_mine()
        self._delete_leftovers({file.name for file in (*parts, *remainder)}, bool(staged))
        if quarantines and not malformed:  # as an earlier attempt found some
            self._objects.delete(join(self._uri, MALFORMED))
        said = {**(info or {}), **(commit(parts) if commit else {})}
        manifest = Manifest(
            self._job_id, counts.total(), counts[CompletionRecord], counts[RejectedRow],
            parts, files, remainder, malformed, said,
        )  # fmt: skip
        reach(CrashPoint.MANIFEST)
        self._still_mine()
        self._objects.put_bytes(join(self._uri, MANIFEST), manifest.to_json())
        return manifest

    def _unfinish(self) -> None:
        """Remove the manifest of an earlier publication, and no other one.

        A manifest that exists while the job is still ours is an earlier one. If this process is
        frozen after that check, it later finds another version and removes nothing.
        """
        uri = join(self._uri, MANIFEST)
        earlier = self._objects.head(uri)
        self._still_mine()
        if earlier is not None and self._objects.head(uri) == earlier:
            self._objects.delete(uri)

    # --- parts that are written while the job runs ------------------------------------------
    def stage(
        self,
        claim: PartClaim,
        completions: Iterable[CompletionRecord],
        rejected: Iterable[RejectedRow],
        still_mine: Callable[[], None],
    ) -> StagedPart | None:
        """Write a claimed part, whose rows are there, to the staging folder. Both inputs begin with
        the row of its place. None if it is too large to be moved later. Raises as `write` does."""
        self.claim()
        with self._objects.temp_folder() as folder, explained("write", str(folder)):
            path, counts, place = folder / "part", Counter[type](), _Place(claim.place)
            rows = place.watching(_merged([completions, rejected], claim.place.skip))
            counted = _counted(islice(rows, self.rows_per_part), counts)
            count = write_part(path, counted, self._kind, None, self._own)
            if path.stat().st_size > MOST_MOVED_BYTES:
                return None
            reach(CrashPoint.UPLOAD)
            still_mine()
            made = self._objects.put_file(self._staged_uri(claim.place.number, claim.token), path)
        return StagedPart(
            claim.place.number, claim.token, arrow.SCHEMA_VERSION, count, counts[RejectedRow],
            made.size_bytes, made.sha256, place.then(),
        )  # fmt: skip

    def forget(self, claim: PartClaim) -> None:
        """Delete the file of a part that was staged and could not be noted."""
        self._objects.delete(self._staged_uri(claim.place.number, claim.token))

    def usable(self, noted: Iterable[StagedPart]) -> list[StagedPart]:
        """The noted parts up to the first that is damaged or gone, or is not what `write` makes: it
        has another number of rows, or another version's columns."""
        found: list[StagedPart] = []
        for part in noted:
            alike = part.rows == self.rows_per_part and part.schema_version == arrow.SCHEMA_VERSION
            artefact = self._where(part) if alike else None
            if artefact is None:
                break
            self._usable[part.number] = artefact
            found.append(part)
        return found

    def _where(self, part: StagedPart) -> Artefact | None:
        """A noted part's file: staged, or at its place since a publication that was killed."""
        uris = (self._staged_uri(part.number, part.token), self._part_uri(part))
        found = (Artefact(uri, part.sha256, part.size_bytes) for uri in uris)
        return next(filter(self._objects.is_whole, found), None)

    def _take(self, part: StagedPart) -> WrittenFile:
        """Move a usable part to its place."""
        reach(CrashPoint.UPLOAD)
        self._still_mine()
        artefact, uri = self._usable[part.number], self._part_uri(part)
        if artefact.uri != uri:
            self._objects.move(artefact, uri)
        name = part_name(part.number, self._kind)
        return WrittenFile(name, part.rows, part.size_bytes, part.sha256)

    def _part_uri(self, part: StagedPart) -> str:
        return join(self._uri, part_name(part.number, self._kind))

    def _staged_uri(self, number: int, token: str) -> str:
        return join(self._uri, staged_name(number, token, self._kind))

    # --- files ------------------------------------------------------------------------------
    def _write_parts(
        self, rows: Iterator[OutputRow], folder: Path, kept: Kept | None, number: int
    ) -> Iterator[WrittenFile]:
        """Write parts from this number on: at least one in all, so that an empty output can be
        read too."""
        first = next(rows, None)
        while first is not None or number == 0:
            rest = islice(rows, self.rows_per_part - 1)
            path, name = folder / "part", part_name(number, self._kind)
            given = chain([first], rest) if first is not None else iter(())
            yield self._publish(path, name, write_part(path, given, self._kind, kept, self._own))
            number, first = number + 1, next(rows, None)

    def _publish_all(self, files: Iterable[tuple[Path, int]]) -> tuple[WrittenFile, ...]:
        return tuple(self._publish(path, path.name, count) for path, count in files)

    def _publish(self, path: Path, name: str, rows: int) -> WrittenFile:
        reach(CrashPoint.UPLOAD)
        self._still_mine()
        # A temporary file of a killed process must not be where readers look for parts.
        artefact = self._objects.put_file(join(self._uri, name), path, staging=self._uri)
        path.unlink()
        return WrittenFile(name, rows, artefact.size_bytes, artefact.sha256)

    def _delete_leftovers(self, keep: set[str], were_staged: bool) -> None:
        """Delete surplus parts and other files of an earlier attempt of this job, and the staging
        folder."""
        names = self._names()
        if were_staged or any(name.startswith(f"{STAGING}/") for name in names):
            self._objects.clear(join(self._uri, STAGING))
        else:
            self._objects.abort_uploads(join(self._uri, STAGING))
        parts = set(filter(is_part, names))
        for name in (parts | remainder_names(self._job_id)) - keep:
            self._objects.delete(join(self._uri, name))

    def _refuse_foreign_files(self) -> None:
        reserved, names = (MANIFEST, *OPENAI, MALFORMED), self._names()
        for name in names:
            if name.startswith(f"{DATA_FOLDER}/") and name.endswith(f"/{MARKER}"):
                raise OutputError(
                    f"the data of output {self._uri} would be where another job has its output: "
                    f"{join(self._uri, name)} says so; choose another location"
                )
        taken = [n for n in names if n in reserved or is_part(n) or is_read_as_data(n)]
        if taken:
            raise OutputError(
                f"output {self._uri} already holds {min(taken)}, not written by this job; "
                "choose another location or remove it"
            )

    def _names(self) -> list[str]:
        root = self._uri.rstrip("/") + "/"
        return [info.uri.removeprefix(root) for info in self._objects.list(root)]


def _unasked() -> None:
    """The default of `still_mine`: no other worker can publish the job."""


def check_writable(folder: Path) -> None:
    """Check a folder by creating its missing parts and removing them again."""
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


def read_output(uri: str, objects: Objects | None = None, job_id: str | None = None) -> pa.Table:
    """A finished output as one table. Raises `OutputError` if it is not finished, or not that of
    `job_id`, and `ObjectError` if a part is damaged."""
    objects = objects or Objects()
    manifest = read_manifest(uri, objects)
    if job_id not in (None, manifest.job_id):
        raise OutputError(f"{uri} holds the output of job {manifest.job_id} now, not of {job_id}")
    tables = []
    for part in manifest.parts:
        expect = Artefact(join(uri, part.name), part.sha256, part.size_bytes)
        tables.append(read_part(objects.get_bytes(expect.uri, expect), part.name))
    return pa.concat_tables(tables, promote_options="permissive")


def read_manifest(uri: str, objects: Objects | None = None) -> Manifest:
    """The manifest of a finished output. Raises `OutputError` if there is none."""
    objects = objects or Objects()
    path = join(uri, MANIFEST)
    if not objects.exists(path):
        raise OutputError(f"output {uri} has no {MANIFEST}: its job has not finished")
    return Manifest.from_json(objects.get_bytes(path))


def _merged(inputs: Iterable[Iterable[OutputRow]], skip: int) -> Iterator[OutputRow]:
    """All rows in input order, without the first ones."""
    return islice(heapq.merge(*inputs, key=attrgetter("row_index")), skip, None)


def _counts(staged: Iterable[StagedPart]) -> Counter[type]:
    """Rows of staged parts, by kind."""
    rejected, rows = sum(part.rejected for part in staged), sum(part.rows for part in staged)
    return Counter({CompletionRecord: rows - rejected, RejectedRow: rejected})


class _Place:
    """Where the rows that went by end."""

    def __init__(self, begin: PartPlace) -> None:
        self._begin = begin
        self._row_index, self._skip = begin.row_index, begin.skip

    def watching(self, rows: Iterable[OutputRow]) -> Iterator[OutputRow]:
        for row in rows:
            is_same = row.row_index == self._row_index
            self._row_index, self._skip = row.row_index, self._skip + 1 if is_same else 1
            yield row

    def then(self) -> PartPlace:
        """Where the next part begins."""
        return PartPlace(self._begin.number + 1, self._row_index, self._skip)


def _counted(rows: Iterable[OutputRow], counts: Counter[type]) -> Iterator[OutputRow]:
    """Pass rows through and count both kinds."""
    for row in rows:
        counts[type(row)] += 1
        yield row
