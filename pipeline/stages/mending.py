"""Mending: what a job computes for outputs that ended without the form that they were asked for.

    continue  what `max_tokens` cut continues from where it was, with the same noise
    retry     what is malformed then is sampled again, with other seeds, until one has its form

Both are further requests in the engine, whose time is charged to the row. A retry that helps takes
the place of what was written first; if none does, that stays. Nothing here depends on drafts, on
the batch or on when it is done, so a group that is verified again comes to the same bits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import zip_longest

from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.stages.requests import records_of, row_and_sample
from specbatch.pipeline.stages.texts import with_text
from specbatch.schemas.malformed import CONTINUED, MENDED, RETRIED, MalformedSpec
from specbatch.schemas.provenance import Provenance, Ticks
from specbatch.schemas.records import (
    FINISHED,
    FinishReason,
    JobRow,
    Origin,
    PromptRow,
    Recheck,
)
from specbatch.schemas.seeds import retry_seed
from specbatch.schemas.spec import JobSpec

log = logging.getLogger(__name__)

# Requests in, those completions out that there will ever be.
Answer = Callable[[Sequence[Request]], Iterable[Completion]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one malformed output."""

    completion: Completion
    request: Request  # that would have written it at once
    continued: bool
    retried: bool
    has_form: bool
    refused: str | None = None  # why the engine could not continue it


@dataclass(frozen=True, slots=True)
class Mended:
    """A group's completions under the ids of their own requests, and what mending did, by id."""

    completions: Sequence[Completion]
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)


_Course = Generator[Request, Completion, Outcome]  # yields requests, one at a time


def mended(
    mending: Mending, requests: Mapping[str, Request], done: Iterable[Completion], answer: Answer
) -> Mended:
    """The completions with what was computed beside them. `requests`: by id, of all of `done`.

    An output whose further requests have no answer is left out: it is not finished. Raises what
    `answer` raises.
    """
    done = list(done)
    policy = mending.spec.output.malformed
    to_mend = [c for c in done if policy.mends and not mending.has_form(requests, c)]
    if not to_mend:
        return Mended(done)
    courses = {c.request_id: mending.course(requests[c.request_id], c) for c in to_mend}
    outcomes = _run(courses, answer)
    if refused := [outcome.refused for outcome in outcomes.values() if outcome.refused]:
        message = "job %s: %d malformed outputs could not be continued: %s"
        log.warning(message, mending.job.job_id, len(refused), refused[0])
    left = [
        outcomes[c.request_id].completion if c.request_id in outcomes else c
        for c in done
        if c.request_id in outcomes or c.request_id not in courses
    ]
    return Mended(left, outcomes)


def _run(courses: Mapping[str, _Course], answer: Answer) -> dict[str, Outcome]:
    """All courses to their ends, in rounds: the requests of a round are decided together."""
    outcomes: dict[str, Outcome] = {}
    asked: dict[str, tuple[str, _Course]] = {}  # by the id of a request: whose it is

    def advance(name: str, course: _Course, given: Completion | None) -> Request | None:
        try:
            request = next(course) if given is None else course.send(given)
        except StopIteration as end:
            outcomes[name] = end.value
            return None
        asked[request.request_id] = (name, course)
        return request

    wanted = [r for name, course in courses.items() if (r := advance(name, course, None))]
    while wanted:
        answers = list(answer(wanted))
        decided = [(*asked.pop(done.request_id), done) for done in answers]
        wanted = [r for one in decided if (r := advance(*one))]
    return outcomes


def mending_report(
    outcomes: Mapping[str, Outcome], completions: Iterable[Completion]
) -> dict[str, float]:
    """What mending adds to the job's report, of these of a group's completions."""
    counts = Counter[str]()
    for found in (outcomes[c.request_id] for c in completions if c.request_id in outcomes):
        counts[CONTINUED] += found.continued
        counts[RETRIED] += found.retried
        counts[MENDED] += found.has_form
    return {name: float(count) for name, count in counts.items() if count}


@dataclass(frozen=True)
class Mending:
    """Mends malformed completions of a group's rows."""

    job: JobRow
    spec: JobSpec
    rows: Sequence[PromptRow]
    tokenizer: Callable[[], TextTokenizer]  # called only if something has a form

    @cached_property
    def _by_index(self) -> dict[int, PromptRow]:
        return {row.row_index: row for row in self.rows}

    def has_form(self, requests: Mapping[str, Request], done: Completion) -> bool:
        """Whether nothing is to be mended. A failure is none of the form's, and a copy has been
        through this before."""
        request = requests.get(done.request_id)
        if request is None or not request.params.form or done.reused_from is not None:
            return True
        return done.finish_reason not in FINISHED or self._is_well_formed(request, done)

    def course(self, request: Request, first: Completion) -> _Course:
        """From a malformed completion to what is left of it."""
        policy, best, retried = self.spec.output.malformed, first, False
        longer = replace(request, params=policy.longer(request.params))
        continued, refused = False, None
        if _is_cut(first, request, longer):
            further = yield _continuing(longer, first)
            continued, refused = further.finish_reason in FINISHED, further.error
            best = joined(first, further)
        if self._is_well_formed(request, best):
            return Outcome(best, longer, continued, retried, True)
        spent: list[Completion] = []
        for number in self._retries(request, policy):
            retried = True
            again = _sampled_again(longer, number)
            found = yield again
            if self._is_well_formed(request, found):
                named = replace(found, request_id=request.request_id, retry=number)
                of = replace(again, request_id=request.request_id)
                charged = charged_with(named, (best, *spent))
                return Outcome(charged, of, continued, retried, True, refused)
            spent.append(found)
        has_more = len(best.token_ids) > request.params.max_tokens
        charged = charged_with(best, spent)
        of = longer if has_more else request
        return Outcome(charged, of, continued, retried, False, refused)

    def _retries(self, request: Request, policy: MalformedSpec) -> range:
        """Another seed changes nothing where the likeliest token is taken."""
        return range(1, 1 + (policy.retries if request.params.temperature > 0 else 0))

    def _is_well_formed(self, request: Request, done: Completion) -> bool:
        if done.finish_reason not in FINISHED:
            return False
        row = self._by_index[row_and_sample(request.request_id)[0]]
        own = replace(done, request_id=request.request_id)
        records = records_of(self.job, [row], [own], {}, 0)
        tokenizer = self.tokenizer()
        texts = [tokenizer.decode(done.token_ids)]
        [record] = with_text(records, texts, [row], self.spec, tokenizer.decode)
        return not record.is_malformed


