"""A group whose last rows may go to somebody idle while it is verified.

The store's cut is the deed: what the engine has let go of belongs to nobody until the store has it
as a group of its own, and comes back into the engine here if the store cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from specbatch.pipeline.engines.contract import Request, Service, Submitted
from specbatch.pipeline.policy.journal import Lessons
from specbatch.pipeline.runtime.leases import Held
from specbatch.schemas.errors import StoreError

log = logging.getLogger(__name__)

Rows = Sequence[Sequence[Request]]  # of each row its samples' requests


def completed(
    service: Service,
    tickets: list[Submitted],
    held: Held,
    rows: Rows,
    cut: Callable[[int], None],
    may_cut: bool = True,
) -> list[Lessons]:
    """Wait until a group's rows are complete, or its first ones when the others are given back.

    `tickets` has all of its requests in one; more may be added. Returns what they taught.

    `cut(keep)` makes the others a group of their own; its errors are the caller's, save
    `StoreError`: then all rows are done here. Raises what waiting for a ticket raises.
    """
    job_id, ticket = held.lease.job_id, tickets[0]
    units = [[request.request_id for request in samples] for samples in rows]
    if may_cut:
        held.when_cut(partial(ticket.ask_back, units))
    keep = len(rows)
    while given_back := ticket.next_given_back():
        ids = {request.request_id for request in given_back}
        left = sum(unit[0] not in ids for unit in units[:keep])
        try:
            if may_cut:
                cut(left)
                keep, held.cut_wanted = left, False
                continue
        except StoreError as error:
            log.warning("job %s: its last rows stay here: %s", job_id, error)
            may_cut = False  # a group's rows are the first ones of what it was, without gaps
        tickets.append(service.submit(job_id, given_back))
    for one in tickets:
        one.wait()
    return [one.lessons for one in tickets]
