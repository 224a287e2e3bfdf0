"""The store that a command looks into when nobody has named one: the current folder's, or a demo's.

Only for commands that look. What submits, runs or deletes takes the settings as they are.
"""

from __future__ import annotations

from pathlib import Path

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import remark
from specbatch.schemas.settings import Settings
from specbatch.schemas.sqlite_urls import file_of_url, url_of_file

NAME = "specbatch.db"
DEMO = ".specbatch-demo"  # a file in each folder that the demo made


def found_settings(always_say: bool = False) -> Settings:
    """The settings. If they name no store, the default one, or else one that is found here.

    Says on stderr which store that is, unless it is the default; `always_say`: then too.
    """
    settings = load_settings()
    if is_named(settings):
        return settings
    file = file_of_url(settings.store_url)
    other = None if file is None or file.exists() else other_store(Path.cwd())
    if other is not None:
        file, workspace = other
        settings = load_settings(database_url=url_of_file(file), workspace=str(workspace))
    if other is not None or always_say:
        remark(f"store: {file}")
    return settings


def is_named(settings: Settings) -> bool:
    """Whether the environment or the settings file says where the store is."""
    return bool(settings.database_url) or "workspace" in settings.model_fields_set


def other_store(folder: Path) -> tuple[Path, Path] | None:
    """A store in this folder or in a demo's below it, with its workspace; the newest demo's."""
    here = folder / NAME
    if here.is_file():
        return here, _workspace(folder)
    demos = [marker.parent for marker in folder.glob(f"*/{DEMO}")]
    there = [demo / NAME for demo in demos if (demo / NAME).is_file()]
    if not there:
        return None
    newest = max(there, key=lambda store: store.stat().st_mtime)
    return newest, _workspace(newest.parent)


def _workspace(folder: Path) -> Path:
    return folder / "work" if (folder / DEMO).is_file() else folder
