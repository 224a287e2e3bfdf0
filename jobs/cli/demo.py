"""`specbatch demo`: the shipped job with the shipped pair, in this process, from scratch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.text import Text

from specbatch.jobs.cli.connect import load_settings, silent
from specbatch.jobs.cli.console import out, remark, say
from specbatch.jobs.cli.outcome import leave, print_summary
from specbatch.pipeline.operations.spec_input import build_spec
from specbatch.schemas.errors import MissingExtraError, OutputError, UsageError
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec

if TYPE_CHECKING:
    from specbatch.pipeline.operations.preflight import Checked

MARKER = ".specbatch-demo"
EXAMPLES = 5
KEY = "demo"


def demo(
    folder: Annotated[Path, typer.Option(help="where everything goes")] = Path("demo-run"),
    max_tokens: Annotated[int, typer.Option(help="most tokens per completion", min=1)] = 64,
    keep: Annotated[
        bool, typer.Option("--keep", help="go on with what is in the folder, do not start afresh")
    ] = False,
) -> None:
    """Run a small job from start to end on this machine; no server needed."""
    from specbatch.jobs.cli.local import run_here
    from specbatch.jobs.cli.preflight import check_job
    from specbatch.pipeline.bootstrap import make_client, make_store

    check_models()
    folder = folder.absolute()
    prepare(folder, keep)
    settings = demo_settings(folder)
    spec = demo_spec(folder, max_tokens)
    store = make_store(settings)
    try:
        c = make_client(settings, silent, store)
        checked = check_job(settings, spec, KEY, c.is_keys_job)
        job, _ = c.submit(spec, KEY)
        remark(f"job {job.job_id}: {Path(spec.input.uri).name} through {Path(spec.verifier).name}, "
               f"drafts by {Path(spec.proposer or 'none').name}")  # fmt: skip
        run_here(settings, spec, job, how_to_go_on="`specbatch demo --keep`")
        print_summary(c, job.job_id)
        show_examples(spec, checked, list(_spread(store.completions(job.job_id))))
        say_where(folder, spec)
        leave(c.job(job.job_id))
    finally:
        store.close()


def prepare(folder: Path, keep: bool) -> None:
    """An empty demo folder, or the one there is. Never removes what the demo did not make.

    Raises `UsageError` for a folder of somebody else, `OutputError` for one out of reach.
    """
    try:
        _prepare(folder, keep)
    except OSError as error:
        why = (error.strerror or "error").lower()
        raise OutputError(f"the demo cannot use {folder}: {why}; name another --folder") from None


def _prepare(folder: Path, keep: bool) -> None:
    if folder.exists() and not (folder / MARKER).is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageError(
                f"{folder} was not made by the demo, so it is left alone: name another --folder"
            )
    elif folder.exists() and not keep:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def demo_settings(folder: Path) -> Settings:
    """Everything inside the folder, whatever the environment says."""
    return load_settings(
        workspace=str(folder / "work"),
        database_url=f"sqlite:///{folder / 'specbatch.db'}",
        broker_url="memory://",
    )


def check_models() -> None:
    """Raise `MissingExtraError` where specbatch was installed without the demo's models."""
    if not (_shipped() / "models").is_dir():
        raise MissingExtraError(
            "the demo's models are not installed with specbatch itself: in a checkout of it, "
            "`pip install ./jobs/demo`, or `make demo`"
        )


def demo_spec(folder: Path, max_tokens: int) -> JobSpec:
    """The shipped spec with its output in the folder."""
    flags = {"output.uri": str(folder / "output"), "sampling.max_tokens": max_tokens}
    return build_spec(_shipped() / "spec.yaml", flags)


def _shipped() -> Path:
    return Path(str(resources.files("specbatch.jobs.demo")))


def _spread(completions: Iterator[CompletionRecord]) -> Iterator[CompletionRecord]:
    """A few completions from all over the job."""
    return islice(completions, 7, None, 51)


def show_examples(spec: JobSpec, checked: Checked, records: list[CompletionRecord]) -> None:
    """Prompts and completions, each token in the colour of its origin."""
    import pyarrow.parquet as pq

    from specbatch.pipeline.observe.terminal.token_view import legend, token_pieces, token_text

    color = out.is_terminal and not out.no_color
    decode = checked.tokenizer.decode_batch
    prompts = pq.read_table(spec.input.uri, columns=[spec.input.prompt_column]).column(0)
    for record in records[:EXAMPLES]:
        prompt = Text(str(prompts[record.row_index].as_py()), "cyan" if color else "")
        if NOT_KEPT in record.token_ids:  # by the settings of who looks at the demo
            shown = Text(record.text)
        else:
            shown = token_text(token_pieces(record.token_ids, decode), record.origins, color)
        body = Text.assemble(prompt, shown)
        out.print(Panel(body, title=Text(record.row_id), title_align="left"))
    out.print(legend(color))


def say_where(folder: Path, spec: JobSpec) -> None:
    """The paths a user wants next."""
    for part in sorted(Path(spec.output.uri).glob("part-*.parquet")):
        say(f"output:   {part}")
    say(f"database: {folder / 'specbatch.db'}")
