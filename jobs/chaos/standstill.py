"""Describes a job that does not end: what it waits for, who is alive, what is queued."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.backlog import Backlog, WorkerNow

if TYPE_CHECKING:
    from redis import Redis

_LENGTH = {"list": "LLEN", "hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "string": "STRLEN"}


def standstill(store: Store, redis: Redis, job_id: str, silence_sec: float) -> str:
    """The state of the job, in lines. Workers count as dead after `silence_sec`."""
    from redis import RedisError

    backlog = store.backlog()
    lines = [*_of_job(store, backlog, job_id, silence_sec), *map(_of_worker, backlog.workers)]
    try:
        lines += _of_keys(redis)
    except RedisError as error:
        lines.append(f"the broker does not answer: {error}")
    return "\n".join(lines)


def _of_job(store: Store, backlog: Backlog, job_id: str, silence_sec: float) -> Iterator[str]:
    job = store.get_job(job_id)
    waits = backlog.waiting(silence_sec).get(job_id, "lacks no worker")
    yield f"job {job_id} is {job.state} and {waits}"
    if job.last_error is not None:
        yield f"it was given back: {job.last_error}"
    for group in store.group_figures(job_id):
        yield f"group {group.index} is at {group.stage}"
    units = [f"{work.stage} {work.group_index}" for work in store.due(job_id=job_id)]
    yield f"ready to be claimed: {', '.join(units) or 'nothing'}"
    yield f"leased by: {', '.join(store.holders(job_id)) or 'nobody'}"


def _of_worker(worker: WorkerNow) -> str:
    serves = "nothing" if worker.serves is None else ", ".join(worker.serves.names)
    silent = f"silent for {worker.silent_sec:.1f} s"
    return f"worker {worker.owner}, {silent}, has {worker.leases} leases and serves {serves}"


def _of_keys(redis: Any) -> Iterator[str]:  # its methods may return text, too
    """Queues, and the messages that are held unacknowledged."""
    for key in sorted(redis.scan_iter()):
        kind = redis.type(key).decode()
        length = redis.execute_command(_LENGTH[kind], key) if kind in _LENGTH else "?"
        yield f"key {key.decode(errors='replace')} is a {kind} of {length}"
