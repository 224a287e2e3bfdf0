"""How much of a tenant's texts the store keeps, and what replaces the rest."""

from __future__ import annotations

import re
from enum import StrEnum

from specbatch.schemas.errors import UsageError

SEALED = "sealed"  # marks a shown spec that is incomplete, so that no job can run from it
TENANT, MOST_TENANT_CHARS = r"^[\w.@-]+$", 100  # a tenant's name
NOT_KEPT = -1  # in place of a token id that text could be recovered from


def checked_tenant(name: str) -> str:
    """The name, if a tenant may have it."""
    if len(name) > MOST_TENANT_CHARS or re.fullmatch(TENANT, name) is None:
        raise UsageError(
            f"tenant {name!r} must have 1 to {MOST_TENANT_CHARS} characters: "
            "letters, digits and . @ - _"
        )
    return name


class PrivacyMode(StrEnum):
    """What the store keeps of a job. The output is the submitter's and always complete."""

    FULL = "full"
    REDACTED = "redacted"  # personal data is replaced by marks before anything is stored
    HASH_ONLY = "hash-only"  # no text, no token ids; row ids as keyed hashes

    @property
    def is_full(self) -> bool:
        return self is PrivacyMode.FULL

    @property
    def strictness(self) -> int:
        """0 keeps everything."""
        return tuple(PrivacyMode).index(self)
