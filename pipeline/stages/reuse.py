"""Reuse: a request that the store has the answer to is answered from there.

An output depends on the verifier's weights, the numeric class, the prompt, the sampling and the
seed, and on nothing else. Where all of them are the same, the answer is the same, bit for bit.
A share of the known answers is computed again all the same and compared.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain

import orjson

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import StoreError
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import (
    Answered,
    CompletionRecord,
    FinishReason,
    JobRow,
    Origin,
    PromptRow,
    SamplingParams,
)
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

# What a report has of reuse: see `Reuse.report`.
REUSED, REUSED_TOKENS, SAVED_USD = "reused", "reused_tokens", "reuse_saved_usd"
CHECKED, DIFFERING = "reuse_checked", "reuse_differing"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a group: the completions that are copies, and the answers that are computed again."""

    copies: tuple[Completion, ...] = ()
    sources: Mapping[str, Answered] = field(default_factory=dict)  # of `copies`, by request id
    to_check: Mapping[str, Answered] = field(default_factory=dict)  # by request id

    def left(self, by_row: Sequence[Sequence[Request]]) -> list[list[Request]]:
        """The requests that the engine has to answer; rows without one are left out."""
        rows = ([r for r in row if r.request_id not in self.sources] for row in by_row)
        return [row for row in rows if row]

    def checked(self, job_id: str, completions: Iterable[Completion]) -> dict[str, float]:
        """Figures for the job's report, after comparing what was computed again."""
        completions = list(completions)
        copies = [done for done in completions if done.reused_from is not None]
        differing = 0
        pairs = [(c, self.to_check[c.request_id]) for c in completions if self._may_tell(c)]
        for done, answer in pairs:
            if _is_same(done, answer.record):
                continue
            differing += 1
            log.error(
                "%s is not what %s says, though weights, numeric class, prompt, sampling and seed "
                "are the same: audit both jobs with `specbatch audit`, and submit job %s without "
                "reuse_outputs until you know why",
                *(done.request_id, answer.name, job_id),
            )
        figures = {
            REUSED: len(copies),
            REUSED_TOKENS: sum(len(done.token_ids) for done in copies),
            SAVED_USD: sum(self.sources[done.request_id].record.cost_usd for done in copies),
            CHECKED: len(pairs),
            DIFFERING: differing,
        }
        return {name: float(value) for name, value in figures.items() if value}

    def _may_tell(self, done: Completion) -> bool:
        return done.error is None and done.request_id in self.to_check


NO_REUSE = Reuse()


def known_answers(
    store: Store, job: JobRow, spec: JobSpec, by_row: Sequence[Sequence[Request]]
) -> Reuse:
    """What the store knows of these requests; the job's model and numeric class are pinned."""
    if not may_reuse(job, spec):
        return NO_REUSE
    requests: defaultdict[bytes, list[str]] = defaultdict(list)
    for request in chain.from_iterable(by_row):
        digest = request_digest(job, request.prompt_ids, request.params, request.seed)
        requests[digest].append(request.request_id)
    try:
        answers = store.answered(job.tenant, list(requests))
    except StoreError as error:
        log.warning("job %s: earlier answers cannot be read: %s", job.job_id, error)
        return NO_REUSE
    sources, to_check = {}, {}
    for digest, answer in answers.items():
        for request_id in requests[digest]:
            kept = to_check if _is_drawn(request_id, spec.reuse_check) else sources
            kept[request_id] = answer
    copies = tuple(_copy(request_id, answer) for request_id, answer in sources.items())
    return Reuse(copies, sources, to_check)


def offer_answers(
    store: Store,
    job: JobRow,
    spec: JobSpec,
    rows: Iterable[PromptRow],
    records: Iterable[CompletionRecord],
) -> None:
    """Keep what was computed for later requests. Without it only speed is lost."""
    answers = _answers_of(job, spec, rows, records)
    if not answers:
        return
    try:
        store.offer_answers(job.job_id, answers)
    except StoreError as error:
        log.warning("answers of job %s cannot be reused: %s", job.job_id, error)


def _answers_of(
    job: JobRow, spec: JobSpec, rows: Iterable[PromptRow], records: Iterable[CompletionRecord]
) -> dict[bytes, tuple[int, int]]:
    """The (row, sample) that answers a request; none of a job without reuse."""
    by_index = {row.row_index: row for row in rows}
    found = {}
    for record in records:
        decided = replace(
            job,
            numeric_class=record.numeric_class,
            model_fingerprint=record.model_fingerprint,
        )
        is_new = record.reused_from is None and record.error is None
        if is_new and record.finish_reason is not FinishReason.ERROR and may_reuse(decided, spec):
            row = by_index[record.row_index]
            params = spec.sampling.params(dict(row.overrides))
            digest = request_digest(decided, row.prompt_ids, params, record.seed)
            found[digest] = (record.row_index, record.sample_index)
    return found


def may_reuse(job: JobRow, spec: JobSpec) -> bool:
    """Whether the job wants it, all that bits depend on is known, and its texts are kept."""
    is_known = not {job.numeric_class, job.model_fingerprint} & {None, UNKNOWN}
    return spec.reuse_outputs and job.privacy.is_full and is_known


def request_digest(
    job: JobRow, prompt_ids: Sequence[int], params: SamplingParams, seed: int
) -> bytes:
    """Equal for requests that have the same answer. Greedy answers do not depend on the seed."""
    of_format = [version("specbatch"), version("llguidance")] if params.form else []
    said = [
        *("specbatch request 1", job.model_fingerprint, job.numeric_class, list(prompt_ids)),
        *(asdict(params), seed if params.temperature else 0, of_format),
    ]
    data = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def _copy(request_id: str, answer: Answered) -> Completion:
    """As the engine gives it, but that no pass was needed."""
    record = answer.record
    # That calls of functions stood before the stop is found out again when it is recorded.
    calls = record.finish_reason is FinishReason.TOOL_CALLS
    return Completion(
        request_id=request_id,
        token_ids=tuple(record.token_ids),
        origins=(Origin.PLAIN,) * len(record.token_ids),
        logprobs=tuple(record.logprobs),
        finish_reason=FinishReason.STOP if calls else record.finish_reason,
        proposed=0,
        accepted=0,
        verifier_passes=0,
        compute_sec=0.0,
        decode_sec=0.0,
        baseline_sec=0.0,
        proposed_at_depth=(),
        accepted_at_depth=(),
        top_logprobs=record.top_logprobs,
        reused_from=answer.name,
    )


def _is_same(done: Completion, record: CompletionRecord) -> bool:
    said, computed = record.logprobs, as_float32(done.logprobs)
    return tuple(done.token_ids) == tuple(record.token_ids) and _bits(computed) == _bits(said)


def _bits(values: Sequence[float]) -> list[str]:
    return [value.hex() for value in as_float32(values)]


def _is_drawn(request_id: str, share: float) -> bool:
    drawn = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") < share * 2.0**64
