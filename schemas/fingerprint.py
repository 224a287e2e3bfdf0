"""Fingerprints of models: equal for folders whose files decide the same tokens from the same text.

The store, the claims and the commands need the digests alone; who reads the files is
`pipeline/engines/models/fingerprint.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PATTERN = r"^[0-9a-f]{32}$"
NONE = "none"  # of a part that a folder has not
SHOWN = 12  # hexadecimal digits of a digest in a sentence

WEIGHTS, CONFIG, GENERATION = "weights", "config", "generation config"
TOKENIZER, TEMPLATE = "tokenizer", "chat template"
PARTS = (WEIGHTS, CONFIG, GENERATION, TOKENIZER, TEMPLATE)
TEXT_PARTS = (TOKENIZER, TEMPLATE)  # by which prompts become tokens, and tokens text


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One digest (128 bits of SHA-256, in hexadecimal) over those of the parts."""

    digest: str
    parts: Mapping[str, str] = field(default_factory=dict, compare=False)  # of PARTS: its digest

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        lines = "".join(f"{name} {parts[name]}\n" for name in PARTS)
        return cls(short_digest(lines.encode()), dict(parts))

    @property
    def text(self) -> tuple[str, ...] | None:
        """Digests of the parts that tokenise and detokenise; None if they are unknown."""
        return tuple(self.parts[name] for name in TEXT_PARTS) if self.parts else None

    def as_json(self) -> dict[str, Any]:
        return {"digest": self.digest, "parts": dict(self.parts)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Fingerprint | None:
        return None if values is None else cls(values["digest"], values["parts"])


class Models(NamedTuple):
    """The models that decide a job's tokens."""

    verifier: Fingerprint
    proposer: str | None = None  # a draft model's digest, where the outputs depend on it

    def as_columns(self) -> dict[str, Any]:
        """Values by column of a job's row."""
        return {
            "model_fingerprint": self.verifier.digest,
            "model_parts": dict(self.verifier.parts),
            "proposer_fingerprint": self.proposer,
        }


def short_digest(data: bytes) -> str:
    """The first 128 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:32]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The parts in which two fingerprints differ; none if the parts of one are unknown."""
    if not one or not other:
        return []
    return [name for name in PARTS if one.get(name) != other.get(name)]


def shown(digest: str) -> str:
    """The beginning of a digest, as sentences show it."""
    return digest[:SHOWN]


def listed(names: Iterable[str]) -> str:
    """Parts in words: "weights", "weights and config", "weights, config and tokenizer"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def compared(pinned: str, parts: Mapping[str, str], here: Fingerprint) -> str:
    """Says how a model differs from the one that a job has pinned.

    As in `other weights and tokenizer (fingerprint 3f9a1b2c3d4e, the job's is 77bc01234567)`.
    """
    names = differing(parts, here.parts)
    what = f"other {listed(names)}" if names else "other files"
    return f"{what} (fingerprint {shown(here.digest)}, the job's is {shown(pinned)})"
