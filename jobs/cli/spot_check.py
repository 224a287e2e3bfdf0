"""`specbatch spot-check JOB --by MODEL`: how often a larger model would have written the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import check_broker, client, load_settings
from specbatch.jobs.cli.console import complain, if_interrupted, remark, say, say_json, stored
from specbatch.jobs.cli.outcome import leave
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.tools import check_share_a_vocabulary, make_spot_checks
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import spec_of
from specbatch.schemas.uris import absolute, model_ref
from specbatch.schemas.visible import one_line

if TYPE_CHECKING:  # the light install has no pyarrow
    from specbatch.pipeline.operations.spot_checks import Agreement, Checked, Selection, SpotChecks

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # as policies' patterns have it
BELOW = 1  # the exit code of a check that found less agreement than was asked for


def spot_check(
    job: o.JobId,
    by: Annotated[
        str,
        typer.Option("--by", help="the model that checks: a folder, or a hub id", metavar="MODEL"),
    ],
    share: Annotated[
        float, typer.Option("--share", help="of the rows, drawn at random", min=0.0, max=1.0)
    ] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="of the draw", min=0)] = 0,
    flag: Annotated[
        list[str] | None,
        typer.Option(
            "--flag",
            help="NAME=REGEX (RE2): check all rows whose text has it; repeat for more",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", help="default: beside the job's", show_default=False),
    ] = None,
    least: Annotated[
        float | None,
        typer.Option(
            "--least",
            help="exit with 1 if fewer percent of the drawn rows are the same",
            min=0.0,
            max=100.0,
            show_default=False,
        ),
    ] = None,
    local: o.Local = False,
    wait: o.Wait = False,
    timeout: o.Timeout = None,
    json: o.Json = False,
) -> None:
    """Let another model write a share of a job's rows again, and tell how many are the same.

    The check is a job of its own, with the same prompts, sampling and noise, and what the first job
    wrote as drafts, as far as its tenant's history has it. Beside the drawn rows it has those that
    lack their response format, and those that a --flag finds. The same command again finds the same
    check. Exit codes: 0 checked (or submitted), 1 fewer than --least are the same, else as
    `submit-job`.
    """
    if timeout is not None and not (wait or local):
        raise UsageError("--timeout needs --wait or --local")
    settings = load_settings()
    with client(settings) as c, closing(make_store(settings)) as store:
        row = c.job(job)
        checks = make_spot_checks(settings, store)
        selection = _selection(share, seed, flag or ())
        check = _check_of(settings, c, checks, row, selection, by, output, local)
        with if_interrupted(stored(check.job_id)):
            if not check.state.is_final:
                _run(settings, c, check, local, wait, timeout)
                check = c.job(check.job_id)
        if not check.state.is_final:
            remark(f"job {check.job_id} checks; the same command tells what it found once it ended")
            say(check.job_id)
            return
        found = checks.found_by(row, check, selection)
    if found is None:
        leave(check)
    _tell(row, check, found, json)
    if least is not None and not found.drawn.rows:
        remark("no row was drawn, so --least says nothing: raise --share")
    elif least is not None and 100 * found.drawn.interval.value < least:
        complain(f"fewer than {least:g} % of the drawn rows are the same")
        raise typer.Exit(BELOW)
    leave(check)


def _selection(share: float, seed: int, flags: Sequence[str]) -> Selection:
    from specbatch.pipeline.operations.spot_checks import MALFORMED, Selection

    patterns: dict[str, str] = {}
    for given in flags:
        name, equals, pattern = given.partition("=")
        taken = name in patterns or name == MALFORMED
        if not (equals and pattern) or not _NAME.fullmatch(name) or taken:
            raise UsageError(
                f"--flag {one_line(given)!r:.60} should be NAME=REGEX: a name of letters, digits, "
                f"_ . -, each once and none {MALFORMED}"
            )
        patterns[name] = pattern
    return Selection(share, seed, patterns)


def _check_of(
    settings: Settings,
    c: Client,
    checks: SpotChecks,
    row: JobRow,
    selection: Selection,
    by: str,
    output: str | None,
    local: bool,
) -> JobRow:
    """The job that checks, made now or by the same command before."""
    from pathlib import Path

    from specbatch.pipeline.operations.spot_checks import may_be_checked

    may_be_checked(row)
    model, output = model_ref(by, Path.cwd()), output and absolute(output, Path.cwd())
    key = f"spot-check/{selection.digest(row.job_id, model, output)}"
    known = c.find(row.tenant, key)
    if known is not None:
        again = known.state in (JobState.FAILED, JobState.CANCELLED)
        hint = f": `specbatch retry {known.job_id}` does it again" if again else ""
        remark(f"job {known.job_id} is this check, and {known.state}{hint}")
        return known
    if model == row.verifier and spec_of(row).engine.verifier_weights == "as-is":
        remark(f"{model} is the model of job {row.job_id} itself")
    check_share_a_vocabulary(row.verifier, model)
    if not local:
        check_broker(settings)
    spec = checks.spec_of_check(row, selection, model, output).resolved(Path.cwd())
    check, _ = c.submit(spec, key)
    remark(f"job {check.job_id} checks job {row.job_id}")
    return check


def _run(
    settings: Settings, c: Client, check: JobRow, local: bool, wait: bool, timeout: float | None
) -> None:
    if local:
        from specbatch.jobs.cli.local import run_here

        run_here(settings, spec_of(check), check, timeout, "run the same command again")
    elif wait:
        from specbatch.jobs.cli.remote import follow

        follow(settings, c, check, spec_of(check), timeout)


def _tell(row: JobRow, check: JobRow, found: Checked, json: bool) -> None:
    from specbatch.pipeline.operations.spot_checks import as_json

    if json:
        say_json(as_json(row, check, found))
        return
    for line in _lines(row, check, found):
        say(line)


def _lines(row: JobRow, check: JobRow, found: Checked) -> Iterator[str]:
    from specbatch.pipeline.operations.spot_checks import in_words

    yield f"job {row.job_id} by {row.verifier}, checked by {check.verifier}"
    yield f"drawn at random: {_agreement(found.drawn)}"
    if found.drawn.rows:
        share = found.drawn.interval
        of = "all rows that could be drawn" if found.left_out else "all rows"
        yield f"  95 % interval for {of}: {share.low:.1%} to {share.high:.1%}"
    if found.flagged.rows:
        rules = ", ".join(f"{name} {count:,}" for name, count in found.flags.items())
        yield f"flagged: {_agreement(found.flagged)} ({rules})"
    if found.unfinished:
        yield f"not compared: {found.unfinished:,} rows that job {check.job_id} could not complete"
    if found.left_out:
        yield f"left out: {found.left_out:,} rows that failed, or whose texts a policy changed"
    for difference in found.differences:
        yield f"  {in_words(difference)}"
    if (more := found.differing - len(found.differences)) > 0:
        yield f"  and {more:,} more completions that differ"


def _agreement(of: Agreement) -> str:
    if not of.rows:
        return "no row"
    said = f"{of.same:,} of {of.rows:,} rows are the same ({of.same / of.rows:.1%})"
    if of.same == of.rows or not of.tokens:
        return said
    return f"{said}; {of.tokens_alike / of.tokens:.1%} of the tokens come before a difference"
