"""Reuse: a request that has an answer is not computed again. The answer is in the store, or is that
of the same request in its group.

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
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import NamedTuple

import orjson

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.rules import is_whole
from specbatch.pipeline.storage.artefacts import ReuseNotes
from specbatch.schemas.errors import StoreError
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import (
    Answered,
    CompletionRecord,
    FinishReason,
    JobRow,
    Origin,
)
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

# What a report has of reuse: see `reuse_report`.
REUSED, REUSED_TOKENS, SAVED_USD = "reused", "reused_tokens", "reuse_saved_usd"
CHECKED, DIFFERING = "reuse_checked", "reuse_differing"
_DIGEST_BYTES = 16
# Packages whose versions decide where a text ends, beside the model.
_DECIDE_ENDS = ("specbatch", "llguidance", "tokenizers")


class _Asked(NamedTuple):
    digest: bytes
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a group: what need not be computed, and the answers that are computed again. All by
    request id, which is also how `reused_from` names a completion."""

    asked: Mapping[str, _Asked] = field(default_factory=dict)  # all of its requests
    sources: Mapping[str, Answered] = field(default_factory=dict)  # answers of the store
    repeats: Mapping[str, str] = field(default_factory=dict)  # the first of the same requests here
    to_check: Mapping[str, Answered] = field(default_factory=dict)

    @property
    def is_any(self) -> bool:
        return bool(self.sources or self.repeats)

    def left(self, by_row: Sequence[Sequence[Request]]) -> list[list[Request]]:
        """The requests that the engine has to answer; rows without one are left out."""
        known = self.sources.keys() | self.repeats.keys()
        rows = ([r for r in row if r.request_id not in known] for row in by_row)
        return [row for row in rows if row]

    def with_copies(self, computed: Iterable[Completion]) -> list[Completion]:
        """What the engine has computed, and what is the same."""
        done = {completion.request_id: completion for completion in computed}
        copies = [_of_record(request_id, answer) for request_id, answer in self.sources.items()]
        copies += [
            _copy(done[first], request_id, done[first].finish_reason, first)
            for request_id, first in self.repeats.items()
            if first in done
        ]
        return [*done.values(), *copies]

    def answered_by(self, job: JobRow, requests: Mapping[str, Request]) -> Reuse:
        """The same, where these requests were answered instead of those with the same ids: then
        their answers are offered for what was asked for at last."""
        if not self.asked:
            return self
        digests = {
            name: _Asked(request_digest(job, request), request.params.max_tokens)
            for name, request in requests.items()
        }
        changed = {name for name, asked in digests.items() if asked != self.asked.get(name)}
        to_check = {k: answer for k, answer in self.to_check.items() if k not in changed}
        return replace(self, asked={**self.asked, **digests}, to_check=to_check)

    def notes(
        self, completions: Iterable[Completion], records: Iterable[CompletionRecord]
    ) -> ReuseNotes:
        """Of a group's completions and their records, in one order. Logs what differs."""
        pairs = list(zip(completions, records, strict=True))
        costs = {done.request_id: record.cost_usd for done, record in pairs}
        costs |= {answer.name: answer.record.cost_usd for answer in self.sources.values()}
        return ReuseNotes(
            answers={
                _place(record): asked.digest.hex()
                for done, record in pairs
                if (asked := self.asked.get(done.request_id)) and _is_whole(done, asked.max_tokens)
            },
            saved_usd={
                _place(record): costs[done.reused_from]
                for done, record in pairs
                if done.reused_from is not None
            },
            checked={
                _place(record): _differs(done, self.to_check[done.request_id])
                for done, record in pairs
                if done.request_id in self.to_check and done.error is None
            },
        )


NO_REUSE = Reuse()


def known_answers(
    store: Store, job: JobRow, spec: JobSpec, by_row: Sequence[Sequence[Request]]
) -> Reuse:
    """What the store knows of these requests; the job's model and numeric class are pinned."""
    if not may_reuse(job, spec):
        return NO_REUSE
    asked = {
        r.request_id: _Asked(request_digest(job, r), r.params.max_tokens)
        for r in chain.from_iterable(by_row)
    }
    alike: defaultdict[bytes, list[str]] = defaultdict(list)
    for request_id, one in asked.items():
        alike[one.digest].append(request_id)
    try:
        answers = store.answered(job.tenant, list(alike), spec.placement)
    except StoreError as error:
        log.warning("job %s: earlier answers cannot be read: %s", job.job_id, error)
        answers = {}
    sources: dict[str, Answered] = {}
    repeats: dict[str, str] = {}
    to_check: dict[str, Answered] = {}
    for digest, (first, *others) in alike.items():
        answer = answers.get(digest)
        if answer is not None and not _is_drawn(first, spec.reuse_check):
            sources |= dict.fromkeys((first, *others), answer)
            continue
        repeats |= dict.fromkeys(others, first)
        if answer is not None:
            to_check[first] = answer
    return Reuse(asked, sources, repeats, to_check)


