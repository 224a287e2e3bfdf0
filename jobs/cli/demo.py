"""`specbatch demo`: two runs of the shipped job with the shipped pair, in this process.

The second run gets the same prompts, a quarter of them slightly changed, and drafts from the
outputs of the first. A table shows the time, cost and saving of both side by side. Unchanged
prompts must have the same output in both, bit for bit.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specbatch.jobs.cli.connect import load_settings, silent
from specbatch.jobs.cli.console import complain, out, remark, say, show_whole
from specbatch.jobs.cli.cost import cost_of, signed_usd
from specbatch.jobs.cli.outcome import leave, print_summary
from specbatch.jobs.cli.stores import DEMO as MARKER
from specbatch.pipeline.observe.terminal.summary import JobSummary
from specbatch.pipeline.operations.spec_input import build_spec
from specbatch.pipeline.operations.summaries import summary_of
from specbatch.pipeline.policy.costs.balance import Amount, Sheet, leased, sessions_sheet
from specbatch.pipeline.policy.costs.job_costs import JobCost
from specbatch.pipeline.storage.history_files import HISTORY
from specbatch.schemas.audit import data_uri
from specbatch.schemas.errors import IdempotencyError, MissingExtraError, OutputError, UsageError
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import CompletionRecord, JobRow, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.sqlite_urls import url_of_file

if TYPE_CHECKING:
    import pyarrow as pa

    from specbatch.pipeline.inputs.tokenizer import TextTokenizer
    from specbatch.pipeline.runtime.client import Client

RUNS = (1, 2)
EXAMPLES = 5
SEED = 2024  # of the prompts that change
CHANGED = 0.25  # of all prompts
# Sequences. Models as small as these are bound by arithmetic from a few sequences on, where drafts
# do not pay. One sequence is bound by reading weights, as large models are with many.
AT_ONCE = 1
DIFFERS = 1  # exit code

_INTERVAL = "  its 95 % interval"
_FIGURES = (
    "prompts",
    "drafts come from",
    "sequences at once",
    "tokens",
    "time from start to end",
    "tokens per second",
    "acceptance rate",
    "verified tokens per verifier pass",
    "measured speed-up over depth 0",
    _INTERVAL,
    "cost of drafts, refused ones included",
    "saved by drafts",
    _INTERVAL,
    "cost",
)
_NAME = re.compile(r"\bdef (\w+)")


def demo(
    folder: Annotated[Path, typer.Option(help="folder for everything the demo writes")] = Path(
        "demo-run"
    ),
    max_tokens: Annotated[int, typer.Option(help="most tokens per completion", min=1)] = 64,
    keep: Annotated[
        bool, typer.Option("--keep", help="resume what is in the folder instead of starting afresh")
    ] = False,
) -> None:
    """Run a small job twice on this machine, the second time with the first run's outputs as
    drafts; no server needed."""
    from specbatch.pipeline.bootstrap import make_client, make_store

    check_models()
    folder = folder.absolute()
    prepare(folder, keep)
    settings = demo_settings(folder)
    specs = [demo_spec(folder, max_tokens, number) for number in RUNS]
    with closing(make_store(settings)) as store:
        c = make_client(settings, silent, store)
        done = [run(c, settings, spec, number) for number, spec in zip(RUNS, specs, strict=True)]
        jobs = [job for job, _ in done]
        tokenizer = done[-1][1]
        spread = islice(store.completions(jobs[-1].job_id), 7, None, 51)  # from all over the job
        show_examples(specs[-1], tokenizer, list(spread))
        runs = [Run(summary_of(job, c.progress(job.job_id)), cost_of(store, job)) for job in jobs]
        show_whole(runs_table(runs))
        sessions = store.sessions()
        sheets = [*(run.cost.sheet for run in runs), sessions_sheet(sessions)]
        show_whole(ledger_table(sheets, leased(sessions)))
        same = unchanged_outputs(specs)
        say_where(folder, specs)
    check_same(same)


def run(c: Client, settings: Settings, spec: JobSpec, number: int) -> tuple[JobRow, TextTokenizer]:
    """One run to its end. Leaves the command where that is not a complete output."""
    from specbatch.jobs.cli.checks import check_job
    from specbatch.jobs.cli.local import run_here

    key = f"demo-run-{number}"
    checked = check_job(settings, spec, key, c.is_keys_job)
    try:
        job, _ = c.submit(spec, key)
    except IdempotencyError:
        raise UsageError(
            "the runs in this folder have other options: give the same ones, or leave out --keep"
        ) from None
    drafts = "from run 1's outputs" if number > 1 else f"by {Path(spec.draft_model or 'none').name}"
    remark(f"run {number}, job {job.job_id}: {Path(spec.input.uri).name} through "
           f"{Path(spec.verifier).name}, drafts {drafts}")  # fmt: skip
    run_here(settings, spec, job, how_to_go_on="`specbatch demo --keep`")
    job = c.job(job.job_id)
    if job.state is not JobState.DONE:
        print_summary(c, job.job_id)
        leave(job)
    return job, checked.tokenizer


# --- its folder and its jobs ------------------------------------------------------------------


def prepare(folder: Path, keep: bool) -> None:
    """An empty demo folder, or the one there is. Never removes what the demo did not make.

    Raises `UsageError` for a folder of somebody else, `OutputError` for one out of reach.
    """
    try:
        if folder.exists() and not (folder / MARKER).is_file():
            if not folder.is_dir() or any(folder.iterdir()):
                raise UsageError(
                    f"{folder} was not made by the demo, so it is left alone: name another --folder"
                )
        elif folder.exists() and not keep:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as error:
        why = (error.strerror or "error").lower()
        raise OutputError(f"the demo cannot use {folder}: {why}; name another --folder") from None


def demo_settings(folder: Path) -> Settings:
    """Everything inside the folder, whatever the environment says."""
    return load_settings(
        workspace=str(folder / "work"),
        database_url=url_of_file(folder / "specbatch.db"),
        broker_url="memory://",
        max_concurrent_sequences=AT_ONCE,
    )


def check_models() -> None:
    """Raise `MissingExtraError` where specbatch was installed without the demo's models."""
    if not (_shipped() / "models").is_dir():
        raise MissingExtraError(
            "the demo's models are not installed with specbatch itself: in a checkout of it, "
            "`pip install ./jobs/demo`, or `make demo`"
        )


