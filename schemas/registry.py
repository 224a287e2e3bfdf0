"""Registered draft models, and which of them drafts for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from types import MappingProxyType
from typing import Any

from specbatch.schemas.draft_switches import SwitchScope

CONFIG_DIGEST = "config_digest"  # of a model's origin: of its config.json
PREFIX = "models:"  # of a --proposer that names a registered model
NO_MODELS: Mapping[str | None, str] = MappingProxyType({})  # by tag


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model to be registered, known by its files."""

    fingerprint: str
    name: str
    ref: str  # a folder or hub id, as workers are given it
    parent: str | None = None  # fingerprint of the model it was trained from
    origin: Mapping[str, Any] = field(default_factory=dict)  # how it was made: its training.json


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A registered model. Its fingerprint is who it is, name and version what it is called."""

    fingerprint: str
    name: str
    version: int  # from 1, by name
    ref: str
    parent: str | None
    origin: Mapping[str, Any]
    added_at: float  # seconds since the epoch, by the store
    added_by: str
    retired_at: float | None = None  # None: it may be promoted
    retired_by: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}:{self.version}"

    def costs_like(self, other: ModelVersion) -> bool:
        """Whether the two differ by their weights alone; not, if that was not recorded."""
        mine, its = self.origin.get(CONFIG_DIGEST), other.origin.get(CONFIG_DIGEST)
        return mine is not None and mine == its


@dataclass(frozen=True, slots=True)
class DeployScope:
    """Whose rows a deployed model drafts for. An empty part is any."""

    tenant: str = ""
    job_name: str = ""
    tag: str = ""

    @property
    def words(self) -> str:
        """As in `tenant acme, job nightly`."""
        return str(SwitchScope(self.tenant, self.job_name, self.tag))

    def covers(self, other: DeployScope) -> bool:
        """Whether all of another scope's rows are in it."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine in ("", theirs) for mine, theirs in pairs)

    @property
    def narrowness(self) -> tuple[int, bool, bool]:
        """Of two scopes that cover a row the narrower one counts, then that of the job, the tag."""
        named = [bool(self.tenant), bool(self.job_name), bool(self.tag)]
        return sum(named), bool(self.job_name), bool(self.tag)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model drafts for a scope, from `started_at` until `ended_at`."""

    number: int  # in the order they began
    fingerprint: str
    scope: DeployScope
    started_at: float
    started_by: str
    reason: str
    ended_at: float | None = None  # None: it does now
    ended_by: str | None = None
    end_reason: str | None = None  # of the rollback that ended it; None: another was promoted


@dataclass(frozen=True, slots=True)
class PairTrial:
    """What trying a draft model with a verifier showed."""

    verifier: str  # fingerprints
    proposer: str
    numeric_class: str  # in which the verifier ran; empty: the two do not fit, so none did
    pays: bool  # its drafts may be asked for; False: they are off beside this verifier
    reason: str
    figures: Mapping[str, Any]
    tried_at: float = 0.0  # seconds since the epoch, by the store
    tried_by: str = ""

    def concerns(self, verifier: str, classes: Iterable[str]) -> bool:
        """Whether it says something of a worker's verifier and one of its numeric classes."""
        return verifier == self.verifier and self.numeric_class in ("", *classes)


def deployed_for(
    deployments: Iterable[Deployment], tenant: str, job_name: str
) -> dict[str | None, str]:
    """Fingerprints of the models that draft for a job, by tag; under None for all other rows."""
    found: dict[str | None, str] = {}
    fitting = [
        one
        for one in deployments
        if one.scope.tenant in ("", tenant) and one.scope.job_name in ("", job_name)
    ]
    fitting.sort(key=lambda one: one.scope.narrowness)
    for tag in {one.scope.tag for one in fitting} | {""}:
        covering = [one.fingerprint for one in fitting if one.scope.tag in ("", tag)]
        if covering:
            found[tag or None] = covering[-1]
    return found
