"""Who else on a machine may read what is written: the modes of files and folders by setting.

What is there already keeps its modes: others may share it on purpose. Only what is made anew gets
those of the setting, and `wide` tells what others can read although it is not meant for them.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO


class Access(StrEnum):
    """For whom something is."""

    PRIVATE = "private"  # its user alone
    GROUP = "group"  # its folder's group, whose files keep that group
    UMASK = "umask"  # as the process's umask says


_FILES = {Access.PRIVATE: 0o600, Access.GROUP: 0o660}
_FOLDERS = {Access.PRIVATE: 0o700, Access.GROUP: 0o2770}
_OTHERS = {Access.PRIVATE: 0o077, Access.GROUP: 0o007, Access.UMASK: 0}


def make_folder(folder: Path, access: Access, root: Path | None = None) -> None:
    """Make what is missing of it; of what is above `root`, as the umask says."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        mode = _FOLDERS.get(access)
        if mode is None or (root is not None and path != root and root not in path.parents):
            path.mkdir(exist_ok=True)
            continue
        try:
            path.mkdir(mode & 0o777)
        except FileExistsError:  # somebody else made it meanwhile, and knows for whom
            continue
        path.chmod(mode)  # what the umask took, and the group


def new_file(path: Path, access: Access) -> BinaryIO:
    """A file that was not there, to write to. Raises `FileExistsError`."""
    mode = _FILES.get(access)
    if mode is None:
        return path.open("xb")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.fchmod(descriptor, mode)
    return os.fdopen(descriptor, "wb")


def wide(path: Path, access: Access) -> bool:
    """Whether somebody for whom it is not may read or write a file or folder that is there."""
    try:
        return bool(path.stat().st_mode & _OTHERS[access])
    except OSError:  # there is none, or it is not ours to look at
        return False
