"""Where a store lies on this machine: made for whom it is meant, and looked at once."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import islice
from pathlib import Path

from specbatch.pipeline.ledger.engine_factory import parse_url
from specbatch.schemas.file_modes import Access, make_folder, new_file, wide
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

LOOKED_AT = 16  # of the workspace's files: one tells enough

_told: set[Path] = set()  # of which this process has said that others can read it


def make_place(settings: Settings) -> None:
    """Make the SQLite file, whose neighbours get its mode, before SQLite would; warn of what others
    can read. Whoever opens the store says what is wrong with its place."""
    url = parse_url(settings.store_url)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        path = Path(url.database).absolute()
        with suppress(OSError):
            make_folder(path.parent, settings.store_mode, path.parent)
            new_file(path, settings.store_mode).close()
        _warn(path.parent, path, settings.store_mode)
    if "://" not in settings.workspace:
        folder = Path(settings.workspace)
        with suppress(OSError):  # there is none yet
            for path in islice(folder.iterdir(), LOOKED_AT):
                _warn(folder, path, settings.store_mode)


def _warn(folder: Path, path: Path, access: Access) -> None:
    """Others read a file that is for them in a folder that they may enter."""
    if folder in _told or not (wide(path, access) and wide(folder, access)):
        return
    _told.add(folder)
    others = "go" if access is Access.PRIVATE else "o"
    log.warning(
        "other users of this machine can read %s: run `chmod -R %s= %s`, or set "
        "SPECBATCH_STORE_MODE to %s if they are meant to",
        *(path, others, folder, "group or umask" if access is Access.PRIVATE else "umask"),
    )
