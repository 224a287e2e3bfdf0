"""Registers draft models, finds them by what they are called, and says what workers load."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.draft_names import draft_names
from specbatch.pipeline.engines.models.model_folder import (
    check_architecture,
    check_pair,
    inspect_model,
)
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import ModelError, UsageError
from specbatch.schemas.fingerprint import CONFIG
from specbatch.schemas.records import JobRow, Verification
from specbatch.schemas.registry import (
    CONFIG_DIGEST,
    PREFIX,
    DeployScope,
    ModelVersion,
    NewModel,
    deployed_for,
)
from specbatch.schemas.spec import spec_of
from specbatch.schemas.training import RECORD

log = logging.getLogger(__name__)

_PREFIX_LENGTH = 8  # of a fingerprint, at least
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def register(store: Store, name: str, folder: ModelFolder) -> tuple[ModelVersion, bool]:
    """The folder's version of the name, and whether it is new.

    Raises `UsageError` for a name that could not be told from a version or a path.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a model's name: use at most 64 letters, digits, dots, underscores "
            "and hyphens, a letter or digit first"
        )
    origin = {**_origin(folder.path), CONFIG_DIGEST: folder.fingerprint.parts.get(CONFIG)}
    parent = origin.get("parent")
    digest = parent.get("digest") if isinstance(parent, dict) else None
    ref = str(folder.path.resolve()) if Path(folder.ref).is_dir() else folder.ref
    there = [
        m for m in store.models() if m.ref == ref and m.fingerprint != folder.fingerprint.digest
    ]
    if there:
        raise UsageError(
            f"{there[-1].label} is in {ref}, with other files: give each version a folder of its "
            "own, so that it can be brought back"
        )
    return store.add_model(NewModel(folder.fingerprint.digest, name, ref, digest, origin))


def _origin(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / RECORD} cannot be read ({type(error).__name__}): mend or delete it"
        ) from None
    return found if isinstance(found, dict) else {}


def find(store: Store, wanted: str) -> ModelVersion:
    """By NAME:VERSION, by NAME for its newest version that is not retired, or by fingerprint.

    Raises `UsageError` if there is none, or more than one.
    """
    models = store.models()
    exact = [m for m in models if m.label == wanted]
    named = [m for m in models if m.name == wanted and m.retired_at is None]
    hashed = [
        m for m in models if len(wanted) >= _PREFIX_LENGTH and m.fingerprint.startswith(wanted)
    ]
    found = exact or named[-1:] or hashed
    if len(found) != 1:
        known = ", ".join(m.label for m in models if m.retired_at is None) or "none"
        how_many = "several registered models have" if found else "no registered model has"
        raise UsageError(
            f"{how_many} the name or fingerprint {wanted!r}; those that can be promoted: {known}"
        )
    return found[0]


def live_of(store: Store, ref: str) -> frozenset[tuple[str, int, str]]:
    """Of `models:NAME` the deployments, rollouts and pins that have not ended: what it is, its
    number, a fingerprint. What `loaded_refs` returns can change only when this does. It reads no
    file."""
    name = ref.removeprefix(PREFIX)
    if name == ref:
        return frozenset()
    versions = {m.fingerprint for m in store.models() if m.name == name}
    live = [("deployed", one.number, one.fingerprint) for one in store.deployments()]
    tried = [("tried", one.number, one.fingerprint) for one in store.rollouts()]
    pinned = [("pinned", 0, fingerprint) for fingerprint in _pinned(store)]
    return frozenset(one for one in (*live, *tried, *pinned) if one[2] in versions)


def _pinned(store: Store) -> set[str]:
    """Fingerprints of the draft models that outputs of jobs on their way depend on."""
    jobs = store.backlog().pinned
    return {job.proposer_fingerprint for job in jobs if job.proposer_fingerprint is not None}


def loaded_refs(store: Store, ref: str, verifier: str | None = None) -> list[str]:
    """What a worker loads for `models:NAME`: all versions of NAME that draft for anybody, that of
    the widest scope first, and those that rollouts try or jobs have pinned, if they fit the
    verifier; for `models:NAME:VERSION` that one. Another `ref` is itself.

    Raises `UsageError` for a name that is not registered or not deployed, and for files that have
    changed.
    """
    if not ref.startswith(PREFIX):
        return [ref]
    wanted = ref.removeprefix(PREFIX)
    model = find(store, wanted)
    if wanted != model.name:
        return [unchanged(model)]
    versions = {m.fingerprint: m for m in store.models() if m.name == model.name}
    live = [one for one in store.deployments() if one.fingerprint in versions]
    live.sort(key=lambda one: one.scope.narrowness)
    if not live:
        raise UsageError(
            f"no version of {model.name} is deployed: run `specbatch models promote {model.name} "
            f"--reason WHY`, or name a version: {PREFIX}{model.label}"
        )
    deployed = dict.fromkeys(one.fingerprint for one in live)
    refs = [unchanged(versions[fingerprint]) for fingerprint in deployed]
    tried = ({one.fingerprint for one in store.rollouts()} | _pinned(store)) - deployed.keys()
    candidates = [versions[one] for one in sorted(tried & versions.keys())]
    return [*refs, *_usable(candidates, refs, verifier)]


def loaded_beside(store: Store, job: JobRow) -> list[str]:
    """What a process that does one job loads beside its draft model: if that is a registered one,
    the versions that are deployed for the job, and those that rollouts try. What cannot be used is
    logged and left out, as drafts are only hints.

    Nothing where outputs depend on the draft model.
    """
    speculation = spec_of(job).speculation
    if speculation.verification is not Verification.COUPLED or not speculation.enabled:
        return []
    models = {m.fingerprint: m for m in store.models()}
    mine = [m for m in models.values() if m.ref == job.proposer]
    if not mine:
        return []
    deployed = deployed_for(store.deployments(), job.tenant, job.name)
    tried = [
        one.fingerprint
        for one in store.rollouts()
        if one.scope.covers(DeployScope(job.tenant, job.name, one.scope.tag))
    ]
    versions = [models[found] for found in dict.fromkeys((*deployed.values(), *tried))]
    others = [m for m in versions if m.name == mine[0].name and m.ref != job.proposer]
    return _usable(others, [str(job.proposer)], job.verifier)


def _usable(
    models: Iterable[ModelVersion], beside: Sequence[str], verifier: str | None = None
) -> list[str]:
    """Those that can be loaded beside others: their files are there, with the verifier's tokens, in
    folders of other names."""
    found: list[str] = []
    for model in models:
        try:
            ref = unchanged(model)
            draft_names([*beside, *found, ref])
            check_architecture(inspect_model(ref))
            if verifier is not None:
                check_pair(inspect_model(verifier), inspect_model(ref))
        except (ModelError, UsageError) as error:
            log.warning("%s is left out, and drafts for nobody here: %s", model.label, error)
            continue
        found.append(ref)
    return found


def unchanged(model: ModelVersion) -> str:
    found = inspect_model(model.ref).fingerprint.digest
    if found != model.fingerprint:
        raise UsageError(
            f"the files of {model.label} in {model.ref} have changed since they were registered: "
            "put them back, or register what is there as a new version from a folder of its own"
        )
    return model.ref
