"""Parts of the install that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

from specbatch.schemas.errors import MissingExtraError


def require_engine_extra() -> None:
    """Raise `MissingExtraError` unless the engine's packages are installed."""
    missing = [n for n in ("torch", "transformers", "pyarrow") if find_spec(n) is None]
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} is not installed here: `pip install 'specbatch[engine]'`"
        )
