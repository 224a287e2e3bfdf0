"""Which files of a model folder are read: safetensors, inside the folder, and nothing else.

Pickled weights could run code, a link could make a worker read any file of the machine, and an
index could name either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from specbatch.pipeline.engines.exact.model.model_check import check_regular
from specbatch.schemas.errors import ModelError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


def check_files(ref: str, folder: Path) -> list[Path]:
    """The weight files, sorted by name. Raises `ModelError` with one sentence."""
    _check_links(ref, folder)
    check_regular(ref, folder)
    if (folder / _ADAPTER).exists():  # it would lead to the weights of some other repository
        raise ModelError(
            f"model `{ref}` is an adapter ({_ADAPTER}): merge it into its base model and save that"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        found = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        reason = f"only pickle weights ({', '.join(found)})" if found else "no weights"
        raise ModelError(f"model `{ref}` has {reason}: save it as safetensors")
    _check_index(ref, folder, {path.name for path in weights})
    return weights


def _check_links(ref: str, folder: Path) -> None:
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # of the hub's cache, where files are links to blobs
        allowed.append(home.parent.parent / "blobs")
    for path in _links(folder):
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in allowed):
            raise ModelError(
                f"model `{ref}` has the file {path.relative_to(folder)}, which is a link out of "
                "its folder: copy what it points to into the folder"
            )


def _links(folder: Path) -> Iterable[Path]:
    """All links of the folder and of what is below it. A folder that is a link is not entered."""
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        reason = (error.strerror or type(error).__name__).lower()
        raise ModelError(f"model folder `{folder}` cannot be read: {reason}")

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        found += [p for name in (*folders, *sorted(files)) if (p := Path(root, name)).is_symlink()]
    return found


def _check_index(ref: str, folder: Path, there: set[str]) -> None:
    """An index may name the safetensors files beside it and no other."""
    path = folder / _INDEX
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(
            f"{_INDEX} of model `{ref}` cannot be read ({type(error).__name__}): save it anew"
        ) from None
    strange = sorted(str(name) for name in named - there)
    if strange:
        raise ModelError(
            f"{_INDEX} of model `{ref}` names {strange[0]}, which is no safetensors file of its "
            "folder: save the model anew"
        )
