"""`specbatch audit JOB`: is everything as it was written, and would the verifier write it again?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from math import ceil
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import (
    complain,
    progress_bar,
    remark,
    say,
    say_json,
    show_whole,
)
from specbatch.jobs.cli.options import JobId
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.operations.audit import Auditor, ChainAudit, ReplayAudit, is_bad, record_of
from specbatch.pipeline.operations.coverage import Covered
from specbatch.pipeline.operations.tools import make_auditor
from specbatch.schemas.audit import AuditRecord, Correctness, FindingKind
from specbatch.schemas.errors import StoreError, UsageError

FOUND = 3  # exit code
DEFAULT_SHARE = "2%"


def audit(
    job: JobId,
    sample: Annotated[
        str, typer.Option("--sample", help="share of completions to replay: 2%, 0.02; 0: none")
    ] = DEFAULT_SHARE,
    seed: Annotated[int, typer.Option("--seed", help="seed of the sample")] = 0,
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier", help="folder of the job's verifier, if it moved", show_default=False
        ),
    ] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="anchor the current end of the log if all is intact")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Check a job's audit log and everything it records, and replay some completions."""
    settings, share = load_settings(), share_of(sample)
    with closing(make_store(settings)) as store:
        auditor = make_auditor(settings, store)
        with progress_bar("completions") as update:
            chain = auditor.chain(job, lambda count: update(advance=count))
        with progress_bar("replayed", ceil(share * len(chain.to_replay))) as update:
            replayed = auditor.replay(
                chain, share, seed, verifier, lambda count: update(advance=count)
            )
        if anchor:
            _anchor(auditor, chain, replayed)
        record = record_of(chain, replayed)
        try:
            auditor.keep(chain, replayed)
        except StoreError as error:
            remark(f"this audit could not be kept: {error}")
    if json:
        say_json(as_json(chain, replayed, record))
    else:
        for line in report_lines(chain, replayed, record):
            say(line)
        show_whole(coverage_table(chain.covered(replayed.sampled)))
        say(correctness_line(replayed.correctness, replayed.tokens))
    if replayed.problem is not None:
        complain(f"nothing was replayed: {replayed.problem}")
    if is_bad(record.findings, replayed.is_fast):
        raise typer.Exit(FOUND)
    if replayed.problem is not None:
        raise typer.Exit(replayed.problem.exit_code)


def _anchor(auditor: Auditor, chain: ChainAudit, replayed: ReplayAudit) -> None:
    """An end of which something is wrong is not vouched for."""
    if is_bad((*chain.findings, *replayed.findings), replayed.is_fast):
        complain("nothing was anchored, for the audit found something")
        return
    auditor.anchor(chain)


def share_of(text: str) -> float:
    """`2%` and `0.02` are the same. Raises `UsageError`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--sample {text!r} is not a share: use 2%, or a number from 0 to 1")
    return share


def report_lines(chain: ChainAudit, replays: ReplayAudit, record: AuditRecord) -> Iterator[str]:
    """One line per finding, then what was checked."""
    for finding in record.findings:
        yield f"{finding.kind}: {finding.what}"
    if chain.left_out:
        yield f"... and {chain.left_out:,} more like these"
    counts, entries = chain.counts, chain.facts.entries
    kinds = {finding.kind for finding in record.findings}
    state = "intact" if chain.intact else "NOT intact"
    if kinds == {FindingKind.OUTPUT} and not chain.left_out:
        state += " (its output differs, the log does not)"
    purged = f", {counts.purged:,} of them purged" if counts.purged else ""
    yield f"log of job {chain.job_id}: {entries:,} entries, {counts.completions:,} completions" + (
        f"{purged}: {state}"
    )
    for text in chain.remarks:
        yield f"note: {text}"
    if chain.facts.entries and chain.facts.is_open():
        yield "the job is not published yet: there is no output to compare"
    for why, count in replays.skipped.items():
        yield f"not replayed: {count:,}, for each {why}"
    for text, count in replays.notes.items():
        yield f"note: {count:,} completions were {text}"


def coverage_table(rows: Sequence[Covered]) -> Table:
    """What was compared, and what an audit cannot know."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("what", "covered", "how"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.what, row.extent, Text(row.how))
    return table


def correctness_line(found: Correctness, tokens: int | None = None) -> str:
    """The share of audited completions in which nothing differs."""
    if found.share is None:
        return "correctness: no completion was replayed"
    of = f"{found.audited:,} completions"
    if tokens is not None:
        of += f", {tokens:,} tokens"
    return f"correctness: {found.share:.2%} of {of}; {found.differing:,} with a difference"


def as_json(chain: ChainAudit, replays: ReplayAudit, record: AuditRecord) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "job": chain.job_id,
        "intact": chain.intact,
        "entries": chain.facts.entries,
        "completions": chain.counts.completions,
        "purged": chain.counts.purged,
        "older_than_log": chain.counts.uncovered,
        "replayed": replays.sampled,
        "differing": replays.differing,
        "tokens": replays.tokens,
        "correctness": replays.correctness.share,
        "findings": [asdict(finding) for finding in record.findings],
        "findings_left_out": chain.left_out,
        "note": record.note,
        "published": chain.facts.published,
        "anchored": chain.anchors.last is not None and chain.anchors.last.number,
        "covered": [asdict(row) for row in chain.covered(replays.sampled)],
    }