def demo_spec(folder: Path, max_tokens: int, number: int) -> JobSpec:
    """The shipped spec with its input and output of one run in the folder."""
    flags: dict[str, Any] = {
        "input.uri": str(write_prompts(folder, number)),
        "output.uri": str(folder / f"output-{number}"),
        "sampling.max_tokens": max_tokens,
    }
    if number > RUNS[0]:
        flags["speculation.sources"] = "history"
    return build_spec(_shipped() / "spec.yaml", flags)


def write_prompts(folder: Path, number: int) -> Path:
    """The shipped prompts, in later runs with the names of some functions changed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"prompts-{number}.parquet"
    if path.exists():
        return path  # a resumed job expects the very file that it began with
    table = pq.read_table(_shipped() / "prompts.parquet")
    if number > RUNS[0]:
        texts = with_some_changed(table["prompt"].to_pylist())
        column = table.schema.get_field_index("prompt")
        table = table.set_column(column, "prompt", pa.array(texts))
    unfinished = path.with_suffix(".tmp")
    pq.write_table(table, unfinished)
    unfinished.replace(path)
    return path


def with_some_changed(prompts: Sequence[str]) -> list[str]:
    """A quarter of them, always the same, with another name of the function."""
    changed = set(random.Random(SEED).sample(range(len(prompts)), int(len(prompts) * CHANGED)))
    return [
        _NAME.sub(r"def \g<1>2", text, count=1) if place in changed else text
        for place, text in enumerate(prompts)
    ]


def _shipped() -> Path:
    return Path(str(resources.files("specbatch.jobs.demo")))


# --- what it shows ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its figures and its share of the ledger."""

    summary: JobSummary
    cost: JobCost


def runs_table(runs: Sequence[Run]) -> Table:
    """Both runs side by side."""
    table = Table(title="two runs", title_justify="left")
    table.add_column(style="dim")
    for number in RUNS:
        table.add_column(f"run {number}", justify="right")
    for name, *values in zip(_FIGURES, *(_figures(run) for run in runs), strict=True):
        table.add_row(name, *values)
    return table


def _figures(run: Run) -> list[str]:
    s, saved, sheet = run.summary, run.cost.saved, run.cost.sheet
    return [
        f"{s.progress.rows_total:,}",
        _sources(run.cost.job),
        f"{AT_ONCE}",
        f"{s.progress.completion_tokens:,}",
        _shown(s.wall_sec, "{:.1f} s"),
        _shown(s.tokens_per_sec, "{:,.0f}"),
        _shown(s.progress.acceptance_rate, "{:.1%}"),
        _shown(s.tokens_per_pass, "{:.2f}"),
        *gain(saved)[:2],
        signed_usd(sheet.of(TimeKind.DRAFT, TimeKind.REJECTED).usd),
        *gain(saved)[2:],
        signed_usd(sheet.total.usd),
    ]


def _sources(job: JobRow) -> str:
    if job.report.get(HISTORY):
        return "outputs of run 1"
    return "draft model, n-grams" if job.spec["speculation"]["sources"] == "hybrid" else "nothing"


