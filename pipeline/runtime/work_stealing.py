"""Work stealing: an idle verify worker takes over half of a group that another one verifies.

The idle worker asks in the store (`WorkStealer`). The busy one learns of it from its next heartbeat
and has its engine give back the group's last rows (`wait_for_rows`). Only the split in the store
counts: rows that the engine has given back belong to nobody until the store has them as a group of
their own, and return to this engine if the store cannot be reached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.leases import Held, LeaseKeeper
from specbatch.schemas.errors import StoreError
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import Stage
from specbatch.schemas.refusals import should_log

if TYPE_CHECKING:  # the light install has no numpy
    from specbatch.pipeline.engines.contract import Request, Service, Ticket
    from specbatch.pipeline.policy.breaker import Lessons

log = logging.getLogger(__name__)


class WorkStealer:
    """Asks every `interval_sec`, in a thread of its own, while this process verifies nothing.

    A busy worker learns of it from its next heartbeat; asking more often would only ask others too.
    """

    def __init__(
        self,
        store: Store,
        lease_keeper: LeaseKeeper,
        model: str,
        owner: str,
        interval_sec: float,
        serves: Callable[[], Serves | None] | None = None,
        jobs: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        """`serves` returns the models this process verifies with, or None while these are unknown.
        Without it the process may verify any job. `jobs` returns those that are not left to cheaper
        pools; None: any."""
        self._jobs = jobs
        self._store = store
        self._lease_keeper = lease_keeper
        self._model = model
        self._owner = owner
        self._interval_sec = interval_sec
        self._serves = serves
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="work-stealer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def ask(self) -> bool:
        """Whether a busy worker was asked now."""
        if self._lease_keeper.holds(Stage.VERIFY):
            return False
        serves = None if self._serves is None else self._serves()
        if self._serves is not None and serves is None:
            return False
        asked = self._store.ask_for_split(self._model, self._owner, serves, self._jobs())
        if asked is not None:
            log.info("nothing to verify: asked for half of group %d of job %s", asked[1], asked[0])
        return asked is not None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_sec):
            try:
                self.ask()
            except StoreError as error:
                if should_log(error):
                    log.warning("could not ask for work: %s", error)
            except Exception:
                log.exception("could not ask for work")


def wait_for_rows(
    service: Service,
    tickets: list[Ticket],
    held: Held,
    rows: Sequence[Sequence[Request]],
    split: Callable[[int], None],
    may_split: bool = True,
) -> list[Lessons]:
    """Wait for a group's rows to be complete, or for its first ones if the others are taken over.

    `rows` has the requests of each row's samples. `tickets` has one ticket for all of them; more
    may be added. Returns what the engine learned about drafts.

    `split(keep)` makes the others a group of their own. Its errors are the caller's, except
    `StoreError`: then all rows are done here. Raises what waiting for a ticket raises.
    """
    job_id, ticket = held.lease.job_id, tickets[0]
    units = [[request.request_id for request in samples] for samples in rows]
    if may_split:
        held.when_asked_to_split(partial(ticket.ask_back, units))
    keep = len(rows)
    while given_back := ticket.next_given_back():
        ids = {request.request_id for request in given_back}
        left = sum(unit[0] not in ids for unit in units[:keep])
        try:
            if may_split:
                split(left)
                keep, held.split_wanted = left, False
                continue
        except StoreError as error:
            log.warning("job %s: its last rows stay here: %s", job_id, error)
            may_split = False  # a group always keeps its first rows, without gaps
        tickets.append(service.submit(job_id, given_back))
    for one in tickets:
        one.wait()
    return [one.lessons for one in tickets]
