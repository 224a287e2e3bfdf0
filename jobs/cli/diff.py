"""`specbatch diff JOB JOB`: whether two jobs wrote the same, and where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbatch.jobs.cli.completing import jobs_beginning
from specbatch.jobs.cli.console import complain, remark, say, say_json, while_read
from specbatch.jobs.cli.options import MOST_SHOWN, JobId, Json
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import make_results
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.errors import SpecbatchError, UsageError
from specbatch.schemas.privacy import SEALED
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:  # the light install has no pyarrow
    from specbatch.pipeline.operations.comparing import Comparison, Difference, Thresholds
    from specbatch.pipeline.operations.results import Results

DIFFERENT = 1
_THRESHOLDS = "Thresholds"
TROUBLE = 2  # as `diff` has it

SecondJob = Annotated[
    str, typer.Argument(metavar="JOB", help="the other job", autocompletion=jobs_beginning)
]


def diff(
    left: JobId,
    right: SecondJob,
    most: Annotated[
        int,
        typer.Option("--max", help="differing rows to print at most", min=0, max=MOST_SHOWN),
    ] = 10,
    max_different: Annotated[
        float | None,
        typer.Option(
            "--max-different",
            help="percent of the rows that may differ",
            min=0.0,
            max=100.0,
            show_default=False,
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    max_length: Annotated[
        float | None,
        typer.Option(
            "--max-length",
            help="percent by which the mean number of tokens may change",
            min=0.0,
            show_default=False,
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    max_logprob: Annotated[
        float | None,
        typer.Option(
            "--max-logprob",
            help="by which the mean log-probability of a token may be lower in the second job",
            min=0.0,
            show_default=False,
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare the outputs of two jobs row by row; exit with 1 if they differ.

    Rows belong together by id and sample. Equal means: the same token ids, text, finish reason and
    error, and the same log-probabilities where both jobs wrote them. With thresholds, jobs may
    differ, as those of two models do, and only what exceeds one counts. Exit codes: 0 equal or
    within the thresholds, 1 different, 2 the jobs could not be compared.
    """
    try:
        is_well = _compare(
            found_settings(),
            left,
            right,
            most,
            _thresholds(max_different, max_length, max_logprob),
            json,
        )
    except SpecbatchError as error:
        complain(str(error))
        raise typer.Exit(TROUBLE) from None
    raise typer.Exit(0 if is_well else DIFFERENT)


def _thresholds(different: float | None, length: float | None, logprob: float | None) -> Thresholds:
    """The first two are percentages."""
    from specbatch.pipeline.operations.comparing import Thresholds

    shares = [None if percent is None else percent / 100.0 for percent in (different, length)]
    return Thresholds(shares[0], shares[1], logprob)


def _compare(
    settings: Settings, left: str, right: str, most: int, allowed: Thresholds, json: bool
) -> bool:
    with closing(make_store(settings)) as store:
        jobs = [store.get_job(name) for name in (left, right)]
        one, other = (make_results(settings, store, job) for job in jobs)
        for results in (one, other):
            _check_whole(results)
            for line in results.remarks:
                remark(line)
        from specbatch.pipeline.operations.comparing import compare, spec_differences

        found = compare(one.compared(), other.compared(), most)
    specs = spec_differences(one.job, other.job, Privacy.of_settings(settings).templates)
    is_whole = not any(job.spec.get(SEALED) for job in jobs)
    exceeded = found.exceeded(allowed)
    if json:
        told = as_json((one.job.job_id, other.job.job_id), found, specs)
        say_json(told | ({"exceeded": exceeded} if allowed.are_any else {}))
    else:
        lines = [*count_lines(found), *difference_lines(found), *spec_lines(specs, is_whole)]
        if allowed.are_any:
            lines += [*written_lines(found), *(exceeded or ["within the thresholds"])]
        with suppress(SystemExit, typer.Exit), while_read():  # the outcome is that of the jobs
            for line in lines:
                say(line)
    return not exceeded if allowed.are_any else found.equal


def _check_whole(results: Results) -> None:
    """Raise `UsageError` where texts were reduced: these would be no differences of the outputs."""
    if results.lacks is not None:
        raise UsageError(f"the jobs cannot be compared: {results.lacks}")


def count_lines(found: Comparison) -> Iterator[str]:
    """How many completions are alike, and how many are not."""
    yield f"identical: {found.same:,}"
    yield f"different: {found.differ:,}"
    for count, word, names in (
        (found.only_left, "first", found.ids_only_left),
        (found.only_right, "second", found.ids_only_right),
    ):
        if count:
            more = ", ..." if count > len(names) else ""
            yield f"only in the {word} job: {count:,}" + (
                f" ({', '.join(names)}{more})" if names else ""
            )


def written_lines(found: Comparison) -> Iterator[str]:
    """What both jobs wrote in the rows that both have, on average."""
    both = (found.left, found.right)
    yield "tokens of a completion: " + " and ".join(f"{one.mean_tokens:.1f}" for one in both)
    means = [one.mean_logprob for one in both]
    if None not in means:
        yield "log-probability of a token: " + " and ".join(f"{mean:.4f}" for mean in means)
    for reason in sorted({*found.left.reasons, *found.right.reasons}):
        shares = [one.reasons[reason] / max(1, one.completions) for one in both]
        yield f"ended by {reason}: " + " and ".join(f"{share:.1%}" for share in shares)


def difference_lines(found: Comparison) -> Iterator[str]:
    """The first differing completions, each with its first difference."""
    from specbatch.pipeline.operations.comparing import named

    for one in found.differences:
        name = named(one.row_id, one.row_index, one.sample_index)
        yield f"{name}: {_where(one)}: {_value(one.left)} and {_value(one.right)}"
        if one.left_text is not None and one.right_text is not None:
            yield f"    - {one.left_text}"
            yield f"    + {one.right_text}"
    if (left_out := found.differ - len(found.differences)) > 0:
        yield f"and {left_out:,} more that differ (--max N shows more)"


def _where(one: Difference) -> str:
    what = one.what.replace("_", " ")
    return f"{what} differs" if one.at is None else f"{what} {one.at:,} differs"


def _value(value: Any) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)


def spec_lines(specs: dict[str, tuple[Any, Any]], is_whole: bool = True) -> Iterator[str]:
    """What decides outputs and differs between the jobs. Not `is_whole`: privacy has reduced what
    the store keeps of a spec."""
    if not specs and is_whole:
        yield "the jobs have the same model, numeric class, input and sampling"
    if not specs and not is_whole:
        yield "what the store keeps of both specs is the same; privacy has reduced it"
    for name, (left, right) in specs.items():
        yield f"{name}: {_spec_value(left)} and {_spec_value(right)}"


def _spec_value(value: Any) -> str:
    return "none" if value is None else str(value)


def as_json(
    jobs: Sequence[str], found: Comparison, specs: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "jobs": list(jobs),
        "equal": found.equal,
        "identical": found.same,
        "different": found.differ,
        "only_in_first": found.only_left,
        "only_in_second": found.only_right,
        "differences": [one._asdict() for one in found.differences],
        "ids_only_in_first": found.ids_only_left,
        "ids_only_in_second": found.ids_only_right,
        "written": [
            {
                "completions": one.completions,
                "mean_tokens": one.mean_tokens,
                "mean_logprob": one.mean_logprob,
                "finish_reasons": dict(one.reasons),
            }
            for one in (found.left, found.right)
        ],
        "specs": {name: list(values) for name, values in specs.items()},
    }
