"""`specbatch learn`: trains, tries and rolls out a draft model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import (
    if_interrupted,
    progress_bar,
    remark,
    say,
    say_json,
)
from specbatch.jobs.cli.options import Json
from specbatch.jobs.cli.rollout import DEFAULT_PERCENTS, shares_in
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.training import LEAST_EPOCHS, DataOrder, Parameters
from specbatch.schemas.uris import model_ref

_INTERRUPTED = "interrupted: the same command resumes"
_DATA, _DEFAULT = DataOrder(), Parameters()


def learn(
    name: Annotated[str, typer.Argument(help="the draft model's name in the registry")],
    verifier: Annotated[
        str, typer.Option("--verifier", help="the model whose drafts it writes: folder or hub id")
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="where trained models go, a folder each")
    ] = Path("trained"),
    tenant: Annotated[
        str, typer.Option("--tenant", help="whose jobs to learn from, and to draft for")
    ] = _DATA.tenant,
    job: Annotated[
        str,
        typer.Option("--job", help="only jobs of this name", show_default=False),
    ] = "",
    night: Annotated[
        str | None,
        typer.Option(
            "--night", help="names the model's folder; default: today in UTC", show_default=False
        ),
    ] = None,
    steps: Annotated[
        str,
        typer.Option("--steps", help="of the rollout: percent of groups, one after the other"),
    ] = DEFAULT_PERCENTS,
    held_out: Annotated[
        float,
        typer.Option("--held-out", help="share of the prompts to judge by", min=0.001, max=0.9),
    ] = _DATA.held_out,
    epochs: Annotated[
        float, typer.Option("--epochs", help="times to go through the data", min=LEAST_EPOCHS)
    ] = _DEFAULT.epochs,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu or cuda; default: SPECBATCH_DEVICE", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Train the deployed draft model on what the store keeps, try it, and roll it out if it is
    better.

    What the last rollout found better is promoted first. The candidate of one in progress is
    trained further, and what is better still takes its place.
    The schedule kind `learn` does the same every night.
    """
    require_engine_extra()
    settings = load_settings()
    from specbatch.pipeline.learning.nightly import LearnOrder, learn
    from specbatch.pipeline.learning.training import Watcher
    from specbatch.pipeline.learning.wiring import stop_signals

    order = LearnOrder(
        *(name, model_ref(verifier, Path.cwd()), folder, tenant, job, shares_in(steps)),
        held_out=held_out,
        parameters=Parameters(epochs=epochs, device=device or settings.device),
    )
    tonight = night or datetime.now(UTC).strftime("%Y-%m-%d")
    with (
        closing(make_store(settings)) as store,
        if_interrupted(_INTERRUPTED),
        progress_bar("reading completions") as update,
        stop_signals() as stopped,
    ):
        watcher = Watcher(
            remark,
            lambda done, total: update(completed=done, total=total),
            lambda done, total: update(description="training", completed=done, total=total),
        )
        learned = learn(settings, store, order, tonight, stopped.is_set, watcher)
    if json:
        say_json(asdict(learned))
    else:
        say(learned.summary)
