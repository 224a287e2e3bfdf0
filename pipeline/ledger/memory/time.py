"""Sessions and what attempts had of them, in memory: a part of `MemoryStore`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from specbatch.pipeline.ledger import time_rules
from specbatch.pipeline.ledger.memory.chain import ChainInMemory
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.presence import ProcessNow, WorkerProcess
from specbatch.schemas.provenance import NO_TICKS, TICKS_PER_SEC, Ticks
from specbatch.schemas.records import CompletionRecord, Lease
from specbatch.schemas.timekeeping import (
    HINTS,
    Attempt,
    JobTime,
    NewSession,
    RowTime,
    SessionRow,
    SessionTime,
    Spent,
    TimeSlice,
)


@dataclass
class Session:
    row: SessionRow
    beat_at: float
    spent: dict[Attempt, Ticks] = field(default_factory=dict)
    kept: set[Attempt] = field(default_factory=set)

    @property
    def now(self) -> SessionRow:
        return replace(self.row, spent=sum(ticks.total for ticks in self.spent.values()))

    def tell(self, now: float, told: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        if self.row.ended_at is not None:
            raise time_rules.ended(told.session_id)
        self.beat_at = now
        self.row = replace(
            self.row,
            seen=max(self.row.seen, told.seen),
            idle=max(self.row.idle, told.idle),
            overhead=max(self.row.overhead, told.overhead),
        )
        for attempt, ticks in attempts.items():
            known = self.spent.get(attempt, NO_TICKS)
            self.spent[attempt] = Ticks(*map(max, astuple(known), astuple(ticks)))

    def end(self, now: float) -> None:
        leased, lost = time_rules.at_end(self.row.seen, self.now.accounted)
        self.row = replace(self.row, ended_at=now, leased=leased, lost=lost)


def _with(known: RowTime, c: CompletionRecord) -> RowTime:
    first = c.sample_index == 0
    return replace(
        known,
        ticks=known.ticks + c.ticks,
        ahead_ticks=known.ahead_ticks + c.ahead_ticks,
        documents=known.documents + first,
        completions=known.completions + 1,
        prompt_tokens=known.prompt_tokens + first * c.prompt_tokens,
        completion_tokens=known.completion_tokens + len(c.token_ids or c.origins),
        accepted=known.accepted + c.accepted,
    )


class TimeInMemory(ChainInMemory):
    """Under the store's lock."""

    def __init__(
        self,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.time,
        weights: Mapping[str, float] | None = None,
        actor: str | None = None,
    ) -> None:
        super().__init__(max_attempts, clock, weights, actor)
        self._sessions: dict[str, Session] = {}
        # By id: when it was heard of first and last, and what it said.
        self._processes: dict[str, tuple[float, float, ProcessNow]] = {}

    def begin_session(self, session: NewSession) -> None:
        with self._lock:
            now = self._now()
            row = SessionRow(
                session.session_id,
                session.owner,
                session.device,
                started_at=now - session.age_ticks / TICKS_PER_SEC,
                ended_at=None,
                seen=0,
                leased=None,
                idle=0,
                overhead=0,
                lost=0,
                spent=0,
                serves=session.serves,
            )
            self._sessions.setdefault(session.session_id, Session(row, now))

    def announce(self, session_id: str, serves: Serves) -> None:
        with self._lock:
            if (session := self._sessions.get(session_id)) is not None:
                session.row = replace(session.row, serves=serves)

    def tell_time(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        with self._lock:
            self._session(session.session_id).tell(self._now(), session, attempts)

    def end_session(self, session: SessionTime, attempts: Mapping[Attempt, Ticks]) -> None:
        with self._lock:
            known, now = self._sessions.get(session.session_id), self._now()
            if known is not None and known.row.ended_at is None:
                known.tell(now, session, attempts)
                known.end(now)

    def end_silent_sessions(self, patience_sec: float) -> list[str]:
        with self._lock:
            now = self._now()
            silent = [
                (session_id, session)
                for session_id, session in self._sessions.items()
                if session.row.ended_at is None and session.beat_at <= now - patience_sec
            ]
            for _, session in silent:
                session.end(now)
            return sorted(session_id for session_id, _ in silent)

    def tell_process(self, process: WorkerProcess, trouble: str | None) -> None:
        with self._lock:
            now = self._now()
            started_at, _, _ = self._processes.get(process.process_id, (now, now, None))
            self._processes[process.process_id] = (
                started_at,
                now,
                ProcessNow(process, 0, 0, trouble),
            )

    def forget_process(self, process_id: str) -> None:
        with self._lock:
            self._processes.pop(process_id, None)

    def forget_silent_processes(self, patience_sec: float) -> int:
        with self._lock:
            until = self._now() - patience_sec
            silent = [key for key, (_, heard_at, _) in self._processes.items() if heard_at <= until]
            for key in silent:
                del self._processes[key]
            return len(silent)

    def _processes_now(self, now: float) -> list[ProcessNow]:
        found = [
            replace(one, age_sec=now - started_at, silent_sec=now - heard_at)
            for started_at, heard_at, one in self._processes.values()
        ]
        return sorted(found, key=lambda one: (one.process.owner, one.process.process_id))

    def sessions(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> list[SessionRow]:
        with self._lock:
            found = [
                session.now
                for known_id, session in self._sessions.items()
                if job_id is None or any(a.job_id == job_id for a in session.spent)
                if session_id in (None, known_id)
            ]
            return sorted(found, key=lambda row: (row.started_at, row.session_id))

    def time_slices(
        self, job_id: str | None = None, session_id: str | None = None
    ) -> Iterator[TimeSlice]:
        with self._lock:
            found = [
                TimeSlice(
                    of,
                    attempt,
                    ticks,
                    kept=attempt in session.kept,
                    in_flight=self._is_held(attempt),
                    device=session.row.device,
                )
                for of, session in self._sessions.items()
                for attempt, ticks in session.spent.items()
                if job_id in (None, attempt.job_id) and session_id in (None, of)
            ]
        return iter(sorted(found, key=lambda s: (*s.attempt[:3], s.session_id)))

    def job_times(self, job_id: str | None = None) -> Sequence[JobTime]:
        sums: dict[JobTime, Ticks] = {}
        for one in self.time_slices(job_id):
            of = JobTime(
                one.attempt.job_id,
                one.device.price_microusd,
                one.kept,
                one.in_flight,
                one.attempt.generation == HINTS,
                NO_TICKS,
            )
            sums[of] = sums.get(of, NO_TICKS) + one.ticks
        found = [replace(of, ticks=ticks) for of, ticks in sums.items()]
        return sorted(
            found, key=lambda t: (t.job_id, t.price_microusd, t.kept, t.in_flight, t.hints)
        )

    def row_times(self, job_id: str | None = None) -> Sequence[RowTime]:
        with self._lock:
            jobs = {i: job for i, job in self._jobs.items() if job_id in (None, i)}
            sums: dict[tuple[Any, ...], RowTime] = {}
            for i, job in jobs.items():
                for c in job.completions.values():
                    of = (i, c.tag, c.price_microusd, c.ahead_price_microusd)
                    known = sums.get(of, RowTime(*of, NO_TICKS, 0, 0, 0, 0, 0, 0))
                    sums[of] = _with(known, c)
        return sorted(
            sums.values(),
            key=lambda t: (t.job_id, t.tag or "", t.price_microusd, t.ahead_price_microusd),
        )

    def _keep_time(self, lease: Lease, spent: Spent | None) -> None:
        """An attempt's time, told by the write that keeps its results; first, as it may raise."""
        if spent is not None:
            attempt, told = Attempt.of(lease), SessionTime(spent.session_id, spent.seen)
            session = self._session(spent.session_id)
            session.tell(self._now(), told, {attempt: spent.ticks})
            session.kept.add(attempt)

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise time_rules.ended(session_id)
        return self._sessions[session_id]

    def _is_held(self, attempt: Attempt) -> bool:
        job = self._jobs.get(attempt.job_id)
        group = job.groups.get(attempt.group_index) if job else None
        return (
            group is not None and group.generation == attempt.generation and group.owner is not None
        )
