"""`specbatch replay JOB/ROW`: one completion written again from nothing, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbatch.jobs.cli.audit import FOUND
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import say, say_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_replays
from specbatch.schemas.errors import UsageError
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.numeric_class import class_note

if TYPE_CHECKING:
    from specbatch.pipeline.operations.replay import Twice

Named = Annotated[
    str,
    typer.Argument(metavar="COMPLETION", help="JOB/ROW, or JOB/ROW/SAMPLE; sample 0 if not named"),
]


def replay(
    completion: Named,
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier", help="folder of the job's verifier, if it moved", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Write one completion again, nothing drafted, and compare tokens, log-probabilities, text."""
    job_id, row, sample = parts_of(completion)
    settings = load_settings()
    require_engine_extra()
    with closing(make_store(settings)) as store:
        job = store.get_job(job_id)
        twice = make_replays(settings, store, job, verifier).again(row, sample)
    if json:
        say_json(as_json(job.job_id, twice))
    else:
        for line in comparison(twice):
            say(line)
    if twice.differing:
        raise typer.Exit(FOUND)


def parts_of(name: str) -> tuple[str, int, int]:
    """Job, row and sample. Raises `UsageError`."""
    job, *numbers = name.split("/")
    if not job or len(numbers) not in (1, 2) or not all(n.isdecimal() for n in numbers):
        raise UsageError(f"{name!r} names no completion: use JOB/ROW or JOB/ROW/SAMPLE")
    row, sample = (*map(int, numbers), 0)[:2]
    return job, row, sample


def comparison(twice: Twice) -> Iterator[str]:
    """What is the same in one line, or both versions of what is not."""
    kept, fresh = twice.kept, twice.fresh
    if other := class_note(kept.numeric_class, fresh.numeric_class):
        yield f"note: {other}"
    name = f"row {kept.row_index}, sample {kept.sample_index}"
    if not twice.differing:
        yield (
            f"{name}: {len(kept.token_ids):,} tokens, their log-probabilities and the text come "
            "out the same, bit for bit"
        )
        return
    yield f"{name}: {', '.join(twice.differing)} differ"
    for attribute in twice.differing:
        old, new = getattr(kept, attribute), getattr(fresh, attribute)
        if isinstance(old, tuple):
            place = _first_difference(old, new)
            yield f"{attribute} from position {place} on"
            old, new = old[place : place + 16], new[place : place + 16]
        yield f"    kept:    {old!r}"
        yield f"    written: {new!r}"


def _first_difference(old: Sequence[object], new: Sequence[object]) -> int:
    pairs = enumerate(zip(old, new, strict=False))
    # By their words: NaN is the same as NaN here.
    return next((i for i, (a, b) in pairs if repr(a) != repr(b)), min(len(old), len(new)))


def as_json(job_id: str, twice: Twice) -> dict[str, Any]:
    """The object that `--json` prints."""
    names = ("token_ids", "logprobs", "text", "finish_reason")
    return {
        "job": job_id,
        "row": twice.kept.row_index,
        "sample": twice.kept.sample_index,
        "differing": twice.differing,
        "numeric_class": {
            "kept": twice.kept.numeric_class,
            "written": twice.fresh.numeric_class,
        },
        "model_fingerprint": {
            "kept": twice.kept.model_fingerprint,
            "written": twice.fresh.model_fingerprint,
        },
        **{
            word: {name: getattr(record, name) for name in names}
            for word, record in (("kept", twice.kept), ("written", twice.fresh))
        },
    }
