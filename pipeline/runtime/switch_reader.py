"""Reads what an operator has switched off, and hands it to the engines of this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specbatch.pipeline.engines.contract import Engines
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.draft_switches import DraftSwitch, DraftSwitches, OffHere, SwitchScope
from specbatch.schemas.errors import StoreError
from specbatch.schemas.refusals import should_log

log = logging.getLogger(__name__)

# Before the store could be read: whatever may be off is off.
UNREAD = DraftSwitches((DraftSwitch(SwitchScope(), 0.0, "this worker", "not read yet"),))


class SwitchReader:
    """Reads before the first step, with every heartbeat, and with the checks in between while there
    is work. One thread at a time may read."""

    def __init__(
        self, store: Store, engines: Sequence[Engines], here: Sequence[OffHere] = ()
    ) -> None:
        """`here`: what is off in this process, whatever an operator says."""
        self._store = store
        self._here = tuple(here)
        self._engines = engines
        self.now = UNREAD
        for host in engines:
            host.switch(UNREAD)

    def read(self) -> None:
        """While the store cannot be read, what was read last counts."""
        try:
            found = DraftSwitches(tuple(self._store.draft_switches()), self._here)
        except StoreError as error:
            if should_log(error):
                log.warning("cannot read what is switched off; nothing changes: %s", error)
            return
        if found == self.now:
            return
        for switch in found.active:
            if switch not in self.now.active:
                log.warning("drafting is off for %s: see `specbatch drafting list`", _kind(switch))
        for switch in self.now.active:
            if switch not in found.active and self.now is not UNREAD:
                log.warning("drafting is on again for %s", _kind(switch))
        self.now = found
        for host in self._engines:
            host.switch(found)


def _kind(switch: DraftSwitch) -> str:
    """What a switch names, without the values: tags and tenants are not for the log."""
    kind = switch.scope.kind
    return kind if switch.scope == SwitchScope() else f"one {kind}"
