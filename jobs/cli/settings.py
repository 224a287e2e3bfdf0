"""`specbatch settings`: what the environment and the settings file come to."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import out, say_json
from specbatch.kernels import native
from specbatch.schemas.errors import UsageError
from specbatch.schemas.masking import mask_url
from specbatch.schemas.settings import Settings


def settings(
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Print the settings, passwords masked, and how the C kernels run here."""
    found = load_settings()
    values = {**found.masked, "database_url": mask_url(found.store_url)}
    level, reason = _native_level()
    if json:
        say_json({**values, "native_isa": level})
        return
    table = Table("variable", "value", "meaning")
    for name, value in values.items():
        meaning = Settings.model_fields[name].description or ""
        table.add_row(f"SPECBATCH_{name.upper()}", "" if value is None else str(value), meaning)
    table.add_row(native.FORCED_BY, level, f"instruction set of the C kernels: {reason}")
    out.print(table)


def _native_level() -> tuple[str | None, str]:
    try:
        kernels = native.library()
    except native.NativeUnavailableError as error:
        return None, str(error)
    except native.InstructionSetError as error:
        raise UsageError(str(error)) from error
    return kernels.level, kernels.reason
