"""URLs of SQLite files, as SQLAlchemy reads them: `%` begins an escape and `?` a query."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

_OF_FILE = re.compile(r"sqlite(?:\+pysqlite)?:///([^?]*)")


def url_of_file(file: Path) -> str:
    """The URL of a file, whatever its path. Other characters stay as people read them."""
    return "sqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def file_of_url(url: str) -> Path | None:
    """The file of a URL. None: it is another database's."""
    found = _OF_FILE.match(url)
    return None if found is None else Path(unquote(found[1]))
