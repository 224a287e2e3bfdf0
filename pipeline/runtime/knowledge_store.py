"""The knowledge store: what engines have learned of their machines, for the next process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.errors import StoreError
from specbatch.schemas.refusals import should_log

log = logging.getLogger(__name__)

# What reading a damaged row may raise.
_UNUSABLE = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class KnowledgeStore:
    """Reads at once and writes in a thread of its own: an engine does not wait for a database.

    Failures are logged: without knowledge an engine only measures again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="knowledge")

    def load(self, about: str) -> Knowledge | None:
        """What is known of a machine with its models, or None."""
        try:
            state = self._store.knowledge(about)
            return None if state is None else Knowledge.restored(dict(state))
        except (StoreError, *_UNUSABLE) as error:
            log.warning("cannot use the machine knowledge of %s: %r", about, error)
            return None

    def keep(self, about: str, knowledge: Knowledge) -> None:
        """Save a snapshot."""
        try:
            self._writer.submit(self._write, about, knowledge.state())
        except (RuntimeError, ValueError) as error:  # closed already, or not serialisable
            log.warning("could not save the machine knowledge of %s: %r", about, error)

    def close(self) -> None:
        """Wait for writes in progress."""
        self._writer.shutdown()

    def _write(self, about: str, state: dict[str, object]) -> None:
        try:
            self._store.keep_knowledge(about, state)
        except StoreError as error:
            if should_log(error):
                log.warning("could not save the machine knowledge of %s: %s", about, error)
