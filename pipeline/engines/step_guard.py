"""Ends the process when a step hangs in a native call that holds the interpreter.

`Watchdog` sees a step that hangs and gives its groups back, but is Python: where a native call
never lets go of the interpreter's lock it cannot run, nor can a heartbeat or a signal's handler. A
thread of the C library can. It waits longer, so that it acts only where nothing else does; the
leases have run out by then, and other workers have the groups.
"""

from __future__ import annotations

import ctypes
import itertools
import logging

from specbatch.kernels.native import start_watch
from specbatch.schemas.errors import StepHungError

log = logging.getLogger(__name__)

_step = ctypes.c_int64(0)  # read by the C thread; 0: no step runs
_numbers = itertools.count(1)


def begins() -> None:
    """A step of an engine begins. Engines of one process step in turns."""
    _step.value = next(_numbers)


def ends() -> None:
    """It has ended, in whatever way."""
    _step.value = 0


def guard(deadline_sec: float, lease_sec: float) -> None:
    """Have the process end, with a lost device's code, `2 * lease_sec` after a step's deadline."""
    wait_sec = deadline_sec + 2 * lease_sec
    message = (
        f"a step of the engine has not ended for {wait_sec:g} s (SPECBATCH_STEP_DEADLINE_SEC is "
        f"{deadline_sec:g}; two leases of {lease_sec:g} s came after it), and the native call in "
        "it holds the interpreter: the worker ends, other workers take its groups when their "
        "leases have run out\n"
    )
    if not start_watch(_step, wait_sec, message, StepHungError.exit_code):
        log.warning(
            "the C library is missing, so a step that hangs and holds the interpreter will not be "
            "ended: build it with `pip install --no-deps -e .` and a C compiler, or "
            "install a wheel for this machine"
        )
