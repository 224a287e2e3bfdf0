"""Notices when `models:NAME` stands for other versions than a running worker has loaded."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence

from specbatch.pipeline.engines.models.draft_names import draft_names
from specbatch.pipeline.engines.models.model_folder import (
    check_architecture,
    check_pair,
    inspect_model,
)
from specbatch.pipeline.learning.registry import live_of, loaded_refs
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.leases import owner_here
from specbatch.schemas.errors import StoreError
from specbatch.schemas.refusals import should_log
from specbatch.schemas.registry import PREFIX

log = logging.getLogger(__name__)

CHECK_SEC = 60.0  # between two questions to the store, where leases are not shorter


class ModelWatch:
    """The draft models of one worker: what its references stood for at its start, and a thread that
    notices when they stand for other ones.

    It asks the store alone; files are read only when the store's answer has changed. A set that
    cannot be loaded is logged once, and the worker continues with what it has.
    """

    def __init__(self, store: Store, refs: Sequence[str], verifier: str | None = None) -> None:
        """Raises `UsageError` as `loaded_refs` does."""
        self._refs = tuple(refs)
        self._named = ", ".join(ref for ref in refs if ref.startswith(PREFIX))
        self._verifier = verifier
        self._answer = self._asked(store)  # before the files: what changes meanwhile is seen later
        self.loaded = self._found(store)
        self._stop = threading.Event()

    def start(self, store: Store, lease_sec: float, on_change: Callable[[], None]) -> None:
        """Look once in a lease's time, at least once a minute; after a change, call
        `on_change` once and end. Workers of other names call theirs at other moments."""
        every_sec = min(CHECK_SEC, lease_sec)
        threading.Thread(
            target=self._run, args=(store, every_sec, on_change), name="model-watch", daemon=True
        ).start()

    def close(self) -> None:
        """It may be reading files: nothing waits for it."""
        self._stop.set()

    def _run(self, store: Store, every_sec: float, on_change: Callable[[], None]) -> None:
        delay_sec = spread(owner_here()) * every_sec / 2
        while not self._stop.wait(every_sec):
            try:
                found = self.changed(store)
            except StoreError as error:
                if should_log(error):
                    log.warning("cannot read which draft models are deployed: %s", error)
                continue
            if found is None:
                continue
            log.info(
                "what %s stands for has changed: this worker starts anew in %.0f s to load %s; its "
                "groups are finished or given back",
                self._named,
                delay_sec,
                ", ".join(found),
            )
            if not self._stop.wait(delay_sec):
                on_change()
            return

    def changed(self, store: Store) -> list[str] | None:
        """What to load, if some of it is not loaded and all of it can be. Raises `StoreError`."""
        answer = self._asked(store)
        if answer == self._answer:
            return None
        try:
            found = self._found(store)
            self._check(found)
        except StoreError:
            raise
        except Exception as error:  # whatever is wrong with a folder, the worker continues
            self._answer = answer
            log.warning(
                "what %s stands for has changed, and cannot be loaded: %s; this worker continues "
                "with %s: mend it, then promote it again or restart this worker",
                self._named,
                error,
                ", ".join(self.loaded),
            )
            return None
        self._answer = answer
        return found if set(found) - set(self.loaded) else None  # one more than needed does no harm

    def _asked(self, store: Store) -> list[frozenset[tuple[str, int, str]]]:
        return [live_of(store, ref) for ref in self._refs]

    def _found(self, store: Store) -> list[str]:
        return [found for ref in self._refs for found in loaded_refs(store, ref, self._verifier)]

    def _check(self, refs: Sequence[str]) -> None:
        """What a worker checks at its start. Raises `ModelError` and `UsageError`."""
        draft_names(refs)
        verifier = None if self._verifier is None else inspect_model(self._verifier)
        for model in map(inspect_model, refs):
            check_architecture(model)
            if verifier is not None:
                check_pair(verifier, model)


def spread(name: str) -> float:
    """In [0, 1), the same for the same name: when a worker of this name has its turn."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2.0**48