def reuse_report(notes: ReuseNotes, records: Iterable[CompletionRecord]) -> dict[str, float]:
    """What these of a group's records add to their job's report; nothing where nothing is."""
    records = list(records)
    copies = [record for record in records if record.reused_from is not None]
    checked = [notes.checked[place] for r in records if (place := _place(r)) in notes.checked]
    figures = {
        REUSED: len(copies),
        REUSED_TOKENS: sum(len(record.token_ids) for record in copies),
        SAVED_USD: sum(notes.saved_usd[_place(record)] for record in copies),
        CHECKED: len(checked),
        DIFFERING: sum(checked),
    }
    return {name: float(value) for name, value in figures.items() if value}


def offer_answers(
    store: Store, job: JobRow, notes: ReuseNotes, records: Iterable[CompletionRecord]
) -> None:
    """Keep what was computed for later requests. Without it only speed is lost."""
    answers = {
        bytes.fromhex(notes.answers[place]): (record.row_index, record.sample_index)
        for record in records
        if (place := _place(record)) in notes.answers
        and record.error is None
        and is_whole(record.token_ids)  # a policy took nothing out
    }
    if not answers:
        return
    try:
        store.offer_answers(job.job_id, answers)
    except StoreError as error:
        log.warning("answers of job %s cannot be reused: %s", job.job_id, error)


def may_reuse(job: JobRow, spec: JobSpec) -> bool:
    """Whether the job wants it, all that bits depend on is known, and its texts are kept."""
    is_known = not {job.numeric_class, job.model_fingerprint} & {None, UNKNOWN}
    return spec.reuse_outputs and job.privacy.is_full and is_known


def request_digest(job: JobRow, request: Request) -> bytes:
    """Equal for requests that have the same answer. Greedy answers do not depend on the seed."""
    params = request.params
    versions = _versions() if params.form or params.stop else ()
    said = [
        *("specbatch request 1", job.model_fingerprint, job.numeric_class),
        *(list(request.prompt_ids), asdict(params), request.seed if params.temperature else 0),
        versions,
    ]
    data = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


@cache
def _versions() -> tuple[str, ...]:
    return tuple(map(version, _DECIDE_ENDS))


def _place(record: CompletionRecord) -> str:
    return f"{record.row_index}/{record.sample_index}"


def _is_whole(done: Completion, max_tokens: int) -> bool:
    """Whether the next to ask may have it: it was computed here, and went to its end. A worker with
    more memory for KV would write on where this one had no room."""
    if done.reused_from is not None or done.error is not None:
        return False
    return done.finish_reason is not FinishReason.LENGTH or len(done.token_ids) >= max_tokens


def _of_record(request_id: str, answer: Answered) -> Completion:
    """A completion of the store, as the engine gives it."""
    record = answer.record
    # That calls of functions stood before the stop is found out again when it is recorded.
    calls = record.finish_reason is FinishReason.TOOL_CALLS
    reason = FinishReason.STOP if calls else record.finish_reason
    return _copy(record, request_id, reason, answer.name)


def _copy(
    of: Completion | CompletionRecord, request_id: str, reason: FinishReason, source: str
) -> Completion:
    """What was said, without what it took: no pass decided it here."""
    return Completion(
        request_id=request_id,
        token_ids=tuple(of.token_ids),
        origins=(Origin.PLAIN,) * len(of.token_ids),
        logprobs=tuple(of.logprobs),
        finish_reason=reason,
        proposed=0,
        accepted=0,
        verifier_passes=0,
        compute_sec=0.0,
        decode_sec=0.0,
        baseline_sec=0.0,
        proposed_at_depth=(),
        accepted_at_depth=(),
        error=of.error,
        top_logprobs=of.top_logprobs,
        reused_from=source if of.error is None else None,
        retry=of.retry if isinstance(of, Completion) else 0,
    )


def _differs(done: Completion, answer: Answered) -> bool:
    """Whether what was computed is something else than the store says, bit for bit."""
    said = answer.record
    if tuple(done.token_ids) == tuple(said.token_ids) and _bits(done) == _bits(said):
        return False
    log.error(
        "%s is not what %s says, though weights, numeric class, prompt, sampling and seed are the "
        "same: audit both jobs with `specbatch audit`, and submit jobs without reuse_outputs until "
        "you know why",
        *(done.request_id, answer.name),
    )
    return True


def _bits(of: Completion | CompletionRecord) -> list[str]:
    return [value.hex() for value in as_float32(of.logprobs)]


def _is_drawn(request_id: str, share: float) -> bool:
    drawn = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") < share * 2.0**64
