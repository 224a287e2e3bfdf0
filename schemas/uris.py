"""Where a job may read and write, and where its models are: uris without secrets, and paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from specbatch.schemas.errors import SpecError
from specbatch.schemas.schemes import why_not_writable


def _scheme(uri: str) -> str:
    """In small letters; empty for a path."""
    return uri.partition("://")[0].lower() if "://" in uri else ""


def _without_credentials(uri: str) -> str:
    if "@" in uri.partition("://")[2].partition("/")[0]:
        if _scheme(uri) in ("abfs", "abfss"):  # CONTAINER@ACCOUNT.dfs.core.windows.net
            raise ValueError(
                "the account belongs in the environment, not in a uri: write az://CONTAINER/PATH "
                "and set AZURE_STORAGE_ACCOUNT_NAME"
            )
        # The spec is in the store, in logs and perhaps in `ps`.
        raise ValueError("credentials belong in the environment, not in a uri")
    return uri


_QUERY = re.compile(r"\?[^/?]*=")  # in a glob, ? stands for one character


def _without_query(uri: str) -> str:
    scheme = _scheme(uri)
    if scheme in ("http", "https") and ("?" in uri or "#" in uri):
        raise ValueError(
            "a web address has no query here: it may hold a signature, and expires; copy the file, "
            "or use s3://, gs:// or az:// with credentials in the environment"
        )
    if scheme not in ("", "file", "s3") and _QUERY.search(uri):
        raise ValueError(
            f"a {scheme}:// uri has no query: it may hold a signature; leave it out, and put "
            "credentials into the environment"
        )
    return uri


def _writable(uri: str) -> str:
    if words := why_not_writable(uri):
        raise ValueError(words)
    return uri


def _table_place(uri: str) -> str:
    if _scheme(uri) not in ("", "file", "s3", "iceberg"):
        raise ValueError(
            f"no table is written to {_scheme(uri)}://: use a folder, s3:// or iceberg://"
        )
    return uri


Uri = Annotated[str, AfterValidator(_without_credentials)]
InputUri = Annotated[Uri, AfterValidator(_without_query)]
OutputUri = Annotated[Uri, AfterValidator(_writable)]
TableUri = Annotated[Uri, AfterValidator(_table_place)]


def absolute(uri: str, base: Path) -> str:
    """Absolute form of a local path; anything with a scheme stays as it is. Raises `SpecError`."""
    return uri if "://" in uri else str((base / _expanded(uri)).absolute())


def model_ref(ref: str, base: Path) -> str:
    """The absolute path of a local folder; a hub id or served name is returned unchanged.

    Raises `SpecError`.
    """
    path = base / _expanded(ref)
    try:
        is_path = ref.startswith((".", "/", "~")) or path.is_dir()
    except OSError:  # no right to look there
        is_path = True
    return str(path.resolve()) if is_path else ref


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SpecError(f"path {path} begins with the home folder of an unknown user") from None
