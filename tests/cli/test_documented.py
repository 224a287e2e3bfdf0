"""Every command and option explains itself, and the README names none that is not there.

The reference of all of them is made from the code; `tests/docs` holds it and the pages to that.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from specbatch.jobs.cli.main import SENTENCES, app
from support.tree import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS: dict[str, Any] = dict(vars(typer.main.get_command(app))["commands"])
OPTIONS = [
    (name, option)
    for name, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option" and "--help" not in option.opts
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_which_begins_as_in_the_list_of_commands(name: str) -> None:
    assert " ".join(COMMANDS[name].help.partition("\n\n")[0].split()) == SENTENCES[name]


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{n} {o.opts[0]}" for n, o in OPTIONS])
def test_every_option_has_help(name: str, option: Any) -> None:
    assert option.help, f"{name} {option.opts[0]} has no help"


def test_every_command_and_option_of_the_readme_exists() -> None:
    commands = set(re.findall(r"specbatch ([a-z]+(?:-[a-z]+)*)", README))
    known = {*COMMANDS, "is", "runs"}  # verbs of sentences
    assert commands <= known, commands - known
    flags = {flag for _, option in OPTIONS for flag in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README))
    assert named <= flags | {"--help"}, named - flags
