"""Where a store lies on this machine: made for whom it is meant, and looked at once."""

from __future__ import annotations

import logging
import shlex
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from specbatch.pipeline.ledger.sql.engine_factory import parse_url
from specbatch.schemas.file_modes import Access, make_folder, new_file, wide
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

LOOKED_AT = 16  # of the workspace's files: one tells enough

_told: set[Path] = set()  # of which this process has said that others can read it


def make_place(settings: Settings) -> None:
    """Make the SQLite file, whose neighbours get its mode, before SQLite would; warn of what others
    can read. Whoever opens the store says what is wrong with its place."""
    url = parse_url(settings.store_url)
    workspace = None if "://" in settings.workspace else Path(settings.workspace)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        path = Path(url.database).absolute()
        with suppress(OSError):
            make_folder(path.parent, settings.store_mode, path.parent)
            new_file(path, settings.store_mode).close()
        _warn(path.parent, path, settings.store_mode, is_ours=path.parent == workspace)
    if workspace is not None:
        with suppress(OSError):  # there is none yet
            for path in islice(workspace.iterdir(), LOOKED_AT):
                _warn(workspace, path, settings.store_mode, is_ours=True)


def _warn(folder: Path, path: Path, access: Access, is_ours: bool) -> None:
    """Others read a file that is for them in a folder that they may enter."""
    if folder in _told or not (wide(path, access) and wide(folder, access)):
        return
    _told.add(folder)
    others = "go" if access is Access.PRIVATE else "o"
    log.warning(
        "other users of this machine can read %s: run `%s`, or set SPECBATCH_STORE_MODE to %s if "
        "they are meant to",
        path,
        _remedy(folder, path, others, is_ours and not _has_more(folder)),
        "group or umask" if access is Access.PRIVATE else "umask",
    )


def _remedy(folder: Path, path: Path, others: str, whole: bool) -> str:
    """The command that shuts others out, of the whole folder only where all of it is the store's:
    in /tmp, or beside somebody's own files, it would do harm."""
    if whole:
        return shlex.join(["chmod", "-R", f"{others}=", str(folder)])
    if path.is_dir():
        return shlex.join(["chmod", "-R", f"{others}=", str(path)])
    beside = [Path(f"{path}{end}") for end in ("", "-wal", "-shm")]
    return shlex.join(["chmod", f"{others}=", *(str(one) for one in beside if one.exists())])


def _has_more(folder: Path) -> bool:
    """Whether a workspace is a place for other things too: where people work, or everybody's."""
    try:
        at, home = Path.cwd(), Path.home()
        mode = folder.stat().st_mode
    except (OSError, RuntimeError):  # nobody can say
        return True
    return bool(mode & stat.S_ISVTX) or folder in (at, *at.parents, home, *home.parents)