def is_own(request_id: str) -> bool:
    """Whether a request is of a row's sample itself, and not one beside it."""
    return request_id.count("/") == 2


# --- the requests --------------------------------------------------------------------------------
def _is_cut(first: Completion, request: Request, longer: Request) -> bool:
    """Whether `max_tokens` ended it, and not the room in the model's context."""
    is_whole = len(first.token_ids) == request.params.max_tokens
    can_grow = longer.params.max_tokens > request.params.max_tokens
    return first.finish_reason is FinishReason.LENGTH and is_whole and can_grow


def _continuing(longer: Request, first: Completion) -> Request:
    # Where a pass ends is read from the origins, so no other may follow on a draft that was cut.
    assert first.origins[-1] != Origin.ACCEPTED, "no draft reaches to the limit of tokens"
    watch = longer.watch_text
    return replace(
        longer,
        request_id=f"{longer.request_id}/mend/0",
        decided_ids=first.token_ids,
        draft_ids=(),
        watch_text=None if watch is None else partial(_past, watch, first.token_ids),
    )


def _past(
    watch: Callable[[], Callable[[int], bool]], tokens: Sequence[int]
) -> Callable[[int], bool]:
    """What watches a text, with the tokens before it, none of which has ended it."""
    ends = watch()
    for token in tokens:
        ends(token)
    return ends


def _sampled_again(longer: Request, number: int) -> Request:
    return replace(
        longer,
        request_id=f"{longer.request_id}/mend/{number}",
        seed=retry_seed(longer.seed, number),
        draft_ids=(),
    )


# --- two completions in one ----------------------------------------------------------------------
def joined(first: Completion, further: Completion) -> Completion:
    """The first completion with its continuation appended; the first alone if that failed. Both are
    paid for."""
    if further.finish_reason not in FINISHED:
        return charged_with(first, [further])
    tops = None
    if first.top_logprobs is not None and further.top_logprobs is not None:
        tops = (*first.top_logprobs, *further.top_logprobs)
    return replace(
        first,
        token_ids=(*first.token_ids, *further.token_ids),
        origins=(*first.origins, *further.origins),
        logprobs=(*first.logprobs, *further.logprobs),
        top_logprobs=tops,
        finish_reason=further.finish_reason,
        proposed=first.proposed + further.proposed,
        accepted=first.accepted + further.accepted,
        verifier_passes=first.verifier_passes + further.verifier_passes,
        proposed_at_depth=_sums(first.proposed_at_depth, further.proposed_at_depth),
        accepted_at_depth=_sums(first.accepted_at_depth, further.accepted_at_depth),
        compute_sec=first.compute_sec + further.compute_sec,
        decode_sec=first.decode_sec + further.decode_sec,
        baseline_sec=first.baseline_sec + further.baseline_sec,
        shadow_proposed=first.shadow_proposed + further.shadow_proposed,
        shadow_accepted=first.shadow_accepted + further.shadow_accepted,
        shadow_pair=first.shadow_pair + further.shadow_pair,
        recheck=_both(first.recheck, further.recheck),
        provenance=_one_after_other(first.provenance, further.provenance),
        ticks=first.ticks + further.ticks,
    )


def _both(one: Recheck, other: Recheck) -> Recheck:
    return Recheck(
        one.tokens + other.tokens,
        one.differing + other.differing,
        max(one.largest_margin, other.largest_margin),
    )


def _sums(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def _one_after_other(one: Provenance, other: Provenance) -> Provenance:
    names = [of.sources[maker] for of in (one, other) for maker in of.makers]
    sources = tuple(dict.fromkeys(names))
    return Provenance(
        steps=(*one.steps, *other.steps),
        pass_ticks=(*one.pass_ticks, *other.pass_ticks),
        sources=sources,
        makers=tuple(map(sources.index, names)),
        drafted=(*one.drafted, *other.drafted),
        rejected=(*one.rejected, *other.rejected),
    )


def charged_with(done: Completion, others: Sequence[Completion]) -> Completion:
    """With the time of other completions of its row, whose tokens are not used: its overhead."""
    ticks = sum(other.ticks.total for other in others)
    return replace(
        done,
        ticks=done.ticks + Ticks(overhead=ticks),
        recheck=reduce(_both, (other.recheck for other in others), done.recheck),
        compute_sec=done.compute_sec + sum(other.compute_sec for other in others),
    )
