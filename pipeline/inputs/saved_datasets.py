"""Finds the files of a dataset that Hugging Face's `datasets` has saved with `save_to_disk`.

Such a folder has Arrow streams, a file that names them in order, and perhaps caches beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from specbatch.pipeline.storage.object_store import ObjectInfo
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_MOST_BYTES = 16 << 20  # of such a file


def saved_dataset(
    root: str, listed: Sequence[ObjectInfo], objects: Objects
) -> list[ObjectInfo] | None:
    """The files of a saved dataset in order, None for any other folder.

    `root`: the folder, with its slash; `listed`: all files in it. Raises `InputError` for a
    `DatasetDict`, whose splits are datasets, and for a folder that lacks a file.
    """
    there = {info.uri.removeprefix(root): info for info in listed}
    here = root.rstrip("/") or root or "."
    if _SPLITS in there:
        splits = _read(there[_SPLITS], objects).get("splits")
        names = [str(one) for one in splits] if isinstance(splits, list) and splits else ["?"]
        raise InputError(
            f"input folder {here} is a DatasetDict with the splits {', '.join(names)}; "
            f"name one of them, for example {root}{names[0]}"
        )
    if _STATE not in there or _INFO not in there:
        return None
    state = there[_STATE]
    try:
        names = [str(one["filename"]) for one in _read(state, objects)["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{state.uri} names no data files; save the dataset again") from None
    if missing := [name for name in names if name not in there]:
        raise InputError(
            f"{root}{missing[0]} is missing, and {state.uri} names it; save the dataset again"
        )
    if not names:
        raise InputError(f"the dataset at {here} has no files")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise InputError(f"{state.uri} names {name} {count} times; save the dataset again")
    return [there[name] for name in names]


def _read(info: ObjectInfo, objects: Objects) -> Mapping[str, Any]:
    with objects.open(info.uri, info.version) as file:
        text = file.read(_MOST_BYTES)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{info.uri} is not JSON; save the dataset again")
    return value
