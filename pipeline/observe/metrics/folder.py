"""Processes of one machine that are scraped as one: each writes its figures to a folder.

    <process>.json, <process>.lock   what it counted so far; the lock is held as long as it lives
    past.json                        sums of the processes that have ended, killed ones too
    serving-<port>.lock              held by the one of them that serves all of it

A file is replaced whole (`.<process>-<file>.tmp` until then), so nobody reads half of one. Whoever
serves adds the dead to the past, and names them there, so that dying in between counts nothing
twice. The past is forgotten when a process starts and finds that nobody else lives: then all
counters begin anew together.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson

from specbatch.pipeline.observe.metrics.metrics import Labels, Snapshot, Value, counted, merged
from specbatch.schemas.errors import UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")

PAST = "past.json"
_GUARD = "folder.lock"  # held while files of others are deleted


class MetricsFolder:
    """One process's place in the folder. Threads take turns."""

    def __init__(self, folder: Path) -> None:
        """Raises `UsageError` for a folder that cannot be written."""
        self._folder = folder
        self._name = uuid.uuid4().hex
        self._serving: IO[bytes] | None = None
        self._writing = threading.Lock()
        self._left_out: set[str] = set()  # files that could not be read, and were complained of
        try:
            folder.mkdir(parents=True, exist_ok=True)
            alive = self._locked(f"{self._name}.lock")
        except OSError as error:
            raise UsageError(
                f"SPECBATCH_METRICS_DIR {folder} cannot be written ({error.strerror}): name a "
                "folder of this machine that this user may write"
            ) from None
        assert alive is not None, "nobody else has this name"
        self._alive = alive
        with self._guarded():
            others = [path for path in self._files() if path.stem != self._name]
            if not any(self._lives(path.stem) for path in others):
                for path in others:
                    self._forget(path.stem)
                (folder / PAST).unlink(missing_ok=True)
                self._tidy()

    def serves(self, port: int) -> bool:
        """Whether this process is the one that serves the port; it may become that."""
        if self._serving is None:
            self._serving = self._locked(f"serving-{port}.lock")
        return self._serving is not None

    def serves_no_more(self) -> None:
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def write(self, snapshot: Snapshot) -> None:
        """Show the others what this process counted. Raises `OSError`."""
        self._replace(f"{self._name}.json", _plain(snapshot))

    def others(self) -> list[Snapshot]:
        """What the other processes counted, and those of the past. For whoever serves."""
        with self._guarded():
            sums, named = self._read(PAST, _past) or ({}, set())
            living, dead = [], []
            for path in self._files():
                if path.stem == self._name:
                    continue
                if self._lives(path.stem):
                    living.append(self._read(path.name, _snapshot) or {})
                else:
                    dead.append(path.stem)
            if dead:
                files = [f"{name}.json" for name in dead if name not in named]
                ended = [self._read(file, _snapshot) or {} for file in files]
                sums = merged([sums, *map(counted, ended)])
                self._replace(PAST, {"sums": _plain(sums), "named": dead})
                for name in dead:
                    self._forget(name)
            self._tidy()
        return [sums, *living]

    def close(self, snapshot: Snapshot) -> None:
        """Leave, and leave what was counted to the others."""
        with suppress(OSError):
            self.write(snapshot)
        self.serves_no_more()
        self._alive.close()

    # --- files ------------------------------------------------------------------------------
    def _files(self) -> list[Path]:
        """Of processes. A pattern would find files with a dot before their names too."""
        found = [path for path in self._folder.glob("*.json") if not path.name.startswith(".")]
        return [path for path in found if path.name != PAST]

    def _locked(self, name: str) -> IO[bytes] | None:
        """The file, locked as long as it is open; None: somebody else has it."""
        stream = (self._folder / name).open("ab")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            return None
        return stream

    def _lives(self, name: str) -> bool:
        if not (self._folder / f"{name}.lock").exists():
            return False
        found = self._locked(f"{name}.lock")
        if found is None:
            return True
        found.close()
        return False

    def _forget(self, name: str) -> None:
        for ending in ("json", "lock"):
            (self._folder / f"{name}.{ending}").unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Delete what processes were writing when they died."""
        for path in self._folder.glob(".*-*.tmp"):
            writer, _, _ = path.name[1:].partition("-")
            if not self._lives(writer):
                path.unlink(missing_ok=True)
                (self._folder / f"{writer}.lock").unlink(missing_ok=True)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with (self._folder / _GUARD).open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        fresh = self._folder / f".{self._name}-{name}.tmp"
        with self._writing:
            fresh.write_bytes(orjson.dumps(content))
            fresh.replace(self._folder / name)

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """None for a file that is not there, and for one that makes no sense."""
        try:
            found = parse(orjson.loads((self._folder / name).read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if name not in self._left_out:
                log.warning("metrics of %s are left out: %s", name, error)
            self._left_out.add(name)
            return None
        self._left_out.discard(name)
        return found


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    return {name: [[list(k), v] for k, v in of.items()] for name, of in snapshot.items()}


def _past(plain: dict[str, Any]) -> tuple[Snapshot, set[str]]:
    """The sums, and who is in them."""
    return _snapshot(plain["sums"]), set(plain["named"])


def _snapshot(plain: dict[str, Any]) -> Snapshot:
    found: Snapshot = {}
    for name, pairs in plain.items():
        of: dict[Labels, Value] = {tuple(labels): value for labels, value in pairs}
        found[name] = of
    return found
