"""`specbatch bench`: this engine beside others, one JSON and one plot."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli.console import INTERRUPTED, err, out, progress_bar, remark, say
from specbatch.schemas.errors import OutputError, UsageError

if TYPE_CHECKING:
    from specbatch.jobs.bench.side_by_side import Report


class Dtype(StrEnum):
    """What models are loaded as."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def bench(
    model: Annotated[
        str, typer.Option(help="`demo`, `llama-230m` (random weights) or a model folder")
    ] = "demo",
    proposer: Annotated[
        Path | None, typer.Option(help="folder of the model that drafts for --real")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Parquet file of prompts [default: the demo's]")
    ] = None,
    prompt_column: Annotated[str, typer.Option(help="its column with the prompt")] = "prompt",
    prompt_tokens: Annotated[
        int, typer.Option(help="longer prompts are cut to this many tokens")
    ] = 256,
    n: Annotated[
        list[str], typer.Option("--n", help="numbers of prompts at once; a list, or repeat it")
    ] = ["1,8,32"],  # noqa: B006 - typer reads it, nobody writes to it
    acceptance: Annotated[
        list[str], typer.Option(help="of replayed drafts, a list or repeated; `none` for none")
    ] = ["0,0.5,0.9,1"],  # noqa: B006 - as above
    real: Annotated[
        bool, typer.Option("--real", help="draft with the draft model as well")
    ] = False,
    engines: Annotated[
        list[str], typer.Option(help="of ours, transformers, openvino, vllm, llama.cpp; a list")
    ] = ["ours,transformers"],  # noqa: B006 - as above
    new_tokens: Annotated[int, typer.Option(help="tokens per completion")] = 32,
    runs: Annotated[int, typer.Option(help="counted runs, after one that warms up")] = 2,
    dtype: Annotated[Dtype, typer.Option(help="of weights and arithmetic")] = Dtype.BFLOAT16,
    threads: Annotated[
        int | None, typer.Option(help="processor threads [default: torch's]", min=1)
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="folder to keep made and converted models in")
    ] = None,
    output: Annotated[Path, typer.Option("--out", help="folder for the results")] = Path(
        "bench-run"
    ),
) -> None:
    """Measure throughput side by side with other engines, by N and by acceptance of drafts."""
    from specbatch.schemas.extras import require_engine_extra

    require_engine_extra()
    import torch
    from transformers.utils import logging

    from specbatch.jobs.bench.isa import forced_level, restart_held
    from specbatch.jobs.bench.plan import OURS_KEY, Plan
    from specbatch.jobs.bench.side_by_side import run

    plan = Plan(
        model=model,
        proposer=proposer,
        prompts=prompts,
        prompt_column=prompt_column,
        prompt_tokens=prompt_tokens,
        counts=tuple(map(int, numbers("--n", n, whole=True))),
        acceptances=() if acceptance == ["none"] else numbers("--acceptance", acceptance),
        real=real,
        engines=tuple(dict.fromkeys(words(engines))),
        new_tokens=new_tokens,
        runs=runs,
        dtype=str(dtype),
    )
    if plan.engines != (OURS_KEY,):
        restart_held(forced_level(os.environ))
    logging.disable_progress_bar()  # other libraries' bars beside ours
    path = folder_for(output) / "bench.json"
    torch.set_num_threads(threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as temporary, progress() as on_progress:
        report = run(plan, path, (work or Path(temporary)).resolve(), on_progress)
    if report.rows:
        show(report, path)
    if report.interrupted:
        kept = "what was measured until then is kept" if report.rows else "nothing was measured yet"
        remark(f"interrupted: {kept}")
        sys.exit(INTERRUPTED)


def words(values: list[str]) -> list[str]:
    """`["a,b", "c"]` as a, b, c."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def numbers(flag: str, values: list[str], whole: bool = False) -> tuple[float, ...]:
    """A list of numbers, doubles dropped. Raises `UsageError`."""
    found: list[float] = []
    for word in words(values):
        try:
            found.append(int(word) if whole else float(word))
        except ValueError:
            kind, such = ("whole number", "1,8,32") if whole else ("number", "0,0.5,0.9")
            raise UsageError(
                f"{flag}: `{word}` is not a {kind}; give a list such as {such}"
            ) from None
    return tuple(sorted(dict.fromkeys(found)))


def folder_for(output: Path) -> Path:
    """The folder, made if need be. Raises `OutputError`."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(f"--out {output} cannot be made ({reason}): name a folder") from None
    return output


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, or a line after each N, for (runs done, runs in all, what is run)."""
    with progress_bar("") as update:

        def on_progress(done: int, total: int, what: str) -> None:
            update(completed=done, total=total, description=what)
            if what.endswith(" done") and not err.is_terminal:
                remark(f"{what}: {done} of {total} runs")

        yield on_progress


def show(report: Report, path: Path) -> None:
    """The table, what failed, and where the files are."""
    from specbatch.jobs.bench.side_report import HINT, can_plot, plot, remarks, table

    out.print(table(report.rows))
    for line in remarks(report.rows):
        remark(f"failed: {line}")
    say(f"results: {path}")
    drawing = path.with_suffix(".svg")
    if can_plot():
        plot(report.as_json(), drawing)
        say(f"plot:    {drawing}")
    else:
        drawing.unlink(missing_ok=True)  # an earlier run's
        remark(HINT)
