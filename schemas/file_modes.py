"""Modes of files and folders: a setting decides who else on a machine may read them.

Existing files keep their modes, because users may share them on purpose. New ones get the modes of
the setting, and `wide` reports files that others can read although the setting forbids it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO


class Access(StrEnum):
    """Who may read a file."""

    PRIVATE = "private"  # its user alone
    GROUP = "group"  # its folder's group, whose files keep that group
    UMASK = "umask"  # as the process's umask says


_FILES = {Access.PRIVATE: 0o600, Access.GROUP: 0o660}
_FOLDERS = {Access.PRIVATE: 0o700, Access.GROUP: 0o2770}
_OTHERS = {Access.PRIVATE: 0o077, Access.GROUP: 0o007, Access.UMASK: 0}


def make_folder(folder: Path, access: Access, root: Path | None = None) -> None:
    """Create the missing folders. The umask decides about those above `root`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        mode = _FOLDERS.get(access)
        if mode is None or (root is not None and path != root and root not in path.parents):
            path.mkdir(exist_ok=True)
            continue
        try:
            path.mkdir(mode & 0o777)
        except FileExistsError:  # another process just made it and chose its mode
            continue
        path.chmod(mode)  # what the umask took, and the group


def new_file(path: Path, access: Access) -> BinaryIO:
    """Create a file and open it for writing. Raises `FileExistsError`."""
    mode = _FILES.get(access)
    if mode is None:
        return path.open("xb")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.fchmod(descriptor, mode)
    return os.fdopen(descriptor, "wb")


def append_to(path: Path, access: Access) -> int:
    """A descriptor to append to a file, which is created if it is missing."""
    flags = os.O_WRONLY | os.O_APPEND
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        mode = _FILES.get(access)
        descriptor = os.open(path, flags | os.O_CREAT, 0o666 if mode is None else mode)
        if mode is not None:
            os.fchmod(descriptor, mode)
        return descriptor


def wide(path: Path, access: Access) -> bool:
    """Whether a file or folder exists and others than `access` allows may read or write it."""
    try:
        return bool(path.stat().st_mode & _OTHERS[access])
    except OSError:  # it does not exist, or we may not look at it
        return False
