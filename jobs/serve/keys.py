"""API keys: made, shown once, and checked. The store has only a hash of each secret.

A secret has 256 random bits, so that one SHA-256 is enough: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from specbatch.jobs.serve.errors import ApiError
from specbatch.pipeline.ledger.serving import Serving
from specbatch.schemas.serving import ApiKey, Scope

_FORM = re.compile(r"sb-([0-9a-f]{12})-([\w-]{43})")
_NO_DIGEST = bytes(32)
EVERYTHING = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is, and what it may do."""

    tenant: str
    scopes: frozenset[Scope] = EVERYTHING
    key_id: str = ""  # empty where the service asks for no key

    def must(self, scope: Scope) -> None:
        """Raises `ApiError` without the scope."""
        if scope not in self.scopes:
            raise ApiError(
                403, f"this API key has no scope `{scope}`: use one that has", "missing_scope"
            )


def make_key(
    store: Serving, name: str, tenant: str, scopes: Collection[Scope], expires_at: float | None
) -> tuple[ApiKey, str]:
    """A new key's row, and the key itself, which is shown now and never again."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    row = ApiKey(key_id, name, tenant, frozenset(scopes), _digest(secret), expires_at=expires_at)
    return store.add_api_key(row), f"sb-{key_id}-{secret}"


def caller_of(store: Serving, authorization: str | None) -> Caller:
    """Who sends this header. Raises `ApiError`, the same for every key that does not count."""
    if not authorization:
        raise ApiError(
            401, "an API key is needed: send it as `Authorization: Bearer …`", "missing_api_key"
        )
    scheme, _, token = authorization.partition(" ")
    form = _FORM.fullmatch(token.strip())
    found = store.api_key(form[1]) if form and scheme.lower() == "bearer" else None
    digest = _NO_DIGEST if found is None else found[0].digest
    is_right = hmac.compare_digest(digest, _digest(form[2] if form else ""))
    if found is None or not is_right:
        raise _refused("wrong")
    key, now = found
    if (why := key.why_not(now)) is not None:  # said only to who has the secret
        raise _refused(why)
    return Caller(key.tenant, key.scopes, key.key_id)


def caller_by_id(store: Serving, key_id: str) -> tuple[Caller, ApiKey]:
    """Who has signed in with this key. Raises `ApiError` once the key does not count."""
    found = store.api_key(key_id)
    if found is None:
        raise _refused("unknown")
    key, now = found
    if (why := key.why_not(now)) is not None:
        raise _refused(why)
    return Caller(key.tenant, key.scopes, key.key_id), key


def _refused(why: str) -> ApiError:
    return ApiError(401, f"this API key is {why}: ask the operator for another", "invalid_api_key")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
