"""Audits of some of the jobs that ended lately, as `specbatch audit` does each."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import NamedTuple

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.audit import Auditor, is_bad
from specbatch.schemas.errors import UsageError
from specbatch.schemas.records import JobRow

log = logging.getLogger(__name__)


class Audited(NamedTuple):
    """What audits of some jobs found."""

    jobs: int
    ended: int  # jobs they were chosen from
    completions: int  # replayed
    skipped: int  # completions that cannot be: their prompts are not kept, for example
    bad: tuple[str, ...]  # ids of jobs in which something is wrong
    not_replayed: tuple[str, ...]  # … and of which nothing could be replayed

    @property
    def sentence(self) -> str:
        said = f"{self.jobs:,} of {self.ended:,} ended jobs audited, {self.completions:,} "
        said += "completions replayed"
        if self.skipped:
            said += f", {self.skipped:,} could not be"
        if self.not_replayed:
            said += f"; nothing of {', '.join(self.not_replayed)} was replayed"
        return said + (f"; look at {', '.join(self.bad)}" if self.bad else "; all is well")


def ended_within(store: Store, sec: float, tenant: str | None = None) -> Iterator[JobRow]:
    """Jobs that ended so long ago at most and are not wholly purged, oldest first."""
    last: JobRow | None = None
    while found := store.ended_jobs(0.0, tenant, after=last, within_sec=sec):
        yield from found
        last = found[-1]


def audit_some(
    auditor: Auditor, within_sec: float, most: int, share: float, seed: int, tenant: str | None
) -> Audited:
    """Audit `most` of the jobs, and keep what was found. The same seed chooses the same."""
    ended = list(ended_within(auditor.store, within_sec, tenant))
    chosen = random.Random(seed).sample(ended, min(most, len(ended)))
    bad, not_replayed = [], []
    jobs = completions = skipped = 0
    for job in chosen:
        try:
            chain = auditor.chain(job.job_id)
        except UsageError as error:  # it was sent back to work meanwhile
            log.warning("%s", error)
            continue
        replayed = auditor.replay(chain, share, seed)
        record = auditor.keep(chain, replayed)
        jobs += 1
        completions += replayed.sampled
        skipped += replayed.skipped.total()
        bad += [job.job_id] * is_bad(record.findings, replayed.is_fast)
        if replayed.problem is not None:
            log.warning("nothing of job %s was replayed: %s", job.job_id, replayed.problem)
            not_replayed.append(job.job_id)
    return Audited(jobs, len(ended), completions, skipped, tuple(bad), tuple(not_replayed))
