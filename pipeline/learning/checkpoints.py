"""Checkpoints of a training: one file, replaced as a whole, that resumes to the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import torch
from torch import Tensor

from specbatch.pipeline.storage.objects import sync_folder
from specbatch.schemas.errors import InUseError, OutputError
from specbatch.schemas.training import RECORD

FILE = "checkpoint.pt"  # in the folder that the model goes to, until it is there
LOCK = ".lock"  # in that folder, for good
Tensors = dict[str, Tensor]


@dataclass(slots=True)
class Progress:
    """Where a training is. Data order and learning rate follow from `step`."""

    step: int = 0
    best_step: int = 0  # 0: none yet
    best_length: float = -1.0
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def stale(self) -> int:
        """Evaluations since the best one."""
        return sum(one["step"] > self.best_step for one in self.evaluations)


@dataclass(slots=True)
class Checkpoint:
    """`about`: what decides the result: parent, data, parameters. Nothing random is drawn but
    the order of the data, which is drawn from seed and epoch."""

    about: Mapping[str, Any]
    progress: Progress
    weights: Tensors
    optimizer: Mapping[str, Any]
    best: Tensors  # of the best step, as they will be served


@contextmanager
def locked(file: Path, instead: str) -> Iterator[None]:
    """Keep other trainings out, until the block ends or the kernel ends the process.

    `instead`: what else may be named. Raises `InUseError` while another one has it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("wb")
    except OSError as error:
        raise OutputError(f"nothing can be written to {file.parent}: {error.strerror}") from None
    with handle:
        if os.name != "nt":
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(
                    f"another training writes to {file.parent}: wait for it, or name {instead}"
                ) from None
            except OSError as error:
                raise OutputError(f"{file} cannot be locked: {error.strerror}") from None
        yield


def about_of(out: Path) -> Mapping[str, Any] | None:
    """What the training in this folder is about, finished or not; None for an empty place.

    Raises `OutputError` for a folder that holds something else, or cannot be read.
    """
    if (record := record_of(out)) is not None:
        found: Mapping[str, Any] = record["about"]
        return found
    if (out / FILE).exists():
        return load(out).about
    # What an interrupted write leaves is ours too.
    if out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise OutputError(
            f"--out {out} holds something that is no training: name a folder that is new or empty"
        )
    return None


def record_of(out: Path) -> dict[str, Any] | None:
    """The record of a training that has ended. Raises `OutputError`."""
    try:
        found = orjson.loads((out / RECORD).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"{out / RECORD} cannot be read ({error}): delete the folder") from None
    about = found.get("about") if isinstance(found, dict) else None
    if not isinstance(about, dict) or not {"parent", "until"} <= about.keys():
        raise OutputError(f"{out / RECORD} is no record of a training: name another folder")
    return dict(found)


def check_same(out: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raise `OutputError`, which names the difference, if the folder's training is another."""
    names = sorted(n for n in {*known, *about} if known.get(n) != about.get(n))
    if names:
        raise OutputError(
            f"--out {out} holds a training that differs in {', '.join(names)}: ask for the same, "
            "or name another folder"
        )


def save(out: Path, checkpoint: Checkpoint) -> None:
    """Raises `OutputError`."""
    fields = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
    fields |= {"about": dict(checkpoint.about), "progress": asdict(checkpoint.progress)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / FILE, lambda file: torch.save(fields, file))
    except (OSError, RuntimeError) as error:  # torch hides what the system said
        said = error if isinstance(error, OSError) else error.__context__
        why = said.strerror if isinstance(said, OSError) else "the disk may be full"
        raise OutputError(f"no checkpoint can be written to {out}: {why}") from None


def load(out: Path, device: str = "cpu") -> Checkpoint:
    """Raises `OutputError`."""
    try:
        fields = torch.load(out / FILE, map_location=device, weights_only=True)
        return Checkpoint(**fields | {"progress": Progress(**fields["progress"])})
    except (OSError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise OutputError(
            f"the checkpoint {out / FILE} cannot be read ({type(error).__name__}): delete it to "
            "begin again"
        ) from None


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside, sync, rename: after a crash there is the old file or the new one, whole."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)  # a full disk has room again
        raise
    sync_folder(path.parent)
