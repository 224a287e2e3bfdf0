"""Reads job specs of earlier versions, which have fewer fields and other defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from specbatch.schemas.spec import PINNED, JobSpec

# What was stored for a field that nobody had set, where its default was another.
FORMER_DEFAULTS = {("speculation", "pregenerate_tokens"): 16}


def stored_spec(values: Mapping[str, Any]) -> JobSpec | None:
    """A stored spec of this version or an earlier one; None for what is no spec."""
    try:
        return JobSpec.model_validate(values)
    except ValidationError:
        return None


def asks_the_same(spec: JobSpec, earlier: JobSpec) -> bool:
    """Whether `spec` could be what an earlier version stored as `earlier`."""
    return spec.digest() in (earlier.digest(), renewed(earlier).digest())


def renewed(spec: JobSpec) -> JobSpec:
    """The spec with today's defaults in place of former ones."""
    values = spec.model_dump(mode="json")
    for (part, name), former in FORMER_DEFAULTS.items():
        if values[part][name] == former:
            del values[part][name]
    values["input"] |= dict.fromkeys(PINNED)
    return JobSpec.model_validate(values)


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterable[str]:
    """Dotted names of the fields in which two plain mappings differ."""
    for key in {*one, *other}:
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from differences(left, right, f"{prefix}{key}.")
        elif left != right or (key in one) != (key in other):
            yield f"{prefix}{key}"
