"""`specbatch migrate`: the store's tables and roles made or brought up to date."""

from __future__ import annotations

from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import remark, say
from specbatch.pipeline.bootstrap import migrate as bring_up_to_date
from specbatch.schemas.masking import mask_url
from specbatch.schemas.sql_roles import how_to_create


def migrate() -> None:
    """Make the store's tables and roles, or bring them up to date."""
    settings = load_settings()
    if missing := bring_up_to_date(settings):
        remark(
            f"the roles {', '.join(missing)} are missing, for this user may not create roles: have "
            f"an administrator run `{how_to_create()}`, then run this again"
        )
    say(f"{mask_url(settings.store_url)} is up to date")
