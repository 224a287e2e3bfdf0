"""Names of one verifier's draft models, and which of them serves the rows of a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from specbatch.schemas.errors import UsageError
from specbatch.schemas.speculation_spec import NO_DRAFT_MODEL

DRAFT_MODEL = "draft-model"  # the main one; others are this, `@`, and their folder's name


def kind_of(name: str) -> str:
    """The source, as a job's `sources` name it: all draft models are one source."""
    return name.partition("@")[0]


def draft_names(refs: Sequence[str]) -> list[str]:
    """Names of the draft models at these references, the main one first.

    Raises `UsageError` where two of them could not be told apart.
    """
    folders = [_folder_name(ref) for ref in refs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise UsageError(
                f"two draft models are called `{folder}`: they are told apart by folder "
                "name, so rename one of the folders"
            )
    return [DRAFT_MODEL if not i else f"{DRAFT_MODEL}@{f}" for i, f in enumerate(folders)]


def pins_of(routes: Iterable[tuple[str, str]], refs: Sequence[str]) -> dict[str | None, str]:
    """The draft model's name, or `NO_DRAFT_MODEL`, by tag.

    `routes` may call a model by its folder's name or by its whole name. Raises `UsageError` for a
    name that no model at `refs` has.
    """
    known = dict(zip(draft_names(refs), map(_folder_name, refs), strict=True))
    pins: dict[str | None, str] = {}
    for tag, wanted in routes:
        names = [
            n for n, folder in known.items() if wanted in (n, folder, f"{DRAFT_MODEL}@{folder}")
        ]
        if not names and wanted != NO_DRAFT_MODEL:
            listed = ", ".join(f"`{folder}`" for folder in known.values())
            there = f"the draft models {listed}" if known else "no draft model"
            raise UsageError(
                f"speculation.routes sends tag `{tag}` to `{wanted}`, and this verify worker has "
                f"{there}: name one of them or `{NO_DRAFT_MODEL}`, or start the worker "
                "with one more --proposer"
            )
        pins[tag] = NO_DRAFT_MODEL if wanted == NO_DRAFT_MODEL else names[0]
    return pins


def _folder_name(ref: str) -> str:
    return PurePath(ref).name.replace(":", "-")  # a colon ends a name where its bucket follows
