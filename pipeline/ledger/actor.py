"""The actor that the audit log names by default."""

from __future__ import annotations

import getpass
import os
import socket


def whoami() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
