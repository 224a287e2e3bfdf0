"""A job's results in full, from its own files: of private jobs the store does not keep the texts,
of others not those that wait for a review.

    results-<attempt>.arrow  of a group that was verified; the store names it
    kept-<attempt>.arrow     finished when the job was stopped; its report names it
    rejected-<row>.json      quarantined rows with ids and reasons, from that row on

The store has everything else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.moderation.outcome import as_ruled
from specbatch.pipeline.stages.moderation import is_for_review, with_rulings
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.stages.texts import with_text
from specbatch.pipeline.storage.artefacts import (
    Place,
    Rulings,
    read_results,
    read_rulings,
    write_results,
)
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import reader
from specbatch.pipeline.storage.workspace import name_of_attempt, put_own, read_own, read_own_named
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.mapper import as_kept, without_details
from specbatch.schemas.policies import HeldBack, Ruling
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    JobRow,
    Lease,
    RejectedRow,
)
from specbatch.schemas.spec import JobSpec

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
    for records, rulings in _of_groups(store, objects, job, spec, decode):
        for done in with_rulings(records, rulings, job, spec):
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
    policies than those that asked for the review still count. Raises `ObjectError`."""
    groups = {one.group_index for one in places.values()}
    found = {}
    for records, rulings in _of_groups(store, objects, job, spec, decode, groups):
        for record in records:
            place = (record.row_index, record.sample_index)
            if place in places:
                others = [r for r in rulings[place] if r.verdict.ruling is not Ruling.REVIEW]
                found[place] = as_ruled(record, others)
    if lost := places.keys() - found.keys():
        row, _ = min(lost)
        raise ObjectError(
            f"the text of row {row} of job {job.job_id}, which was held back, is in no file of its "
            "workspace, which was damaged"
        )
    return found


def _of_groups(
    store: Store,
    objects: Objects,
    job: JobRow,
    spec: JobSpec,
    decode: Decode,
    only: Container[int] | None = None,
) -> Iterator[tuple[list[CompletionRecord], Rulings]]:
    """By group, in the order of their rows: whole completions, and what policies said of them."""
    read = reader(objects, job, files=1)
    kept: defaultdict[int, list[Artefact]] = defaultdict(list)
    for name, value in job.report.items():
        if match := _KEPT.fullmatch(name):
            kept[int(match[1])].append(Artefact(**value))
    for index, prompts, results in store.recorded_groups(job.job_id):
        if only is not None and index not in only:
            continue
        rows = read(prompts)
        mine = {row.row_index for row in rows}  # groups that were split off share the file
        found: dict[Place, CompletionRecord] = {}
        rulings: Rulings = {}
        for artefact in (*kept[index], *((results,) if results else ())):
            data = read_own(objects, job, artefact)
            rulings = {**read_rulings(data), **rulings}
            for record in read_results(data):
                if record.row_index in mine:
                    found.setdefault((record.row_index, record.sample_index), record)
        records = [record for _, record in sorted(found.items())]
        texts = [decode(record.token_ids) for record in records]
        yield list(map(as_kept, with_text(records, texts, rows, spec, decode))), rulings


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
