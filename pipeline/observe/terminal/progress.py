"""The progress of one job on a terminal: a live bar, or a plain line every few seconds.

The store's counts do not move between two commits of groups; where the engine runs in this process,
its own counts (`EngineCounts`) fill the gap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from specbatch.pipeline.observe.terminal.eta import Forecast, Left
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobState

INTERRUPTED = "interrupted"  # the state that is shown of such a job
WINDOW_SEC = 8.0  # speed is the mean over this time
PLAIN_EVERY_SEC = 3.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What the engines of this process, verifying and drafting, have done so far."""

    finished: int = 0  # completions
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    drafted: int = 0  # tokens drafted ahead
    is_loaded: bool = True  # whether a verifier is in memory


@dataclass(frozen=True, slots=True)
class Reading:
    """What is shown at one moment."""

    phase: str
    done: float  # prompts
    total: int
    tokens: int
    tokens_per_sec: float | None
    acceptance: float | None
    eta_sec: float | None
    eta_range: tuple[float, float] | None = None  # in seconds; the job most likely ends within

    @property
    def line(self) -> str:
        """One line of text."""
        parts = [
            f"{self.phase}: {self.done:,.0f}/{self.total:,} prompts",
            f"{self.tokens:,} tokens",
        ]
        return ", ".join(parts + self.figures)

    @property
    def figures(self) -> list[str]:
        """Speed, acceptance and remaining time, where they are known."""
        shown = []
        if self.tokens_per_sec is not None:
            shown.append(f"{self.tokens_per_sec:,.0f} tokens per second")
        if self.acceptance is not None:
            shown.append(f"acceptance {self.acceptance:.2f}")
        if self.eta_sec is not None:
            shown.append(f"ETA {_clock(self.eta_sec)}{self._range()}")
        return shown

    def _range(self) -> str:
        if self.eta_range is None:
            return ""
        low, high = (_clock(sec) for sec in self.eta_range)
        return f" ({low} to {high})" if low != high else ""


@dataclass(slots=True)
class Meter:
    """Turns counts into readings. `clock` is the time in seconds.

    `max_tokens`: of a completion, where no row asks for more.
    """

    samples_per_row: int = 1
    clock: Callable[[], float] = time.monotonic
    max_tokens: int | None = None
    _first: JobProgress | None = None
    _window: deque[tuple[float, int]] = field(default_factory=deque)  # time, tokens
    _forecast: Forecast = field(default_factory=Forecast)

    def read(self, progress: JobProgress, engine: EngineCounts | None = None) -> Reading:
        """The reading after these counts."""
        base = self._first = self._first or progress
        recorded, tokens = self.worked(progress), progress.completion_tokens
        worked, untouched = recorded, progress.rows_done - recorded
        acceptance = progress.acceptance_rate
        if engine is not None and not progress.state.is_final:  # then the store has all
            worked = max(worked, self.worked(base) + engine.finished / self.samples_per_row)
            tokens = max(tokens, base.completion_tokens + engine.tokens)
            if engine.proposed:
                acceptance = engine.accepted / engine.proposed
        rows = min(worked + untouched, float(progress.rows_total))
        left = self._left(progress, rows, worked, tokens)
        return Reading(
            phase=_phase(progress, rows, tokens - base.completion_tokens, engine),
            done=rows,
            total=progress.rows_total,
            tokens=tokens,
            tokens_per_sec=self._speed(tokens),
            acceptance=acceptance,
            eta_sec=left.sec if left else None,
            eta_range=(left.low, left.high) if left else None,
        )

    def worked(self, progress: JobProgress) -> float:
        """Recorded prompts that were worked on to their end: only these tell a speed.

        Quarantined rows are done, and took no time. Outputs without their form failed, and took as
        long as others. A row may ask for another number of samples than the job.
        """
        good, samples = progress.rows_done - progress.rows_failed, self.samples_per_row
        return float(max(good, min(progress.completions / samples, progress.rows_done)))

    def _speed(self, tokens: int) -> float | None:
        """Tokens per second over the window."""
        now = self.clock()
        self._window.append((now, tokens))
        while len(self._window) > 2 and now - self._window[1][0] > WINDOW_SEC:
            self._window.popleft()
        since, before = self._window[0]
        return (tokens - before) / (now - since) if now > since and tokens > before else None

    def _left(self, progress: JobProgress, rows: float, worked: float, tokens: int) -> Left | None:
        now, to_come = self.clock(), progress.rows_total - rows
        self._forecast.see(now, tokens)
        mean = self._mean_tokens(progress, worked, tokens)
        if not progress.ingest_done or mean is None or to_come <= 0:
            return None
        # Of lengths that end at random, the mean of n is off by one part in the root of n.
        unsure = 0.0 if mean == self._most else max(worked, 1.0) ** -0.5
        return self._forecast.left(now, max(mean * (to_come + worked) - tokens, 0.0), unsure)

    def _mean_tokens(self, progress: JobProgress, worked: float, tokens: int) -> float | None:
        """Tokens of a prompt: the mean of recorded ones, whose groups are complete.

        Groups of short outputs are recorded first. So while most finished prompts are not recorded
        it is all tokens over finished prompts, at most the job's limit: the likeliest value where
        outputs end at random, and exact where all reach the limit.
        """
        recorded = self.worked(progress)
        if recorded > worked / 2:
            return progress.completion_tokens / recorded
        seen = [tokens / worked] if worked > 0 else []
        most = [] if self._most is None else [self._most]
        return min(seen + most, default=0.0) or None

    @property
    def _most(self) -> float | None:
        """Tokens of a prompt at the job's limit."""
        return None if self.max_tokens is None else float(self.max_tokens * self.samples_per_row)


