"""`specbatch replay JOB/ROW`: one completion written again from nothing, and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbatch.jobs.cli.audit import FOUND
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import say, say_json
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.spec_input import read_spec_file
from specbatch.pipeline.operations.tools import make_replays
from specbatch.schemas.errors import UsageError
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.numeric_class import class_note

if TYPE_CHECKING:
    from specbatch.pipeline.operations.given import Given
    from specbatch.pipeline.operations.replay import Twice

_MOST_DIGITS = 18  # of a row or sample: a store's whole number

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
    proposer: Annotated[
        str | None,
        typer.Option(
            "--proposer",
            help="folder of the draft model of a job with ratio tests, if it moved",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            metavar="FILE",
            help="the row's text, where it is not kept; - reads it from standard input",
            show_default=False,
        ),
    ] = None,
    row_file: Annotated[
        str | None,
        typer.Option(
            "--row",
            metavar="FILE",
            help="the same as one JSON object, as a JSONL input has it: columns by name",
            show_default=False,
        ),
    ] = None,
    spec_file: Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="the texts of the job's spec, where those were purged",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Write one completion again, nothing drafted, and compare tokens, log-probabilities, text.

    Where texts are not kept, you give the prompt: its receipt proves that it is the row's.
    """
    job_id, row, sample = parts_of(completion)
    given = _given(prompt, row_file)
    settings = load_settings()
    require_engine_extra()
    with closing(make_store(settings)) as store:
        job = store.get_job(job_id)
        spec = None if spec_file is None else read_spec_file(Path(spec_file))
        replays = make_replays(settings, store, job, verifier, spec, proposer, tests_again=True)
        twice = replays.again(row, sample, given)
    if json:
        say_json(as_json(job.job_id, twice))
    else:
        for line in comparison(twice):
            say(line)
    if twice.differing:
        raise typer.Exit(FOUND)


def _given(prompt: str | None, row: str | None) -> Given | None:
    """Raises `UsageError`."""
    if prompt is not None and row is not None:
        raise UsageError("--prompt and --row both give the row: leave one of them out")
    if prompt is None and row is None:
        return None
    from specbatch.pipeline.operations.given import Given

    return Given(_text(prompt), _text(row))


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    if path == "-":
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    from specbatch.pipeline.operations.given import read_text

    return read_text(Path(path))


def parts_of(name: str) -> tuple[str, int, int]:
    """Job, row and sample. Raises `UsageError`."""
    job, *numbers = name.split("/")
    if not job or len(numbers) not in (1, 2) or not all(map(_is_place, numbers)):
        raise UsageError(f"{name[:80]!r} names no completion: use JOB/ROW or JOB/ROW/SAMPLE")
    row, sample = (*map(int, numbers), 0)[:2]
    return job, row, sample


def _is_place(number: str) -> bool:
    return number.isdecimal() and len(number) <= _MOST_DIGITS


def comparison(twice: Twice) -> Iterator[str]:
    """What is the same in one line, or both versions of what is not."""
    kept, fresh = twice.kept, twice.fresh
    if other := class_note(kept.numeric_class, fresh.numeric_class):
        yield f"note: {other}"
    name = f"row {kept.row_index}, sample {kept.sample_index}"
    if twice.unsealed is not None:
        yield f"{name}: what was given is its row, as its receipt proves"
        tokens = f"{len(fresh.token_ids):,} tokens"
        if not twice.unsealed:
            yield f"{tokens}, their log-probabilities and the text are what was sealed, bit for bit"
        else:
            yield f"{tokens}: {' and '.join(twice.unsealed)} differ from what was sealed"
        return
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
        "by_receipt": twice.unsealed is not None,
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
