"""What all parts of a job spec have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _without_credentials(uri: str) -> str:
    if "@" in uri.partition("://")[2].partition("/")[0]:
        # The spec is in the store, in logs and perhaps in `ps`.
        raise ValueError("credentials belong in the environment, not in a uri")
    return uri


Uri = Annotated[str, AfterValidator(_without_credentials)]


class Part(BaseModel):
    """Frozen, and without fields that nobody knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
