"""`specbatch`: all commands under one name. A command's module is imported when it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from specbatch.jobs.cli.console import new_app, run, say

# In the order of `--help`. A sentence here is the first line of the command's own help.
SENTENCES = {
    "submit-job": "Turn prompts into verified, recorded completions.",
    "jobs": "List jobs, newest first.",
    "show": "Show a job's state, progress, costs, errors, quarantined rows and decisions about "
    "drafts.",
    "results": "Print the first completions of a job, from its output or from the store.",
    "diff": "Compare the outputs of two jobs row by row; exit with 1 if they differ.",
    "watch": "Follow a job to its end; Ctrl-C stops watching, not the job.",
    "logs": "Print what workers logged about a job.",
    "cost": "Show where seconds and dollars went, what tokens and documents cost, and what was "
    "saved.",
    "figures": "Show acceptance, tokens, cost per 1,000, savings and the month's forecast, week by "
    "week.",
    "spend": "Show what devices cost this month and will have cost at its end; exit with 3 above a "
    "limit.",
    "acceptance": "Show how many drafts a job's nights accepted, by proposer and tag, and what "
    "falls slowly.",
    "mismatches": "Show which draft tokens verifiers refused most, and on rows of which tags or "
    "languages.",
    "report": "Write a job's report: one HTML file with its costs, figures, decisions and some "
    "outputs.",
    "cancel": "Ask a job to stop: finished rows are kept, the others left beside the output as a "
    "job.",
    "retry": "Send a job's failed and cancelled groups, or only its quarantined rows, back to "
    "work.",
    "review": "List the completions of a job that policies hold back for review; release or block "
    "them.",
    "spot-check": "Let another model write a share of a job's rows again, and tell how many are "
    "the same.",
    "pick": "Let a small model write candidates, and write the best of them or the verifier's own.",
    "drafting": "Switch drafting off while jobs run, for everything or a part; switch it on again; "
    "list both.",
    "models": "Register draft models, promote one for all or some rows, roll back, retire; list "
    "and show.",
    "rollout": "Try a candidate draft model on a growing share of groups; promote it if it earns "
    "more.",
    "purge": "Delete the stored texts of ended jobs; counts, costs and the audit log stay.",
    "audit": "Check a job's audit log and everything it records, and replay some completions.",
    "replay": "Write one completion again, nothing drafted, and compare tokens, "
    "log-probabilities, text.",
    "export": "Write completions, tokens, corrections, costs or device time of a job as Parquet.",
    "train": "Fine-tune a draft model on what the store keeps, and say if its drafts are accepted "
    "more often.",
    "learn": "Train the deployed draft model on what the store keeps, try it, and roll it out if "
    "it is better.",
    "worker": "Run a worker. `verify` needs --verifier, `propose` needs --proposer; each may "
    "have both.",
    "serve": "Serve files and batches over HTTP as OpenAI does, to its own clients.",
    "api-keys": "Make, list and revoke the API keys of `specbatch serve`.",
    "tenants": "Show what tenants have spent, reserved and left; set and remove their budgets.",
    "scheduler": "Run what schedule files say when its time comes. Several may run at once.",
    "schedules": "List schedules: when each is due next, and the result of its last run.",
    "top": "Watch workers, queues and jobs until Ctrl-C. Prints once if stdout is not a terminal.",
    "demo": "Run a small job twice on this machine, the second time with the first run's outputs "
    "as drafts; no server needed.",
    "bench": "Measure throughput side by side with other engines, by N and by acceptance of "
    "drafts.",
    "chaos": "Kill, freeze and cut off workers at seeded points; exit with 1 unless nothing was "
    "lost.",
    "notify": "Send what targets have not heard of yet; workers do this by themselves.",
    "doctor": "Look at this machine and the settings, and say what to do where something is wrong.",
    "migrate": "Make the store's tables and roles, or bring them up to date.",
    "completion": "Print a script that completes commands, options and jobs in a shell.",
    "settings": "Print the settings, passwords masked, and how the C kernels run here.",
}


@cache
def _command(name: str) -> TyperCommand:
    """The command of this name, with its options; imports its module."""
    function = name.replace("-", "_")
    alone = new_app("")
    alone.command()(getattr(import_module(f"specbatch.jobs.cli.{function}"), function))
    return cast(TyperCommand, typer.main.get_command(alone))


class _Commands(Mapping[str, TyperCommand]):
    """The commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in SENTENCES:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SENTENCES)

    def __len__(self) -> int:
        return len(SENTENCES)


class _Group(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Commands())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._only_named():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._only_named():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _only_named(self) -> Iterator[None]:
        """Names and sentences are enough in the block, so no module is imported."""
        whole = self.commands
        self.commands = {name: TyperCommand(name, help=text) for name, text in SENTENCES.items()}
        try:
            yield
        finally:
            self.commands = whole


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"specbatch {version('specbatch')}")
        raise typer.Exit


app = new_app("Batch generation with speculative decoding: exact, durable, auditable.", _Group)


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Options before a command's name."""


def main() -> None:
    """The `specbatch` command."""
    run(app, "specbatch")
