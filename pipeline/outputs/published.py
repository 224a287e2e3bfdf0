"""Checks that a job's output is as published: the manifest, and every file that it names.

Needs no Arrow: it compares files by size and SHA-256 with a few megabytes in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from specbatch.pipeline.audit.log_facts import LogFacts
from specbatch.pipeline.outputs.names import (
    LISTED,
    MANIFEST,
    MARKER,
    is_published,
    is_read_as_data,
    is_within,
    owner_of,
)
from specbatch.pipeline.storage.objects import CHUNK_BYTES, Objects, join, tidy
from specbatch.schemas.audit import Finding, FindingKind
from specbatch.schemas.errors import ObjectError

_MOST_ENTRIES = 2**63 - 1
_RESTORE = "restore it from a copy"
MOST_MANIFEST_BYTES = 64 << 20  # half a million parts


@dataclass
class OutputCounts:
    """Counts of what was compared."""

    uri: str = ""  # of the manifest
    named: int = 0  # files that the manifest names
    files: int = 0  # of these, whose size and SHA-256 were compared
    size_bytes: int = 0
    confirms: int | None = None  # the last entry of the log that the manifest confirms
    purged: bool = False  # it was deleted on purpose, as the log says
    gap: str = "the log does not say where they lie"  # why parts were not compared, if so


def output_findings(
    objects: Objects, facts: LogFacts, output_uri: str | None, counts: OutputCounts
) -> Iterator[Finding]:
    """Differences from what was published. `output_uri`: the output's place by the log."""
    if not isinstance(output_uri, str):
        return  # another finding reports that the log lacks its beginning
    folder = tidy(output_uri)
    counts.uri = uri = join(folder, MANIFEST)
    counts.gap = f"the output in {folder} cannot be read"
    named = _named(facts, output_uri)
    if named is not None:
        yield named
    try:
        info = objects.head(uri)
        if info is None:
            yield from _without_manifest(facts, uri, counts)
            return
        if info.size > MOST_MANIFEST_BYTES:
            counts.gap = f"{uri} has {info.size:,} bytes, which no manifest has"
            yield _output(f"{counts.gap}: {_RESTORE}")
            return
        data = objects.get_bytes(uri)
        yield from _with_manifest(objects, facts, folder, data, counts)
    except (ObjectError, ValueError) as error:  # a name may be none that a system takes
        yield _output(
            f"the output in {folder} cannot be read and is not confirmed: {error}; make it "
            "readable and audit again"
        )


def _named(facts: LogFacts, output_uri: str) -> Finding | None:
    """Says what is wrong with the manifest that the log names. Without this check a rewritten log
    would need no manifest."""
    if not facts.published:
        return None
    if facts.manifest is None:
        return _anew("its log says that it was published, and names no manifest")
    if (uri := facts.manifest["uri"]) != join(output_uri, MANIFEST):
        return _anew(f"its log names a manifest {uri}, but its output is {output_uri}")
    return None


def _without_manifest(facts: LogFacts, uri: str, counts: OutputCounts) -> Iterator[Finding]:
    counts.purged = facts.output_purged
    counts.gap = f"{uri} is missing"
    if facts.published and not facts.output_purged:
        yield _output(
            f"{uri} is missing, and entry {facts.published_by} of the log says that it was "
            f"published: {_RESTORE}"
        )


def _with_manifest(
    objects: Objects, facts: LogFacts, folder: str, data: bytes, counts: OutputCounts
) -> Iterator[Finding]:
    uri = join(folder, MANIFEST)
    manifest = _parsed(data)
    owner = manifest.get("job_id")
    if owner is not None and owner != facts.job_id:
        counts.gap = f"{uri} is the manifest of another job"
        if facts.published:
            yield _output(
                f"{uri} is the manifest of job {owner}, not of {facts.job_id}: {_RESTORE}"
            )
        return
    yield from _log_of(facts, uri, manifest, counts)
    if not facts.published:
        return
    known = facts.manifest["sha256"] if facts.manifest is not None else None
    is_published_one = hashlib.sha256(data).hexdigest() == known
    may_be_trusted = known is None or is_published_one
    if not may_be_trusted:
        yield _output(f"{uri} is not the manifest that was published: it was changed; {_RESTORE}")
    yield from _files(objects, facts, folder, manifest, counts, may_be_trusted)
    counts.gap = "" if is_published_one else f"{uri} is not the manifest that was published"


