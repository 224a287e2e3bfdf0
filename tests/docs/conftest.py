"""The site, built once, and the session that runs the pages' commands."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.session import Session, with_servers

from support.servers import PrivatePostgres, PrivateRedis, PrivateS3
from support.tree import ROOT


@dataclass(frozen=True)
class Site:
    """The built pages, and what was warned of."""

    folder: Path
    warnings: list[str]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The whole site, as `make docs` makes it."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    folder = tmp_path_factory.mktemp("site")
    kept = _Kept()
    logger = logging.getLogger("mkdocs")
    logger.addHandler(kept)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
            assert config.strict
            config.plugins.run_event("startup", command="build", dirty=False)
            with contextlib.suppress(Abort):
                build(config)
    finally:
        logger.removeHandler(kept)
    return Site(folder, kept.said)


@pytest.fixture(scope="module")
def session(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: PrivateRedis,
    postgres_server: PrivatePostgres,
    s3_server: PrivateS3,
) -> Iterator[Session]:
    """A shell in something like a checkout."""
    with with_servers(
        tmp_path_factory.mktemp("reader"), redis_server, postgres_server, s3_server
    ) as made:
        yield made
