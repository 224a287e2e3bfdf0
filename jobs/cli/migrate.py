"""`specbatch migrate`: the store's tables made or brought up to date."""

from __future__ import annotations

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import say
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.settings import mask_url


def migrate() -> None:
    """Make the store's tables, or bring them up to date. Every other command does so too."""
    settings = load_settings()
    make_store(settings).close()
    say(f"{mask_url(settings.store_url)} is up to date")
