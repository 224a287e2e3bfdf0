"""Names of the files of a job's output, and the owner of a location.

Completions are in a folder of their own, `data/part-00000.parquet` (or `.jsonl`) and so on, so that
every reader of the format opens it. All other files lie beside it. Earlier versions wrote the parts
there too: such an output is still read, audited and purged. Parts of a job that still runs wait in
a folder whose name readers of files pass over.

Imports no pyarrow, because a purge uses these names to delete what an unfinished publication left.
"""

from __future__ import annotations

import re

import orjson

from specbatch.pipeline.storage.objects import Objects, join
from specbatch.schemas.audit import DATA_FOLDER, MANIFEST_NAME
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.spec import OutputFormat

MARKER = "_specbatch_job.json"
MANIFEST = MANIFEST_NAME
MOST_MARKER_BYTES = 1 << 16
STAGING = "_specbatch_staging"  # a folder: parts of a job that is not published yet
OPENAI = ("output.jsonl", "errors.jsonl")
MALFORMED = "malformed.jsonl"
LISTED = ("parts", "openai_files", "remainder", "quarantine")  # keys of a manifest that list files
_PART = "part-"
# Only these: others write `part-00000-….snappy.parquet` into the same folder.
_PART_NAME = re.compile(
    rf"{DATA_FOLDER}/{_PART}[0-9]{{5,}}\.(parquet|jsonl)|{_PART}[0-9]{{5,}}\.parquet"
)
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")  # as `LocalObjects` writes beside a file


def part_name(number: int, kind: OutputFormat = "parquet") -> str:
    """Relative to the manifest, as are all names here."""
    return f"{DATA_FOLDER}/{_PART}{number:05d}.{kind}"


def staged_name(number: int, token: str, kind: OutputFormat = "parquet") -> str:
    """Of a part that is not published yet. Each claim to write it has a name of its own."""
    return f"{STAGING}/{_PART}{number:05d}-{token}.{kind}"


def is_part(name: str) -> bool:
    """Whether this or an earlier version calls a part so."""
    return _PART_NAME.fullmatch(name) is not None


def is_read_as_data(name: str) -> bool:
    """Whether who reads the data folder also reads this file, whoever wrote it."""
    folder, _, rest = name.partition("/")
    return folder == DATA_FOLDER and not any(p.startswith((".", "_")) for p in rest.split("/"))


def is_within(name: str) -> bool:
    """Whether a name leads to a file beside the manifest or directly in the data folder."""
    return not re.search(r"[/\\]", name.removeprefix(f"{DATA_FOLDER}/"))


def around(uri: str) -> list[str]:
    """The locations in whose data folder this one would lie."""
    scheme, mark, path = uri.rpartition("://")
    parts = path.split("/")
    return [
        scheme + mark + ("/".join(parts[:at]) or ("/" if at else "."))
        for at in range(1 if scheme else 0, len(parts))  # the first of a store is its bucket
        if parts[at] == DATA_FOLDER
    ]


def remainder_name(job_id: str) -> str:
    """The name without its ending."""
    return f"remainder-{job_id}"


def remainder_names(job_id: str) -> set[str]:
    """The file of a stopped job's remaining rows, and the spec for them."""
    return {f"{remainder_name(job_id)}.{kind}" for kind in ("parquet", "yaml")}


def is_published(name: str, job_id: str) -> bool:
    """Whether the job's manifest may name such a file."""
    return is_part(name) or name in (*OPENAI, MALFORMED) or name in remainder_names(job_id)


def is_written(name: str, job_id: str) -> bool:
    """Whether the job writes a file of that name, finished or not."""
    if unfinished := _TEMPORARY.fullmatch(name):
        name = unfinished[1]
        return is_published(name, job_id) or is_part(f"{DATA_FOLDER}/{name}")
    return is_published(name, job_id)


def begin_with(job_id: str) -> tuple[str, ...]:
    """Prefixes of the names that the job writes, to find unlisted uploads."""
    return (f"{DATA_FOLDER}/{_PART}", _PART, *OPENAI, MALFORMED, f"{remainder_name(job_id)}.")


def owner_of(objects: Objects, uri: str) -> str | None:
    """The id of the job that owns the location; None if no job has claimed it. Raises
    `ObjectError`."""
    marker = join(uri, MARKER)
    info = objects.head(marker)
    if info is None:
        return None
    if info.size > MOST_MARKER_BYTES:
        raise ObjectError(f"{marker} is not a specbatch marker: it has {info.size:,} bytes")
    try:
        return str(orjson.loads(objects.get_bytes(marker))["job_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ObjectError(f"{marker} is not a specbatch marker") from None
