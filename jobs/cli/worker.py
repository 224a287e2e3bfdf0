"""`specbatch worker KIND`: a worker process, until a signal ends it."""

from __future__ import annotations

import logging
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import check_broker_url, load_settings
from specbatch.jobs.cli.console import remark
from specbatch.jobs.cli.second_process import KINDS as SECOND_KINDS
from specbatch.jobs.cli.second_process import SecondProcess
from specbatch.pipeline.bootstrap import make_store, with_proposer
from specbatch.schemas.errors import UsageError
from specbatch.schemas.masking import mask_url
from specbatch.schemas.registry import PREFIX
from specbatch.schemas.settings import VLLM, Settings
from specbatch.schemas.uris import model_ref
from specbatch.schemas.vllm_proposer import VllmProposer, read_proposer

if TYPE_CHECKING:
    from specbatch.pipeline.learning.watching import ModelWatch


class Kind(StrEnum):
    """What a worker does."""

    INGEST = "ingest"
    PROPOSE = "propose"
    VERIFY = "verify"
    RECORD = "record"
    ALL = "all"


def worker(
    kind: Annotated[Kind, typer.Argument(help="what it does", show_default=False)],
    verifier: o.Verifier = None,
    proposer: o.Proposers = None,
    concurrency: Annotated[
        int, typer.Option(help="groups it holds at once; they share one fused batch", min=1)
    ] = 16,
    engine: o.Engine = None,
) -> None:
    """Run a worker. `verify` needs --verifier, `propose` needs --proposer; each may have both.

    A verifier may have several draft models: give --proposer once for each. They are asked by what
    their drafts were worth and cost, row tag by row tag.
    """
    settings = o.with_engine(load_settings(), engine)
    proposers = proposers_of(kind, proposer or [])
    if own := vllm_proposer_of(kind, proposers):
        settings, proposers = with_proposer(settings, own), []
    watch = None
    if any(ref.startswith(PREFIX) for ref in proposers):
        if kind is not Kind.VERIFY:
            raise UsageError(f"--proposer {PREFIX}NAME is for `specbatch worker verify`")
        watch = registered(settings, proposers, verifier)
        proposers = watch.loaded
        if settings.tensor_parallel > 1:
            watch = None  # `torchrun` alone can start the processes anew that share a verifier
    kinds = kinds_of(kind, verifier, proposers[0] if proposers else None)
    check_broker_url(settings)
    if settings.engine == VLLM and kind is Kind.VERIFY and proposers:
        raise UsageError(
            "engine vllm has no local draft model: leave --proposer out and start "
            "`specbatch worker propose` for it, or name vLLM's own speculation: --proposer "
            '\'{"kind": "draft_model", "model": "FOLDER"}\''
        )
    served = model_ref(verifier, Path.cwd()) if verifier and verifier != "none" else None
    drafting = tuple(model_ref(ref, Path.cwd()) for ref in proposers)
    for name in ("celery", "specbatch"):
        logging.getLogger(name).setLevel(logging.INFO)
    remark(f"worker for {', '.join(kinds)} on {mask_url(settings.broker_url)}; Ctrl-C ends it")
    from specbatch.workers.lifecycle import run_worker
    from specbatch.workers.shutdown import start_anew

    if kind is not Kind.ALL or settings.tensor_parallel > 1:
        if run_worker(settings, kinds, served, drafting, concurrency, watch=watch):
            start_anew()
        return
    with closing(SecondProcess(settings, concurrency)):
        kinds = tuple(name for name in kinds if name not in SECOND_KINDS)
        run_worker(settings, kinds, served, drafting, concurrency)


def proposers_of(kind: Kind, given: list[str]) -> list[str]:
    """The draft models. Raises `UsageError` where there are more than the kind can serve."""
    named = [ref for ref in given if ref not in ("", "none")]
    if named and len(named) < len(given):
        raise UsageError(f"--proposer none and --proposer {named[0]} exclude each other")
    if kind is not Kind.VERIFY and kind is not Kind.ALL and len(named) > 1:
        raise UsageError(
            f"`specbatch worker {kind}` serves one --proposer: start one worker for each; several "
            "are for `specbatch worker verify`"
        )
    return named


def vllm_proposer_of(kind: Kind, proposers: list[str]) -> VllmProposer | None:
    """vLLM's own speculation, where `--proposer` has its JSON. Raises `UsageError`."""
    own = [one for one in map(read_proposer, proposers) if isinstance(one, VllmProposer)]
    if not own:
        return None
    if kind not in (Kind.VERIFY, Kind.ALL):
        raise UsageError(
            f"proposer kind {own[0].kind} is vLLM's own speculation, beside the verifier: it is "
            "for `specbatch worker verify`"
        )
    if len(proposers) > 1:
        raise UsageError(
            f"proposer kind {own[0].kind} is vLLM's own speculation, which stands alone: leave "
            "other --proposer out"
        )
    return own[0].at(Path.cwd())


def registered(settings: Settings, proposers: list[str], verifier: str | None = None) -> ModelWatch:
    """The draft models, with those deployed of registered ones (`models:NAME`) in their place."""
    from specbatch.pipeline.learning.watching import ModelWatch

    with closing(make_store(settings)) as store:
        return ModelWatch(store, proposers, verifier)


def kinds_of(kind: Kind, verifier: str | None, proposer: str | None) -> tuple[str, ...]:
    """The kinds of work. Raises `UsageError` when a model is missing."""
    proposes = proposer not in (None, "", "none")
    if kind in (Kind.VERIFY, Kind.ALL) and verifier in (None, "", "none"):
        raise UsageError(f"`specbatch worker {kind}` needs --verifier, the model it serves")
    if kind is Kind.PROPOSE and not proposes:
        raise UsageError("`specbatch worker propose` needs --proposer, the model it serves")
    if kind is not Kind.ALL:
        return (str(kind),)
    return ("ingest", "propose", "verify", "record") if proposes else ("ingest", "verify", "record")
