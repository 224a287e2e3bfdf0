"""Settings by keyword arguments, and the store and broker that they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from specbatch.jobs.cli.connect import load_settings
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import OLD_NAMES, Settings


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings of the environment; `values` win, unless they are None.

    Raises `UsageError` for a setting that there is not, or whose value is wrong.
    """
    known = {*Settings.model_fields, *OLD_NAMES}
    for name in values:
        if name not in known:
            near = get_close_matches(name, sorted(known), 1)
            meant = f" (did you mean `{near[0]}`?)" if near else ""
            raise UsageError(
                f"unknown setting `{name}`{meant}; `specbatch settings` lists what there is"
            )
    return load_settings(**{name: value for name, value in values.items() if value is not None})
