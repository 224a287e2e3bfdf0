"""A process without OpenLineage's variables, whatever its client makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def unset() -> Iterator[None]:
    """None of them is set inside, and afterwards all are as before: the client sets some itself."""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("OPENLINEAGE_")]:
            del os.environ[name]
        yield
