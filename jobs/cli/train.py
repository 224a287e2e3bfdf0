"""`specbatch train`: tomorrow's draft model, from what the store keeps of today's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specbatch.jobs.cli.audit import FOUND
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import (
    if_interrupted,
    progress_bar,
    remark,
    say,
    say_json,
)
from specbatch.jobs.cli.logs import moment_of
from specbatch.jobs.cli.options import Json
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.training import LEAST_EPOCHS, MOST_TOKENS, DataOrder, Parameters


class Export(StrEnum):
    """Who trains instead."""

    SPECULATORS = "speculators"


_DATA, _TRAINING = "Data", "Training"
_DEFAULT = Parameters()
_INTERRUPTED = "interrupted: the same command resumes the training"


def train(
    proposer: Annotated[
        str, typer.Option("--proposer", help="the draft model to begin with: folder or hub id")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="new folder for the trained model; resumes what is in it"),
    ],
    tenant: Annotated[
        str,
        typer.Option("--tenant", help="whose jobs to learn from", rich_help_panel=_DATA),
    ] = "default",
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job",
            help="only jobs of this name or id; repeat for more; default: all of the tenant's",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="only jobs that ended from then on: 2h, 3d ago, or a time: 2026-01-31T02:30",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            help="only jobs that ended until then; default: now",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out",
            help="share of the prompts to learn nothing from, and to judge by",
            min=0.001,
            max=0.9,
            rich_help_panel=_DATA,
        ),
    ] = DataOrder().held_out,
    most_tokens: Annotated[
        int,
        typer.Option(
            "--most-tokens",
            help="of completions; the newest jobs count first",
            min=1,
            rich_help_panel=_DATA,
        ),
    ] = MOST_TOKENS,
    epochs: Annotated[
        float,
        typer.Option(
            "--epochs",
            help="times to go through the data",
            min=LEAST_EPOCHS,
            rich_help_panel=_TRAINING,
        ),
    ] = _DEFAULT.epochs,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            help="steps, in place of epochs",
            min=1,
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            help="highest rate; default: 0.128 divided by the model's width",
            min=0.0,
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            "--batch-tokens",
            help="most tokens of a step, padding included",
            min=1,
            rich_help_panel=_TRAINING,
        ),
    ] = _DEFAULT.batch_tokens,
    distill: Annotated[
        float,
        typer.Option(
            "--distill",
            help="share of recorded probabilities in the target, where jobs asked for "
            "top_logprobs; the rest is the token itself",
            min=0.0,
            max=1.0,
            rich_help_panel=_TRAINING,
        ),
    ] = _DEFAULT.distill,
    seed: Annotated[
        int, typer.Option("--seed", help="of the order of the data", rich_help_panel=_TRAINING)
    ] = _DEFAULT.seed,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cpu or cuda; default: SPECBATCH_DEVICE",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        Export | None,
        typer.Option(
            "--export",
            help="train nothing, and write the data set to --out as this trainer reads it",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fine-tune a draft model on what the store keeps, and say if its drafts are accepted more
    often.

    It learns from outputs of one tenant whose texts are kept whole, and keeps the checkpoint with
    the best held-out accepted length. The exit code is 0 if the model is better than its parent
    beyond the 95 % interval, 3 if not. After Ctrl-C, SIGTERM or a crash the same command resumes to
    the same weights.
    """
    require_engine_extra()
    settings = load_settings()
    order = DataOrder(
        tenant=tenant,
        jobs=tuple(job or ()),
        since=None if since is None else moment_of("--since", since).timestamp(),
        until=None if until is None else moment_of("--until", until).timestamp(),
        held_out=held_out,
        most_tokens=most_tokens,
    )
    parameters = Parameters(
        epochs=epochs,
        steps=steps,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        distill=distill,
        seed=seed,
        device=device or settings.device,
    )
    from specbatch.pipeline.learning import wiring
    from specbatch.pipeline.learning.training import Watcher

    with (
        closing(make_store(settings)) as store,
        if_interrupted(_INTERRUPTED),
        progress_bar("reading completions") as update,
        wiring.stop_signals() as stopped,
    ):
        watcher = Watcher(
            remark,
            lambda done, total: update(completed=done, total=total),
            lambda done, total: update(description="training", completed=done, total=total),
            stopped.is_set,
        )
        if export is None:
            record = wiring.train(settings, store, proposer, out, order, parameters, watcher)
        else:
            record = wiring.export(settings, store, proposer, out, order, watcher)
    if json:
        say_json(record)
    elif export is not None:
        say(f"{out}: " + ", ".join(f"{n:,} rows in {name}" for name, n in record["files"].items()))
    else:
        for line in summary(record, out):
            say(line)
    if export is None and not record["better"]:
        raise typer.Exit(FOUND)


def summary(record: dict[str, Any], out: Path) -> Iterator[str]:
    """The data, the figures and the verdict, a line each."""
    data, held_out = record["data"], record["held_out"]
    train, judging = data["train"], data["judging"]
    jobs = len(record["jobs"])
    yield (
        f"learned from {train['tokens']:,} tokens of {train['prompts']:,} prompts in {jobs:,} "
        f"job{'s' if jobs != 1 else ''}: {record['steps']:,} steps, best after "
        f"{record['best_step']:,}"
    )
    words = {
        "acceptance": "acceptance",
        "accepted_length": f"accepted tokens per pass at depth {held_out['depth']}",
    }
    for name, text in words.items():
        figure = held_out[name]
        of = figure["difference"]
        yield (
            f"{text}: {figure['parent']['value']:.3f} before, "
            f"{figure['candidate']['value']:.3f} after: {of['value']:+.3f} "
            f"(95 %: {of['low']:+.3f} to {of['high']:+.3f}), on {judging['tokens']:,} tokens of "
            f"{judging['prompts']:,} held-out prompts"
        )
    from specbatch.pipeline.learning.training import verdict_of

    yield (
        f"{out}: {verdict_of(record)} than its parent "
        f"(fingerprint {record['model']['digest'][:12]})"
    )
