"""How much of a tenant's texts the store keeps, and what stands where something was left out."""

from __future__ import annotations

from enum import StrEnum

SEALED = "sealed"  # of a shown spec: it is not the whole one, and no job can be done by it
NOT_KEPT = -1  # in place of a token id that text could be recovered from


class PrivacyMode(StrEnum):
    """What is kept of a job, beside its output, which is its submitter's and always whole."""

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
