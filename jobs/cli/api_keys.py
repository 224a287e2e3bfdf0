"""`api-keys`: who may use `specbatch serve`, and for what."""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from specbatch.jobs.cli.console import moment, remark, say, say_json, show_whole
from specbatch.jobs.cli.serve import DIR, ServeDir, serving_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.databases import has_store
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import checked_tenant
from specbatch.schemas.serving import ApiKey, Scope

MOST_DAYS = 3650.0
LEAST_DAYS = 60.0 / DAY_SEC  # a minute


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    CREATE = "create"
    REVOKE = "revoke"


def api_keys(
    action: Annotated[
        Action, typer.Argument(metavar="list|create|revoke", help="what to do")
    ] = Action.LIST,
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="with create: a name for it; with revoke: the key's id",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option("--tenant", help="with create: whose files and batches it opens")
    ] = "default",
    scopes: Annotated[
        list[Scope] | None,
        typer.Option(
            "--scope",
            help="with create: read or write; give both for both, the default",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            "--days", help="with create: it expires after so many days", show_default=False
        ),
    ] = None,
    dir: ServeDir = DIR,
    json: Annotated[bool, typer.Option("--json", help="with list: JSON on one line")] = False,
) -> None:
    """Make, list and revoke the API keys of `specbatch serve`.

    A new key is printed once, to stdout; the store has only a hash of it.
    """
    if action is not Action.CREATE and (scopes or days is not None or tenant != "default"):
        raise UsageError("--tenant, --scope and --days are for `specbatch api-keys create`")
    if (action is Action.LIST) != (which is None):
        wanted = {Action.LIST: "no name", Action.CREATE: "a name", Action.REVOKE: "a key's id"}
        raise UsageError(f"`specbatch api-keys {action}` takes {wanted[action]}")
    if which is not None and not which.strip():
        raise UsageError("the name is empty: give the key one, as its user's")
    settings = serving_settings(dir)
    if action is not Action.CREATE and not has_store(settings):
        raise UsageError(
            f"there is no store yet in {dir}: make a key with `specbatch api-keys create NAME`, or "
            "name the service's folder with --dir"
        )
    with closing(make_store(settings)) as store:
        if action is Action.LIST:
            _list(store, json)
        elif action is Action.CREATE:
            _create(store, which or "", tenant, scopes, days)
        else:
            _revoke(store, which or "")


def _create(
    store: Store, name: str, tenant: str, scopes: list[Scope] | None, days: float | None
) -> None:
    from specbatch.jobs.serve.keys import EVERYTHING, make_key

    if days is not None and not LEAST_DAYS <= days <= MOST_DAYS:  # also refuses nan
        raise UsageError(f"--days must be from a minute ({LEAST_DAYS:.6f}) to {MOST_DAYS:.0f}")
    checked_tenant(tenant)
    expires_at = None if days is None else store.api_keys()[1] + days * DAY_SEC
    key, token = make_key(store, name, tenant, scopes or EVERYTHING, expires_at)
    remark(f"key {key.key_id} of tenant {tenant}; it is shown only now:")
    say(token)


def _revoke(store: Store, key_id: str) -> None:
    key = store.revoke_api_key(key_id)
    if key is None:
        raise UsageError(f"there is no key {key_id}: see `specbatch api-keys list`")
    say(f"key {key.key_id} ({key.name}) is revoked")


def _list(store: Store, json: bool) -> None:
    keys, now = store.api_keys()
    if json:
        say_json([_values(key) for key in keys])
        return
    if not keys:
        remark("no keys: make one with `specbatch api-keys create NAME`")
        return
    table = Table("id", "name", "tenant", "scopes", "made", "expires", "state")
    for key in keys:
        expires = "never" if key.expires_at is None else moment(key.expires_at)
        state = key.why_not(now) or "valid"
        scopes = ", ".join(sorted(key.scopes))
        row = (key.key_id, key.name, key.tenant, scopes, moment(key.created_at), expires, state)
        table.add_row(*row)
    show_whole(table)


def _values(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }
