"""What the parts of a job spec share."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Part(BaseModel):
    """A part of the spec: frozen, and strict about unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _as_pairs(value: object) -> object:
    return tuple(value.items()) if isinstance(value, dict) else value


PAIRS = BeforeValidator(_as_pairs)
