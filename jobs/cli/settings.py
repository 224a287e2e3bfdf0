"""`specbatch settings`: what the environment and the settings file come to."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import out, say_json
from specbatch.schemas.masking import mask_url
from specbatch.schemas.settings import Settings


def settings(
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Print the settings, passwords masked."""
    found = load_settings()
    values = {**found.masked, "database_url": mask_url(found.store_url)}
    if json:
        say_json(values)
        return
    table = Table("variable", "value", "meaning")
    for name, value in values.items():
        meaning = Settings.model_fields[name].description or ""
        table.add_row(f"SPECBATCH_{name.upper()}", "" if value is None else str(value), meaning)
    out.print(table)
