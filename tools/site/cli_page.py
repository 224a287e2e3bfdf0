"""The page of all commands, from the typer app."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from specbatch.jobs.cli.main import app
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
`specbatch COMMAND --help` prints the same. `submit-job` is also a program of its own. Results go
to stdout, progress and remarks to stderr; an error is one line, `error: …`, and one of these
[exit codes](errors.md).
"""


def commands() -> Mapping[str, Any]:
    """Every command by its name, as click has it."""
    return dict(vars(typer.main.get_command(app))["commands"])


def cli_page() -> str:
    """Every command with its arguments and options."""
    parts = [_of_command(name, command) for name, command in commands().items()]
    rows = [
        (f"[`specbatch {name}`](#{name})", plain(first_sentence(command.help or "")))
        for name, command in commands().items()
    ]
    return page("Commands", _INTRO, table(("command", "what it does"), rows), *parts)


def first_sentence(text: str) -> str:
    """Up to the first full stop, without it."""
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def _of_command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(["specbatch", name, *(_metavar(a) for a in arguments)])
    shown = f"    {usage} [OPTIONS]" if options else f"    {usage}"
    parts = [plain(command.help or ""), shown]
    if arguments:
        rows = [(code(_metavar(a)), plain(getattr(a, "help", "") or "")) for a in arguments]
        parts.append(table(("argument", "meaning"), rows))
    if options:
        parts.append(table(("option", "takes", "default", "meaning"), map(_row, options)))
    return section(f"`specbatch {name}`", *parts, anchor=name)


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _row(option: Any) -> tuple[str, ...]:
    return (
        " ".join(code(name) for name in (*option.opts, *option.secondary_opts)),
        "" if option.is_flag else _takes(option.type_descriptor.annotation),
        "**required**" if option.required else _default(option.default),
        plain(option.help or ""),
    )


def _takes(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return f"{_takes(get_args(annotation)[0])}, repeatable"
    if issubclass(annotation, Enum):
        return ", ".join(code(choice.value) for choice in annotation)
    words = {str: "text", int: "integer", float: "number", Path: "path"}
    return words[annotation]


def _default(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    return code(getattr(value, "value", value))
