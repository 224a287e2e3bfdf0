"""What drafting taught, in memory: the part of `MemoryStore` beside jobs and leases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.memory.chain import ChainInMemory
from specbatch.schemas.errors import StoreError
from specbatch.schemas.speculation import VOCABULARY, AcceptanceCount, Decision, PastOutput


class LearningInMemory(ChainInMemory):
    """Decisions, knowledge of machines, acceptance and past outputs, under the store's lock."""

    def __init__(
        self,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.time,
        weights: Mapping[str, float] | None = None,
        actor: str | None = None,
    ) -> None:
        super().__init__(max_attempts, clock, weights, actor)
        self._decisions: defaultdict[str, list[Decision]] = defaultdict(list)
        self._knowledge: dict[str, bytes] = {}
        # tenant and job name → proposer and tag → (agreed, tested)
        self._priors: defaultdict[tuple[str, str], dict[tuple[str, str], tuple[float, float]]]
        self._priors = defaultdict(dict)

    def note_decisions(self, job_id: str, decisions: Sequence[Decision]) -> None:
        with self._lock:
            if decisions and job_id not in self._jobs:
                raise StoreError(f"no job {job_id} to note decisions of")
            self._decisions[job_id] += decisions

    def decisions(self, job_id: str) -> list[Decision]:
        with self._lock:
            return sorted(self._decisions.get(job_id, []), key=lambda decision: decision.at)

    def _numbered_decisions(self, job_id: str) -> list[tuple[int, Decision]]:
        return list(enumerate(self._decisions.get(job_id, []), start=1))

    def keep_knowledge(self, key: str, state: Mapping[str, Any]) -> None:
        with self._lock:  # as JSON, so that it comes back as from a database
            self._knowledge[key] = orjson.dumps(dict(state), option=orjson.OPT_NON_STR_KEYS)

    def knowledge(self, key: str) -> Mapping[str, Any] | None:
        with self._lock:
            kept = self._knowledge.get(key)
            return None if kept is None else orjson.loads(kept)

    def learn_acceptance(
        self, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
    ) -> None:
        with self._lock:
            priors = self._priors[tenant, job_name]
            for count in sorted(counts, key=rules.prior_key):
                if count.tested > 0:
                    key = rules.prior_key(count)
                    priors[key] = rules.learned(*priors.get(key, (0.0, 0.0)), count)

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        with self._lock:
            priors = sorted(self._priors.get((tenant, job_name), {}).items())
            return [
                AcceptanceCount(proposer, tag or None, agreed, tested)
                for (proposer, tag), (agreed, tested) in priors
            ]

    def past_outputs(
        self, tenant: str, job_name: str, vocabulary: str, max_tokens: int, except_job: str
    ) -> Iterator[PastOutput]:
        with self._lock:
            jobs = [
                job
                for job_id, job in self._jobs.items()
                if job.row.tenant == tenant
                and job_id != except_job
                and job.row.report.get(VOCABULARY) == vocabulary
            ]
            jobs.sort(key=lambda job: (job.row.created_at, job.row.job_id), reverse=True)
            jobs.sort(key=lambda job: job.row.name != job_name)
            outputs = [
                PastOutput(job.row.job_id, c.row_id, c.sample_index, c.token_ids)
                for job in jobs
                for _, c in sorted(job.completions.items())
                if c.finish_reason in rules.FINISHED and c.error is None
                if job.row.purged_at is None
                if rules.is_whole(c.token_ids)
            ]
        tokens = 0
        for output in outputs:
            tokens += len(output.token_ids)
            if tokens > max_tokens:
                return
            yield output
