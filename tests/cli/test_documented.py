"""Every command and option explains itself, and the README tells of each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from specbatch.jobs.cli.main import app
from specbatch.schemas.arrow import OUTPUT
from specbatch.schemas.settings import Settings
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
def test_every_command_has_help_and_a_line_in_the_readme(name: str) -> None:
    assert COMMANDS[name].help
    assert f"`specbatch {name}`" in README


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{n} {o.opts[0]}" for n, o in OPTIONS])
def test_every_option_has_help_and_is_in_the_readme(name: str, option: Any) -> None:
    assert option.help, f"{name} {option.opts[0]} has no help"
    assert f"`{option.opts[0]}`" in README


def test_every_command_and_option_of_the_readme_exists() -> None:
    commands = set(re.findall(r"specbatch ([a-z]+(?:-[a-z]+)*)", README))
    known = {*COMMANDS, "turns"}  # "specbatch turns a Parquet file into ..."
    assert commands <= known, commands - known
    flags = {flag for _, option in OPTIONS for flag in (*option.opts, *option.secondary_opts)}
    others = {"--index-url", "--nproc-per-node", "--no-python"}  # of pip and torchrun
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README))
    assert named <= flags | others, named - flags - others


def test_the_readme_has_every_setting_and_its_default() -> None:
    for name, field in Settings.model_fields.items():
        (line,) = [x for x in README.splitlines() if x.startswith(f"| `SPECBATCH_{name.upper()}`")]
        if isinstance(field.default, int | float):
            assert float(line.split("|")[2]) == field.default


def test_the_readme_has_every_column_of_the_output() -> None:
    section = README.split("## The output")[1].split("Rows that cannot be done")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == OUTPUT.names


def test_the_readme_has_every_quarantine_code() -> None:
    from specbatch.pipeline.ingest import rows

    assert rows.__doc__
    codes = re.findall(r"^    ([a-z_0-9]+)  +\w", rows.__doc__, re.MULTILINE)
    missing = [code for code in codes if code != "code" and f"`{code}`" not in README]
    assert len(codes) > 10
    assert not missing
