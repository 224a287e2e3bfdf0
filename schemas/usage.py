"""What an attempt uses beside a device: processor time, statements, requests, bytes.

It is counted where the work is done, for the attempt that the thread works on, and stored with the
attempt's results. All counts are whole numbers and only grow. Prices are whole millionths of a
dollar, so costs are whole too, in the units of `timekeeping.UNITS_PER_USD`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import astuple, dataclass, fields
from typing import ParamSpec, TypeVar

from specbatch.schemas.records import Stage
from specbatch.schemas.timekeeping import UNITS_PER_USD

P = ParamSpec("P")
T = TypeVar("T")

NO_GROUP = -1  # in place of a group's index: the attempt was at the job itself
NS_PER_TICK = 100
_PER_MICROUSD = UNITS_PER_USD // 1_000_000


@dataclass(frozen=True, slots=True)
class Quantities:
    """What was used."""

    cpu_ticks: int = 0  # 100-ns units of processor time
    store_statements: int = 0  # that the database was sent
    object_writes: int = 0  # requests to object stores that write or list
    object_reads: int = 0  # requests that read or look
    stored_bytes: int = 0  # of files that were written, in folders and object stores
    sent_bytes: int = 0  # to object stores
    received_bytes: int = 0  # from object stores

    def __add__(self, other: Quantities) -> Quantities:
        return Quantities(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


NOTHING_USED = Quantities()
COUNTERS = tuple(field.name for field in fields(Quantities))


@dataclass(frozen=True, slots=True)
class UnitPrice:
    """A name in the price book, and what it is the price of."""

    name: str
    counter: str
    per: int  # so many of the counter
    part: str  # of the bill
    meaning: str


_HOUR, _GB = 3600 * 10_000_000, 1_000_000_000
UNIT_PRICES = (
    UnitPrice("cpu_hour", "cpu_ticks", _HOUR, "cpu", "an hour of one processor"),
    UnitPrice(
        *("store_statements", "store_statements", 1_000_000, "database"),
        meaning="a million statements to the database",
    ),
    UnitPrice(
        *("object_writes", "object_writes", 1000, "storage"),
        meaning="1,000 requests to an object store that write or list",
    ),
    UnitPrice(
        *("object_reads", "object_reads", 1000, "storage"),
        meaning="1,000 requests that read or look",
    ),
    UnitPrice(
        *("stored_gb", "stored_bytes", _GB, "storage"),
        meaning="a GB of files, for as long as they are kept",
    ),
    UnitPrice("sent_gb", "sent_bytes", _GB, "network", "a GB sent to object stores"),
    UnitPrice("received_gb", "received_bytes", _GB, "network", "a GB received from them"),
)
PRICE_NAMES = tuple(price.name for price in UNIT_PRICES)
PARTS = tuple(dict.fromkeys(price.part for price in UNIT_PRICES))

Prices = Mapping[str, int]  # by name, in millionths of a dollar; 0 where none is given


def cost_by_part(used: Quantities, prices: Prices) -> dict[str, int]:
    """What this cost, in units of `UNITS_PER_USD`; exact."""
    found = dict.fromkeys(PARTS, 0)
    for price in UNIT_PRICES:
        per_one, rest = divmod(_PER_MICROUSD, price.per)
        assert not rest, "a unit of money is small enough for each of them"
        found[price.part] += getattr(used, price.counter) * prices.get(price.name, 0) * per_one
    return found


def prices_as_text(prices: Prices) -> str:
    """One form for equal prices; those that are 0 are left out."""
    return json.dumps({n: p for n, p in sorted(prices.items()) if p}, separators=(",", ":"))


def prices_of_text(text: str) -> dict[str, int]:
    return {str(name): int(price) for name, price in json.loads(text).items()}


@dataclass(frozen=True, slots=True)
class StageUsage:
    """What attempts at a job's stage used, of those with the same end and prices."""

    job_id: str
    stage: Stage
    kept: bool  # their results were
    in_flight: bool  # a worker still has the unit
    prices: Prices
    used: Quantities
    attempts: int


class UsageMeter:
    """Counts what one attempt uses. Thread-safe.

    Processor time is that of the thread which makes the meter, and of `carried` functions.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = dict(prices or {})
        self.is_over = False  # its last write has what was used: nothing is reported any more
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._cpu_ns = _cpu_clock()
        self._begun_ns = self._cpu_ns()

    def count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def read(self, **more: int) -> Quantities:
        """What was used so far. `more` is about to be."""
        ticks = (self._cpu_ns() - self._begun_ns) // NS_PER_TICK
        with self._lock:
            counts = dict(self._counts)
        counts["cpu_ticks"] += ticks
        for name, number in more.items():
            counts[name] += number
        return Quantities(**counts)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside the block, this thread works for the attempt."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    @contextmanager
    def last_write(self) -> Iterator[None]:
        """Inside the block, the attempt's last results are stored with what it used."""
        self.is_over = True
        try:
            yield
        except BaseException:
            self.is_over = False
            raise


_current: ContextVar[UsageMeter | None] = ContextVar("specbatch_usage", default=None)


def count(**more: int) -> None:
    """Count these for the attempt that this thread works on, if it does."""
    meter = _current.get()
    if meter is not None:
        meter.count(**more)


def carried(function: Callable[P, T]) -> Callable[P, T]:
    """The same function for another thread: what it uses there counts for this thread's attempt."""
    meter = _current.get()
    if meter is None:
        return function

    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
        begun = time.thread_time_ns()
        with meter.measuring():
            try:
                return function(*args, **kwargs)
            finally:
                meter.count(cpu_ticks=(time.thread_time_ns() - begun) // NS_PER_TICK)

    return measured


def _cpu_clock() -> Callable[[], int]:
    """Reads the processor time of this thread, from any thread where the system can."""
    thread, last = threading.get_ident(), time.thread_time_ns()
    find = getattr(time, "pthread_getcpuclockid", None)
    clock = None if find is None else find(thread)

    def read() -> int:
        nonlocal last
        if threading.get_ident() == thread:
            last = time.thread_time_ns()
        elif clock is not None:
            with suppress(OSError):  # the thread has ended
                last = time.clock_gettime_ns(clock)
        return last

    return read