def gain(saved: Savings | None) -> list[str]:
    """The speed-up and the dollars that drafts saved, each with its interval."""
    if saved is None:
        return ["not measured", "-"] * 2
    shown = [f"{saved.speedup:.2f}×", "one control step", signed_usd(saved.usd), "one control step"]
    if saved.low_usd is not None and saved.high_usd is not None:
        shown[1] = "-"  # its interval is that of the dollars, and the device may cost none
        if saved.taken_usd:
            low, high = (1 + usd / saved.taken_usd for usd in (saved.low_usd, saved.high_usd))
            shown[1] = f"{low:.2f}× to {high:.2f}×"
        shown[3] = f"{signed_usd(saved.low_usd)} to {signed_usd(saved.high_usd)}"
    return shown


def ledger_table(sheets: Sequence[Sheet], paid: Amount) -> Table:
    """Where the device's time went by both runs and by no run, and that all is accounted for."""
    whole = sum(sheets, Sheet())
    table = Table(title="ledger: seconds of the device", title_justify="left")
    table.add_column()
    for heading in (*(f"run {number}" for number in RUNS), "no run", "sum"):
        table.add_column(heading, justify="right")
    for kind in TimeKind:
        table.add_row(kind.value, *(f"{s.of(kind).sec:.3f}" for s in (*sheets, whole)))
    table.add_section()
    table.add_row("sum", *(f"{s.total.sec:.3f}" for s in (*sheets, whole)))
    table.add_row("dollars", *(f"{s.total.usd:.6f}" for s in (*sheets, whole)))
    word = "the ledger balances" if whole.total == paid else "the ledger does NOT balance"
    table.caption = f"leased: {paid.sec:.3f} s, ${paid.usd:.6f}: {word}"
    return table


def show_examples(spec: JobSpec, tokenizer: TextTokenizer, records: list[CompletionRecord]) -> None:
    """Prompts and completions, each token in the colour of its origin."""
    import pyarrow.parquet as pq

    from specbatch.pipeline.observe.terminal.token_view import legend, token_pieces, token_text

    color = out.is_terminal and not out.no_color
    prompts = pq.read_table(spec.input.uri, columns=[spec.input.prompt_column]).column(0)
    for record in records[:EXAMPLES]:
        prompt = Text(str(prompts[record.row_index].as_py()), "cyan" if color else "")
        if NOT_KEPT in record.token_ids:  # by the settings of whoever runs the demo
            shown = Text(record.text)
        else:
            pieces = token_pieces(record.token_ids, tokenizer.decode)
            shown = token_text(pieces, record.origins, color)
        body = Text.assemble(prompt, shown)
        out.print(Panel(body, title=Text(record.row_id), title_align="left"))
    out.print(legend(color))


def say_where(folder: Path, specs: Sequence[JobSpec]) -> None:
    """The paths a user wants next."""
    for spec in specs:
        say(f"output:   {data_uri(spec.output.uri, JobState.DONE)}")
    say(f"database: {folder / 'specbatch.db'}")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# --- whether outputs are the same -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Same:
    """Outputs of prompts that did not change, compared between the runs."""

    compared: int
    differing: tuple[str, ...]  # their ids


def unchanged_outputs(specs: Sequence[JobSpec]) -> Same:
    """Of the published files: what a user gets."""
    first, second = (_outputs(spec) for spec in specs)
    prompts_before, prompts_now = (_prompts(spec) for spec in specs)
    unchanged = [row for row, prompt in prompts_now.items() if prompts_before.get(row) == prompt]
    differing = tuple(row for row in unchanged if first.get(row) != second.get(row, []))
    return Same(len(unchanged), differing)


def check_same(same: Same) -> None:
    """Say how many outputs are the same. Leaves with an error where not all are."""
    equal = same.compared - len(same.differing)
    result = f"{equal:,} of {same.compared:,} unchanged prompts have the same output in both runs"
    if same.differing or not same.compared:
        complain(f"only {result}; these differ: {', '.join(same.differing[:5])}")
        raise typer.Exit(DIFFERS)
    say(f"{result}, bit for bit: text, tokens and log-probabilities")


def _prompts(spec: JobSpec) -> dict[str, str]:
    table = _read(Path(spec.input.uri), "id", spec.input.prompt_column)
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _outputs(spec: JobSpec) -> dict[str, list[Any]]:
    """What was decided for each row, by its id."""
    from specbatch.pipeline.outputs.outputs import read_output

    names = ["id", "text", "token_ids", "logprobs", "finish_reason"]
    columns = (column.to_pylist() for column in read_output(spec.output.uri).select(names).columns)
    return {row_id: rest for row_id, *rest in zip(*columns, strict=True)}


def _read(path: Path, *columns: str) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=list(columns))
