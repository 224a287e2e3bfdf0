"""Workers, queues and jobs of a store as they are now, in tables for a terminal or as plain text.

Current rates need two samples: by how much a worker's busy time and a job's tokens grew. With one
sample they are means since the start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbatch.pipeline.observe.terminal.progress import INTERRUPTED, Meter, resume_command
from specbatch.pipeline.observe.units import (
    NOTHING,
    clock,
    count,
    percent,
    plural,
    seconds,
    usd,
)
from specbatch.schemas.backlog import Backlog, StageBacklog, WorkerNow
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.presence import ProcessNow
from specbatch.schemas.records import JobRow, JobState

STALE_SEC = 60.0  # a worker that has been silent for so long may be gone
WIDE = 110  # columns that a terminal needs to show everything
SHORT_ID = 12  # characters of a job id that are shown at least
_BAR = 12
_NOBODY = "no worker is alive: start `specbatch worker`"
_NOT_YET = "a worker holds work and has not reported its device yet"
_LEFT_OUT = ("name", "", "tokens")  # on narrow terminals


@dataclass(frozen=True, slots=True)
class JobNow:
    """One job as a line."""

    job_id: str
    name: str
    state: str
    rows_done: int
    rows_total: int
    tokens: int
    tokens_per_sec: float | None
    acceptance: float | None
    eta_sec: float | None
    cost_usd: float
    numeric_class: str | None = None
    waits: str | None = None  # for what, in words, where no live worker can verify it
    model_fingerprint: str | None = None

    @property
    def share(self) -> float | None:
        return self.rows_done / self.rows_total if self.rows_total else None


@dataclass(frozen=True, slots=True)
class Board:
    """Everything that is shown at one moment."""

    backlog: Backlog
    busy: tuple[float | None, ...]  # each worker's busy share of the time
    jobs: tuple[JobNow, ...]
    jobs_left_out: int


@dataclass(slots=True)
class Watch:
    """Makes a board of each sample, and keeps what it needs of earlier ones."""

    silence_sec: float = math.inf  # a worker that is silent for longer counts as dead
    lease_sec: float = math.inf  # and for longer than this, it has lost what it held
    _meters: dict[str, Meter] = field(default_factory=dict)
    _workers: dict[str, tuple[int, int, float | None]] = field(default_factory=dict)
    _time: float = 0.0

    def board(
        self,
        backlog: Backlog,
        jobs: Sequence[tuple[JobRow, JobProgress]],
        left_out: int = 0,
        interrupted: Collection[str] = (),
    ) -> Board:
        """The board of this sample. `interrupted`: ids of jobs that nobody works on any more."""
        self._time = backlog.at
        waiting = backlog.waiting(self.silence_sec)
        known = {worker.session_id for worker in backlog.workers}
        self._workers = {key: seen for key, seen in self._workers.items() if key in known}
        live = {row.job_id for row, _ in jobs}
        self._meters = {key: meter for key, meter in self._meters.items() if key in live}
        return Board(
            backlog,
            tuple(map(self._busy, backlog.workers)),
            tuple(
                self._interrupted(job) if job.job_id in interrupted else job
                for job in (self._job(row, progress, waiting) for row, progress in jobs)
            ),
            left_out,
        )

    @staticmethod
    def _interrupted(job: JobNow) -> JobNow:
        return replace(
            job,
            state=INTERRUPTED,
            eta_sec=None,
            waits=f"was interrupted: `{resume_command(job.job_id)}`",
        )

    def _busy(self, worker: WorkerNow) -> float | None:
        """Its busy share since its last heartbeat but one, or since its start."""
        seen, busy, share = self._workers.get(worker.session_id, (0, 0, None))
        if worker.seen > seen:
            share = min(1.0, max(0, worker.busy_ticks - busy) / (worker.seen - seen))
            self._workers[worker.session_id] = (worker.seen, worker.busy_ticks, share)
        return share

    def _job(self, row: JobRow, progress: JobProgress, waiting: Mapping[str, str]) -> JobNow:
        samples = int(row.spec.get("sampling", {}).get("n") or 1)
        meter = self._meters.setdefault(row.job_id, Meter(samples, clock=lambda: self._time))
        reading = meter.read(progress)
        speed, eta = reading.tokens_per_sec, reading.eta_sec
        since = self._time - row.started_at if row.started_at is not None else 0.0
        if speed is None and since > 0 and progress.completion_tokens:
            speed = progress.completion_tokens / since
        done, worked = progress.rows_done, meter.worked(progress)
        if eta is None and since > 0 and worked > 0 and progress.ingest_done:
            eta = since * (progress.rows_total - done) / worked
        return JobNow(
            row.job_id,
            row.name,
            reading.phase,
            done,
            progress.rows_total,
            progress.completion_tokens,
            speed,
            progress.acceptance_rate,
            None if progress.state.is_final else eta,
            progress.cost_usd,
            row.numeric_class,
            waiting.get(row.job_id),
            row.model_fingerprint,
        )


def as_json(board: Board) -> dict[str, Any]:
    """Everything for programs."""
    backlog = board.backlog
    return {
        "at": backlog.at,
        "stages": [{**asdict(s), "stage": s.stage.value} for s in backlog.stages],
        "jobs_by_state": {state.value: n for state, n in backlog.jobs.items()},
        "rows_failed": backlog.rows_failed,
        "workers": [
            {
                "session": w.session_id,
                "owner": w.owner,
                "device": w.device.kind,
                "busy_share": busy,
                "leases": w.leases,
                "silent_sec": w.silent_sec,
                "cost_usd": w.usd,
                "numeric_classes": [] if w.serves is None else list(w.serves.names),
                "model": w.serves and w.serves.model,
                "model_fingerprint": _fingerprint(w),
                "probe": w.serves and w.serves.probe,
            }
            for w, busy in zip(backlog.workers, board.busy, strict=True)
        ],
        "processes": [
            {
                "owner": one.process.owner,
                "kinds": list(one.process.kinds),
                "verifier": one.process.verifier,
                "proposer": one.process.proposer,
                "silent_sec": one.silent_sec,
                "can_consume": one.trouble is None,
                "trouble": one.trouble,
            }
            for one in backlog.processes
        ],
        "jobs": [asdict(job) for job in board.jobs],
    }


def _fingerprint(worker: WorkerNow) -> str | None:
    """The fingerprint of the model that it verifies with."""
    found = worker.serves and worker.serves.fingerprint
    return found.digest if found else None


def tables(board: Board, width: int = WIDE) -> RenderableType:
    """The board as tables, one below the other; with fewer columns on a narrow terminal."""
    ids = _short([job.job_id for job in board.jobs])
    return Group(
        _headline(board),
        Text(),
        _workers(board),
        Text(),
        _queues(board.backlog.stages),
        Text(),
        _jobs(board, ids, width < WIDE),
        *(Text(line, style="red") for line in _troubled(board.backlog.processes)),
        *(Text(line, style="dim") for line in _probed(board.backlog.workers)),
        *(Text(line, style="yellow") for line in _versions(board.backlog.workers)),
        *(Text(f"{ids[job.job_id]} {job.waits}", style="red") for job in board.jobs if job.waits),
    )


def _headline(board: Board) -> Text:
    backlog = board.backlog
    running, queued = backlog.jobs[JobState.RUNNING], backlog.jobs[JobState.QUEUED]
    parts = [
        f"{clock(backlog.at)} UTC",
        plural(len(backlog.workers), "device"),
        f"{plural(running, 'job')} running, {count(queued)} queued",
    ]
    text = Text(" · ".join(parts), style="bold")
    if backlog.rows_failed:
        text.append(f" · {plural(backlog.rows_failed, 'row')} failed", style="bold red")
    return text


def _table(title: str, *heads: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for number, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if number < left else "right",
            header_style="dim",
            no_wrap=True,
        )
    return table


def _workers(board: Board) -> Table:
    if not board.backlog.workers and not board.backlog.processes:
        works = any(stage.leased for stage in board.backlog.stages)
        return _nothing("workers", _NOT_YET if works else _NOBODY)
    heads = ("worker", "device", "groups", "busy", "cost", "up for", "last seen")
    table = _table("workers", *heads, left=2)
    for worker, busy in zip(board.backlog.workers, board.busy, strict=True):
        late = worker.silent_sec > STALE_SEC
        table.add_row(
            worker.owner,
            worker.device.kind,
            count(worker.leases),
            percent(busy, 0),
            usd(worker.usd),
            seconds(worker.age_sec),
            Text(f"{seconds(worker.silent_sec)} ago", style="red" if late else ""),
        )
    for one in _others(board):
        late = one.silent_sec > STALE_SEC
        table.add_row(
            one.process.owner,
            ", ".join(one.process.kinds),
            *(NOTHING,) * 3,
            seconds(one.age_sec),
            Text(f"{seconds(one.silent_sec)} ago", style="red" if late else ""),
        )
    return table


def _troubled(processes: Sequence[ProcessNow]) -> Iterator[str]:
    """Which workers cannot take messages, and why."""
    for one in processes:
        if one.trouble is not None:
            kinds = ", ".join(one.process.kinds)
            yield f"worker {one.process.owner} ({kinds}) can take no messages: {one.trouble}"


def _probed(workers: Sequence[WorkerNow]) -> Iterator[str]:
    """What workers found when they tried their engines."""
    for one in workers:
        if one.serves is not None and one.serves.probe is not None:
            yield f"worker {one.owner}: {one.serves.probe}"


def _others(board: Board) -> Iterator[ProcessNow]:
    """Processes without a device of their own."""
    owners = {worker.owner for worker in board.backlog.workers}
    return (one for one in board.backlog.processes if one.process.owner not in owners)


def _versions(workers: Sequence[WorkerNow]) -> Iterator[str]:
    """For models with different files on different workers: who has which."""
    by_model: dict[str, dict[str, list[str]]] = {}
    for one in workers:
        if one.serves is not None and (digest := _fingerprint(one)) is not None:
            by_model.setdefault(one.serves.model, {}).setdefault(digest, []).append(one.owner)
    for model, owners in sorted(by_model.items()):
        if len(owners) > 1:
            there = (f"{shown(digest)} on {', '.join(on)}" for digest, on in sorted(owners.items()))
            yield f"model {model} has different files: {'; '.join(there)}"


def _queues(stages: Sequence[StageBacklog]) -> Table:
    table = _table("queues", "stage", "ready", "leased", "oldest ready", "expired")
    for stage in stages:
        table.add_row(
            stage.stage.value,
            count(stage.ready),
            count(stage.leased),
            seconds(stage.oldest_ready_sec),
            Text(count(stage.expired), style="red" if stage.expired else "dim"),
        )
    return table


def _short(job_ids: Sequence[str]) -> dict[str, str]:
    """By id, the shortest beginnings that tell these jobs apart. Ids begin with the time."""
    most = max(map(len, job_ids), default=0)
    kinds = len(set(job_ids))
    fits = (n for n in range(SHORT_ID, most) if len({one[:n] for one in job_ids}) == kinds)
    length = next(fits, most)
    return {one: one[:length] for one in job_ids}


def _jobs(board: Board, ids: Mapping[str, str], narrow: bool) -> Table:
    if not board.jobs:
        return _nothing("jobs", "no job is running or queued")
    heads = ["job", "name", "state", "", "prompts", "tokens", "tokens/s", "accepted", "ETA", "cost"]
    rows: list[list[RenderableType]] = [
        [
            ids[job.job_id],
            job.name[:24],
            job.state,
            _bar(job.share),
            f"{count(job.rows_done)}/{count(job.rows_total)}",
            count(job.tokens),
            count(job.tokens_per_sec),
            percent(job.acceptance, 0),
            seconds(job.eta_sec) if job.eta_sec is not None else NOTHING,
            usd(job.cost_usd),
        ]
        for job in board.jobs
    ]
    if narrow:
        kept = [number for number, head in enumerate(heads) if head not in _LEFT_OUT]
        heads, rows = [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]
    table = _table("jobs", *heads, left=2 if narrow else 4)
    for row in rows:
        table.add_row(*row)
    if board.jobs_left_out:
        table.caption = f"and {count(board.jobs_left_out)} more"
    return table


def _bar(share: float | None) -> Text:
    """A bar that reads the same with colours and without."""
    full = round((share or 0.0) * _BAR)
    return Text.assemble(("█" * full, "green"), ("░" * (_BAR - full), "dim"))


def _nothing(title: str, words: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False
    )
    table.add_column(style="dim")
    table.add_row(words)
    return table