@contextmanager
def progress_view(
    console: Console,
    samples_per_row: int = 1,
    max_tokens: int | None = None,
    every_change: bool = False,
) -> Iterator[Callable[[JobProgress, EngineCounts | None], None]]:
    """Yields the function to call with each new count. `max_tokens`: see `Meter`.

    Where there is no terminal it prints a line every few seconds, or for `every_change` of the
    phase or a count."""
    meter = Meter(samples_per_row, max_tokens=max_tokens)
    if not console.is_terminal:
        yield _changes(console, meter) if every_change else _plain(console, meter)
        return
    with _bar(console) as bar:
        task = bar.add_task("waiting", total=1, figures="")
        yield lambda progress, engine: _show(bar, task, meter.read(progress, engine))


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<17}", markup=False),
        BarColumn(bar_width=None),
        TextColumn(
            "{task.completed:.0f}/{task.total:.0f} prompts {task.fields[figures]}", markup=False
        ),
        console=console,
        expand=True,
    )


def _show(bar: Progress, task: TaskID, reading: Reading) -> None:
    bar.update(
        task,
        description=reading.phase,
        completed=reading.done,
        total=max(reading.total, 1),
        figures=" · ".join(["", *reading.figures]).strip(),
    )


def _plain(console: Console, meter: Meter) -> Callable[[JobProgress, EngineCounts | None], None]:
    last: list[float] = []

    def show(progress: JobProgress, engine: EngineCounts | None) -> None:
        reading = meter.read(progress, engine)
        now = meter.clock()
        if last and now - last[0] < PLAIN_EVERY_SEC and not progress.state.is_final:
            return
        last[:] = [now]
        console.print(reading.line, highlight=False, markup=False, soft_wrap=True)

    return show


def _changes(console: Console, meter: Meter) -> Callable[[JobProgress, EngineCounts | None], None]:
    last: list[tuple[str, float, int, int]] = []

    def show(progress: JobProgress, engine: EngineCounts | None) -> None:
        reading = meter.read(progress, engine)
        now = (reading.phase, reading.done, reading.total, reading.tokens)
        if last != [now]:
            last[:] = [now]
            console.print(reading.line, highlight=False, markup=False, soft_wrap=True)

    return show


def _phase(progress: JobProgress, rows: float, tokens: int, engine: EngineCounts | None) -> str:
    if progress.state is JobState.QUEUED:
        return "waiting"
    if progress.state.is_final:
        return str(progress.state)
    if not progress.ingest_done:
        return "reading"
    if progress.groups_done == progress.groups_total:
        return "writing"
    if engine is not None and not tokens and not rows:
        if engine.drafted:
            return "drafting"
        if not engine.is_loaded:
            return "loading the model"
    return "verifying"


def interrupted_line(job_id: str) -> str:
    """What to do about an interrupted job."""
    return (
        f"job {job_id} was interrupted and nobody works on it: "
        f"`{resume_command(job_id)}` resumes it"
    )


def resume_command(job_id: str) -> str:
    """The command that resumes a job in one process."""
    return f"specbatch retry {job_id} --local"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