def _log_of(
    facts: LogFacts, uri: str, manifest: Mapping[str, Any], counts: OutputCounts
) -> Iterator[Finding]:
    """Compare the log with the entry that the manifest confirms from outside the store."""
    try:
        said = manifest["info"]["audit_log"]
        number, hashed = _entry_number(said["number"]), bytes.fromhex(said["hash"])
    except (ValueError, TypeError, KeyError):
        return  # another finding reports that it is not the published one
    last = max(facts.hashes, default=0)
    if number > last:
        yield _entry(
            f"{uri} names entry {number} of the log, which ends at entry {last} in the store: the "
            "store is an older copy, or the log's end was cut off; restore the newer store",
            number,
        )
    elif facts.hashes.get(number) != hashed:
        yield _entry(
            f"entry {number} of the log is not the one that {uri} names: the log was rewritten",
            number,
        )
    elif number == last:
        yield _entry(
            f"{uri} was written after entry {number}, the log's last, and no entry says that the "
            "job was published: a worker died while it published, or the log's end was cut off; "
            "let a worker finish the job and audit again, or restore the newer store",
            number,
        )
    else:
        counts.confirms = number


def _files(
    objects: Objects,
    facts: LogFacts,
    folder: str,
    manifest: Mapping[str, Any],
    counts: OutputCounts,
    may_be_trusted: bool,
) -> Iterator[Finding]:
    """Check that each file of the manifest is unchanged and that the job has no other files. A
    changed manifest cannot show which files are foreign."""
    names = {MANIFEST, MARKER}
    for file in _listed(manifest):
        name = str(file.get("name"))
        names.add(name)
        counts.named += 1
        if not is_within(name):
            yield _output(f"the manifest in {folder} names {name}, which is not in the output")
            continue
        wrong = _difference(objects, join(folder, name), file, counts)
        if wrong is not None:
            yield _output(f"{join(folder, name)} {wrong}: {_RESTORE}")
    root = f"{folder.rstrip('/')}/"
    for info in objects.list(root):
        name = info.uri.removeprefix(root)
        is_read = is_published(name, facts.job_id) or is_read_as_data(name)
        if may_be_trusted and is_read and name not in names:
            yield _output(
                f"{info.uri} is not named by the manifest, so the job did not publish it: remove it"
            )
    if owner_of(objects, folder) != facts.job_id:
        yield _output(
            f"{join(folder, MARKER)}, which keeps other jobs away from this output, is missing or "
            f"names another job: {_RESTORE}"
        )


def _difference(
    objects: Objects, uri: str, file: Mapping[str, Any], counts: OutputCounts
) -> str | None:
    """Says what is wrong with one file; None if nothing is."""
    info = objects.head(uri)
    if info is None:
        return "is missing"
    if info.size != file.get("size_bytes"):
        return f"has {info.size:,} bytes, and {_said_size(file.get('size_bytes'))}"
    counts.files += 1
    counts.size_bytes += info.size
    digest = hashlib.sha256()
    with objects.open(uri, info.version) as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.get("sha256"):
        return "was changed: its SHA-256 differs from the published one"
    return None


def _entry_number(value: Any) -> int:
    """The number of an entry. Raises `ValueError` for any other value."""
    if not isinstance(value, int) or not 0 < value <= _MOST_ENTRIES:
        raise ValueError("no number of an entry")
    return value


def _said_size(size: Any) -> str:
    """What the manifest says about a file's size, whatever its value."""
    if isinstance(size, int) and not isinstance(size, bool):
        return f"was published with {size:,}"
    return "the manifest does not say with how many it was published"


def _parsed(data: bytes) -> Mapping[str, Any]:
    """The manifest; empty if the data is not one."""
    try:
        values = orjson.loads(data)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _listed(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for kind in LISTED:
        files = manifest.get(kind)
        yield from (
            (file for file in files if isinstance(file, dict)) if isinstance(files, list) else ()
        )


def _anew(what: str) -> Finding:
    """A finding that no publication can explain."""
    return Finding(FindingKind.ENTRY, f"{what}: the log was rewritten")


def _output(what: str) -> Finding:
    return Finding(FindingKind.OUTPUT, what)


def _entry(what: str, number: int) -> Finding:
    return Finding(FindingKind.ENTRY, what, number=number)
