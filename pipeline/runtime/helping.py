"""An idle verify worker asks one that has much to do for a part of it: a tail is shared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.schemas.errors import StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import Stage
from specbatch.schemas.refusals import is_news

log = logging.getLogger(__name__)


class Helper:
    """Asks every `interval_sec`, in a thread of its own, while this process verifies nothing.

    Who is asked learns it from its next heartbeat, so asking more often would only ask others too.
    """

    def __init__(
        self,
        store: Store,
        keeper: LeaseKeeper,
        model: str,
        owner: str,
        interval_sec: float,
        serves: Callable[[], Serves | None] | None = None,
    ) -> None:
        """`serves` tells what this process verifies with, or None while that is not known; no such
        function: it may verify any job."""
        self._store = store
        self._keeper = keeper
        self._model = model
        self._owner = owner
        self._interval_sec = interval_sec
        self._serves = serves
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="helper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def ask(self) -> bool:
        """Whether somebody was asked now."""
        if self._keeper.holds(Stage.VERIFY):
            return False
        serves = None if self._serves is None else self._serves()
        if self._serves is not None and serves is None:
            return False
        asked = self._store.want_cut(self._model, self._owner, serves)
        if asked is not None:
            log.info(
                "nothing to verify: half of group %d of job %s is asked for", asked[1], asked[0]
            )
        return asked is not None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_sec):
            try:
                self.ask()
            except StoreError as error:
                if is_news(error):
                    log.warning("nobody can be asked for work: %s", error)
            except Exception:
                log.exception("nobody can be asked for work")
