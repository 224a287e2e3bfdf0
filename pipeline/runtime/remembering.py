"""What engines have learned of their machines, kept in the store from one process to the next."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.errors import StoreError
from specbatch.schemas.refusals import is_news

log = logging.getLogger(__name__)

# What a row that is something else may raise when it is read.
_UNUSABLE = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class StoredKnowledge:
    """Reads at once, writes in a thread of its own: an engine does not wait for a database.

    Whatever goes wrong is logged: without it an engine only begins by trying things out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="knowledge")

    def load(self, about: str) -> Knowledge | None:
        """What is known about a machine with its models, or None."""
        try:
            state = self._store.knowledge(about)
            return None if state is None else Knowledge.restored(dict(state))
        except (StoreError, *_UNUSABLE) as error:
            log.warning("what was known of %s cannot be used: %r", about, error)
            return None

    def keep(self, about: str, knowledge: Knowledge) -> None:
        """Write it down as it is now."""
        try:
            self._writer.submit(self._write, about, knowledge.state())
        except (RuntimeError, ValueError) as error:  # closed already, or not to be put into words
            log.warning("what was learned of %s is not kept: %r", about, error)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()

    def _write(self, about: str, state: dict[str, object]) -> None:
        try:
            self._store.keep_knowledge(about, state)
        except StoreError as error:
            if is_news(error):
                log.warning("what was learned of %s is not kept: %s", about, error)
