"""A lock on a folder that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbatch.schemas.errors import InUseError


@contextmanager
def only_one(place: Path, busy: str | None) -> Iterator[None]:
    """Hold a lock that ends with the process. `busy`: what to say where another one has it, which
    raises `InUseError`; None: wait for it."""
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InUseError(str(busy)) from None
        yield
    finally:
        os.close(descriptor)
