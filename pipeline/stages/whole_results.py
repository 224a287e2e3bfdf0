"""A job's results in full, from its own files: of private jobs the store does not keep the texts,
of others not those that wait for a review.

    results-<attempt>.arrow  of a group that was verified; the store names it
    kept-<attempt>.arrow     finished when the job was stopped; its report names it
    rejected-<row>.json      quarantined rows with ids and reasons, from that row on

The store has everything else.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.moderation.outcome import published_as
from specbatch.pipeline.stages.moderation import forms_of, is_for_review, with_rulings
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.stages.texts import with_text
from specbatch.pipeline.storage.artefacts import (
    Rulings,
    read_results,
    write_results,
)
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import reader
from specbatch.pipeline.storage.workspace import name_of_attempt, put_own, read_own, read_own_named
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.mapper import as_kept, without_details
from specbatch.schemas.policies import HeldBack, Place, Ruling
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    JobRow,
    Lease,
    PromptRow,
    Prompts,
    RejectedRow,
)
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

_KEPT = re.compile(r"kept-(\d+)-\d+")  # of a job's report: the artefact
_REJECTED = re.compile(r"rejected-\d{12}\.json")


def put_rejected(objects: Objects, job: JobRow, rows: Sequence[RejectedRow]) -> None:
    """Write quarantined rows of one planned group; a group planned again has the same ones."""
    if rows:
        data = orjson.dumps([asdict(row) for row in rows])
        put_own(objects, job, f"rejected-{rows[0].row_index:012d}.json", data)


def put_kept(
    objects: Objects,
    job: JobRow,
    lease: Lease,
    records: Sequence[CompletionRecord],
    rulings: Rulings,
) -> dict[str, Any]:
    """Write what is finished of a group that was stopped; returns its entry in the job's report.

    The store has all of it, unless the texts are private or a policy holds some back for review.
    """
    needed = not job.privacy.is_full or any(map(is_for_review, rulings.values()))
    if not needed or not records:
        return {}
    name = f"kept-{lease.group_index}-{lease.token}"
    file, data = name_of_attempt("kept", lease), write_results(records, rulings=rulings)
    return {name: asdict(put_own(objects, job, file, data))}


def recorded(
    store: Store, objects: Objects, job: JobRow, spec: JobSpec, decode: Decode
) -> Iterator[CompletionRecord]:
    """All completions by (row, sample) as they are published, like `Store.completions`.

    A few groups in memory at a time. Raises `ObjectError` when a file is gone.
    """
    files = _Files(objects, job, spec, decode)
    for group in store.recorded_groups(job.job_id):
        for done in with_rulings(*files.read(*group), job, spec):
            yield done if spec.output.keep_best else without_details(done)


def held_back(
    store: Store,
    objects: Objects,
    job: JobRow,
    spec: JobSpec,
    decode: Decode,
    places: Mapping[Place, HeldBack],
) -> dict[Place, CompletionRecord]:
    """Completions that wait for a review, as they are published if they are released: other
    policies than those that asked for the review still count. Those whose files are gone are
    missing."""
    groups = {one.group_index for one in places.values()}
    files = _Files(objects, job, spec, decode)
    found = {}
    for index, prompts, results in store.recorded_groups(job.job_id):
        if index not in groups:
            continue
        try:
            records, texts, rows, rulings = files.read(index, prompts, results)
        except ObjectError as error:
            log.error("texts of job %s, group %d, are lost: %s", job.job_id, index, error)
            continue
        forms = forms_of(rows, spec)
        for record, whole in zip(records, texts, strict=True):
            place = (record.row_index, record.sample_index)
            if place in places:
                others = [r for r in rulings[place] if r.verdict.ruling is not Ruling.REVIEW]
                found[place] = published_as(record, whole, others, forms[record.row_index])
    return found


class _Files:
    """Reads the results of a job's groups."""

    def __init__(self, objects: Objects, job: JobRow, spec: JobSpec, decode: Decode) -> None:
        self._objects, self._job, self._spec, self._decode = objects, job, spec, decode
        self._prompts = reader(objects, job, files=1)
        self._kept: defaultdict[int, list[Artefact]] = defaultdict(list)
        for name, value in job.report.items():
            if match := _KEPT.fullmatch(name):
                self._kept[int(match[1])].append(Artefact(**value))

    def read(
        self, index: int, prompts: Prompts, results: Artefact | None
    ) -> tuple[list[CompletionRecord], list[str], Sequence[PromptRow], Rulings]:
        """A group's whole completions by (row, sample), the texts of all their tokens, the rows,
        and what policies said. Raises `ObjectError`."""
        rows = self._prompts(prompts)
        mine = {row.row_index for row in rows}  # groups that were split off share the file
        found: dict[Place, CompletionRecord] = {}
        rulings: Rulings = {}
        for artefact in (*self._kept[index], *((results,) if results else ())):
            file = read_results(read_own(self._objects, self._job, artefact))
            rulings = {**file.rulings, **rulings}
            for record in file.records:
                if record.row_index in mine:
                    found.setdefault((record.row_index, record.sample_index), record)
        records = [record for _, record in sorted(found.items())]
        texts = [self._decode(record.token_ids) for record in records]
        done = with_text(records, texts, rows, self._spec, self._decode)
        return list(map(as_kept, done)), texts, rows, rulings


def rejected_whole(store: Store, objects: Objects, job: JobRow) -> Iterator[RejectedRow]:
    """`Store.rejected` with the original ids and reasons."""
    files = [
        file.uri
        for file in objects.list(job.workspace_uri)
        if _REJECTED.fullmatch(file.uri.rpartition("/")[2])
    ]
    whole = (
        RejectedRow(**row)
        for uri in files
        for row in orjson.loads(read_own_named(objects, job, uri))
    )
    for row in store.rejected(job.job_id):
        found = next((other for other in whole if other.row_index >= row.row_index), None)
        if found is None or found.row_index != row.row_index:
            raise ObjectError(
                f"quarantined row {row.row_index} of job {job.job_id} is in no file of its "
                "workspace, which was damaged"
            )
        yield found
