"""Parts of the install that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

from specbatch.schemas.errors import MissingExtraError


def require_engine_extra() -> None:
    """Raise `MissingExtraError` unless the engine's packages are installed."""
    _require("engine", "torch", "transformers", "pyarrow")


def require_serve_extra() -> None:
    """Raise `MissingExtraError` unless the packages of `specbatch serve` are installed."""
    _require("serve", "fastapi", "uvicorn", "python_multipart", "jinja2")


def require_tables_extra(module: str) -> None:
    """Raise `MissingExtraError` unless the library of this kind of table is installed."""
    _require("tables", module, "pyarrow")


def _require(extra: str, *modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} is not installed here: `pip install 'specbatch[{extra}]'`"
        )
