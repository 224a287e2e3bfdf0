"""`specbatch completion SHELL`: what a shell needs to complete our commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from specbatch.jobs.cli.console import PROGRAMS, complete_variable, write


class Shell(StrEnum):
    """Shells that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="the shell it is for", show_default=False)],
) -> None:
    """Print a script that completes commands, options and jobs in a shell.

    It is for `specbatch` and `submit-job`. bash and zsh: eval "$(specbatch completion bash)", in
    ~/.bashrc or ~/.zshrc. fish: specbatch completion fish | source
    """
    from typer._completion_shared import get_completion_script  # typer offers it by options only

    for program in PROGRAMS:
        script = get_completion_script(
            prog_name=program, complete_var=complete_variable(program), shell=str(shell)
        )
        write(f"{script}\n")
