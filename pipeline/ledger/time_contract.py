"""What a store must do about time and money: part of `Store`.

A *session* is one device in one worker process. Its seconds are kept as counters: what each attempt
at a group had of it, by kind, and what nobody had, idle or overhead. Whoever tells a counter tells
all of it so far, and the larger value stays. So it does not matter how often one is told, in which
order, by which thread, or whether the answer got lost: no time is counted twice, and a worker keeps
no list of what it still has to tell.

That it balances, after crashes too:

1. A session ends once, in a transaction that holds its row: `leased` becomes the larger of when it
   was last seen and the sum of its counters, `lost` the difference. From then on no counter of it
   changes, so leased = idle + overhead + lost + what attempts had, for ever.
2. The writes that keep an attempt's results (`advance`, `keep_part`) carry its time in the same
   transaction. So wherever rows have ticks, the session has them too, whoever dies afterwards. They
   say that the attempt was kept; the time of all others, and what is in no row of those, is lost.
3. A process that was thought dead cannot write to its session any more. It begins another one at
   the tick where that one ends: `device_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.timekeeping import (
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    TimeSlice,
)


class TimeLedger(Protocol):
    """Sessions of workers, and what attempts had of them."""

    def begin_session(self, session: NewSession) -> None:
        """From here on the device's time is accounted for. A known session stays as it is."""
        ...

    def announce(self, session_id: str, serves: Serves) -> None:
        """What a session verifies with has changed. Nothing happens to one that is not known."""
        ...

    def tell_time(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        """What a session's time went into so far; its process lives.

        Raises `SessionEndedError` when it has ended, and changes nothing.
        """
        ...

    def end_session(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        """The same for the last time. A session that has ended stays as it is."""
        ...

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        """End those that nothing was heard of for so long; their ids.

        Each lasted until it was heard of last: nobody vouches for the time after that.
        """
        ...

    def sessions(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> list[SessionRow]:
        """All of them, those that a job had something of, or one; oldest first."""
        ...

    def time_slices(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> Iterator[TimeSlice]:
        """What attempts had of sessions, by job, group, generation and session."""
        ...

    def job_times(self, job_id: str | None = None) -> Sequence[JobTime]:
        """The slices of one job, or of all, in sums; by job."""
        ...

    def row_times(self, job_id: str | None = None) -> Sequence[RowTime]:
        """What the completions of one job, or of all, were given; by job and tag."""
        ...
