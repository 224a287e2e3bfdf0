"""Registering draft models, finding them by what they are called, and what workers load of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.registry import ModelVersion, NewModel

PREFIX = "models:"  # of a --proposer that names a registered model
TRAINING_FILE = "training.json"  # in the folder of a model that `specbatch train` has made

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
    origin = _origin(folder.path)
    parent = origin.get("parent")
    digest = parent.get("digest") if isinstance(parent, dict) else None
    ref = str(folder.path.resolve()) if Path(folder.ref).is_dir() else folder.ref
    return store.add_model(NewModel(folder.fingerprint.digest, name, ref, digest, origin))


def _origin(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / TRAINING_FILE).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / TRAINING_FILE} cannot be read ({type(error).__name__}): mend or delete it"
        ) from None
    return found if isinstance(found, dict) else {}


def find(store: Store, wanted: str) -> ModelVersion:
    """By NAME:VERSION, by NAME for its newest version that is not retired, or by fingerprint.

    Raises `UsageError` if there is none.
    """
    models = store.models()
    named = [m for m in models if m.name == wanted and m.retired_at is None]
    exact = [m for m in models if m.label == wanted]
    hashed = [m for m in models if len(wanted) >= 8 and m.fingerprint.startswith(wanted)]
    found = exact or named[-1:] or hashed
    if len(found) != 1:
        known = ", ".join(m.label for m in models) or "none"
        raise UsageError(f"no model {wanted!r} is registered; there are: {known}")
    return found[0]


def loaded_ref(store: Store, ref: str) -> str:
    """What a worker loads for `models:NAME`: the version of NAME that was promoted last and still
    drafts for anybody, or the one that `models:NAME:VERSION` names. Another `ref` is itself.

    Raises `UsageError` for a name that is not registered or not deployed.
    """
    if not ref.startswith(PREFIX):
        return ref
    wanted = ref.removeprefix(PREFIX)
    model = find(store, wanted)
    if model.label == wanted:
        return model.ref
    versions = {m.fingerprint: m for m in store.models() if m.name == model.name}
    live = [versions[d.fingerprint] for d in store.deployments() if d.fingerprint in versions]
    if not live:
        raise UsageError(
            f"no version of {model.name} is deployed: run `specbatch models promote {model.name}`, "
            f"or name a version: {PREFIX}{model.label}"
        )
    return live[-1].ref
