"""Continuous batching by vLLM, with our drafts, depths and accounts. Read `step` first.

The sequences here mirror those in vLLM's core: tokens, where they came from, and what they cost.
What the core decides is appended by the same rules as in the exact engine, so a stop token, a stop
string or a length ends a sequence in the same place.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import (
    Completion,
    EngineStats,
    GrammarState,
    Request,
    Wanted,
)
from specbatch.pipeline.engines.observing import Observer, Watch
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.grammar import GrammarProposer
from specbatch.pipeline.engines.proposers.guarded import GuardedProposer
from specbatch.pipeline.engines.proposers.history import HistoryProposer
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.recheck_sample import ONE_IN, is_chosen
from specbatch.pipeline.engines.speculation.speculator import Speculator
from specbatch.pipeline.engines.state.recovery import with_type
from specbatch.pipeline.engines.state.refusal import sequence_of
from specbatch.pipeline.engines.state.sequence import Sequence, stop_ids_of
from specbatch.pipeline.engines.state.step import NO_DRAFT, Draft, DraftPlan, Planned, Step
from specbatch.pipeline.engines.state.step_accounts import StepAccounts
from specbatch.pipeline.engines.vllm.core import Core, Emitted, Work
from specbatch.pipeline.engines.vllm.parameters import (
    is_plainly_greedy,
    needs_no_speculation,
    refused,
)
from specbatch.pipeline.engines.vllm.probe import Verdict
from specbatch.pipeline.engines.vllm.proposer import CoreProposer
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.draft_switches import DraftSwitches
from specbatch.schemas.errors import (
    DeviceLostError,
    EngineError,
    ModelChangedError,
    ModelError,
)
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import FinishReason, Recheck, SamplingParams
from specbatch.schemas.speculation import AcceptanceCount

log = logging.getLogger(__name__)

TRIES = 2  # of a core with speculation that fails while it is loaded or tried
PASSED_OVER = 4  # times the batch: so many of another kind may overtake the first that waits


class Kind(NamedTuple):
    """Requests of one kind may share a batch. Where the probe found no fault there are two."""

    drafted: bool  # the core speculates
    greedy: bool | None  # None: both at once


class VllmEngine:
    """Steps one core at a time: with speculation, or without for what vLLM cannot draft for."""

    def __init__(
        self,
        make_core: Callable[[bool], Core],
        judge: Callable[[Core], Verdict],
        vocab_size: int,
        eos_ids: frozenset[int],
        max_sequences: int,
        knowledge: Knowledge | None = None,
        observer: Observer | None = None,
        recheck_one_in: int = ONE_IN,
        max_depth: int = tuning.MAX_DEPTH,
        own_speculation: str | None = None,
        own_fingerprint: str = "",
    ) -> None:
        """`make_core(drafted)` makes a core with speculation or without, once it is needed.
        `judge` says what speculation in a core is good for. `recheck_one_in`: of so many outputs
        one is rechecked; 0: none. `max_depth`: draft tokens that a core has room for per sequence.
        `own_speculation`: the method by which such a core drafts itself, `own_fingerprint` that of
        its head or draft model. Only one thread may use it."""
        self._make_core = make_core
        self._judge = judge
        self._verdict: Verdict | None = None  # until a core with speculation was tried
        self._failed_tries, self._failed_at = 0, 0
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_sequences = max_sequences
        self._max_depth = max_depth
        self._block = BlockProposer()
        proposers: list[Proposer] = [
            *(GrammarProposer(), self._block, HistoryProposer(vocab_size), NgramProposer())
        ]
        self._drafts_itself = own_speculation is not None
        if own_speculation is not None:
            proposers.append(CoreProposer(own_speculation, self._own_draft, own_fingerprint))
        self.stats = EngineStats()
        self._speculator = Speculator(
            [GuardedProposer(p, self._count_failure, self._on_open) for p in proposers],
            knowledge or Knowledge(),
        )
        self._accounts = StepAccounts(self.stats, self._speculator.knowledge.step_time)
        self._watch: Watch | None = None
        if observer is not None:
            self._watch = Watch(observer, self.stats, self._kv_blocks, max_sequences)
            self._speculator.decision_log.on_decision = observer.drafting_switched
            self._speculator.decision_log.on_collapse = observer.acceptance_collapsed
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}  # by request id, in the order of their arrival
        self._recheck_one_in = recheck_one_in
        self.failed_rechecking = False  # a step failed that held a recheck, perhaps because of it
        self._rechecked: dict[str, Sequence] = {}  # finished; their outputs are fed once more
        self._refused: list[Completion] = []
        self._kind: Kind | None = None  # of those that run, or ran last
        self._core: Core | None = None
        self._given = False  # drafts, in the last step
        self._poisoned = False  # a pass gave NaN, and its KV may be cached
        self._overtaken = 0  # how many passed one that waits, since it could run

    # --- what callers do -----------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. The next step returns an error for one that cannot run."""
        if any(not 0 <= token < self._vocab_size for token in request.draft_ids):
            request = replace(request, draft_ids=())  # a hint that cannot be right
        if request.max_depth is None or request.max_depth > self._max_depth:
            request = replace(request, max_depth=self._max_depth)
        sequence = sequence_of(
            request,
            stop_ids=stop_ids_of(request, self._eos_ids, self._vocab_size),
            max_length=len(request.prompt_ids) + request.params.max_tokens,
        )
        sequence.error = refused(request, self._vocab_size) or sequence.error
        if sequence.error is None and sequence.remaining <= 0:
            sequence.error = f"{len(request.decided_ids)} tokens of output leave no room for more"
        if sequence.error is not None:
            sequence.finish_reason = FinishReason.ERROR
            self._refused.append(sequence.completion())
            return
        self._waiting.append(sequence)
        self._accounts.begin(sequence)

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        """Drop all matching requests and return what they had so far, as cancelled."""
        dropped = [s for s in self.unfinished if matches(s.request)]
        return [self._finish(s, FinishReason.CANCELLED) for s in dropped]

    @property
    def unfinished(self) -> list[Sequence]:
        """All unfinished sequences. Any thread may read this."""
        return [*list(self._running.values()), *list(self._rechecked.values()), *self._waiting]

    def unstarted(self) -> list[str]:
        return [s.request.request_id for s in self._waiting]

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """Use what earlier runs of a job found about drafts. Ignored after its first request."""
        self._speculator.decision_log.prime(job, counts)

    def lessons(self, job: str) -> Lessons:
        """What a job taught about drafts since the last call."""
        lessons = self._speculator.decision_log.lessons(job)
        return replace(lessons, measured=self._accounts.take(job))

    @property
    def knowledge(self) -> Knowledge:
        return self._speculator.knowledge

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Suggest what follows a request's first `position` output tokens. May be late."""
        sequence = self._running.get(request_id)
        if sequence is None or any(not 0 <= token < self._vocab_size for token in token_ids):
            return
        self.stats.hints_followed += self._block.extend(sequence, position, token_ids)

    def switch(self, switches: DraftSwitches) -> None:
        """From the next step on, no drafts are verified for what an operator has switched off. A
        core that drafts itself keeps doing so: only a core without speculation would not."""
        self._speculator.switch(switches)

    def wanted(self) -> list[Wanted]:
        return self._block.wanting()

    @property
    def verdict(self) -> Verdict | None:
        """What the probe found; None: no core with speculation was needed yet."""
        return self._verdict

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._rechecked or self._refused)

    def close(self) -> None:
        """Give the device's memory back."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    # --- a step --------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Load what the next step needs: for what waits first, once nothing runs."""
        if self._waiting and not (self._running or self._rechecked):
            self._kind, self._overtaken = self._prepare(self._waiting[0]), 0

    def step(self) -> list[Completion]:
        """One pass of the core over all that runs; returns what finished."""
        self.prepare()  # which is no part of the step
        begun = now()
        self._admit()
        if not (self._running or self._rechecked) or self._core is None:
            return self._take_refused()
        drafting = [s for s in self._running.values() if s.num_output and s.pending == 1]
        if self._speculates:
            plan = self._speculator.propose(drafting, self._room_for_draft)
        else:  # a speculator that gets no draft through would look for the reason
            plan = DraftPlan([NO_DRAFT] * len(drafting))
        drafts = dict(zip(drafting, plan.drafts, strict=True))
        given = any(map(len, plan.drafts))
        # What is not to be verified is taken back.
        if self._speculates and (given or self._given or self._drafts_itself):
            self._core.draft({s.request.request_id: d.token_ids for s, d in drafts.items()})
        self._given = given
        passing = now()
        try:
            emitted = self._core.step()
        except Exception:
            self.failed_rechecking = bool(self._rechecked)
            self.close()  # the next engine needs its memory
            raise
        passed = now() - passing
        self.stats.forward_sec += passed / TICKS_PER_SEC
        judged = [event for event in emitted if event.request_id in self._rechecked]
        emitted = [event for event in emitted if event.request_id not in self._rechecked]
        step = self._mirrored(emitted, drafts, plan, begun)
        step.pass_ticks = passed
        for event, sequence, draft in zip(emitted, step.deciding, step.drafts, strict=True):
            before, accepted = len(sequence.tokens), sequence.accepted
            self._accept(event, sequence, draft)
            step.emitted[sequence] = len(sequence.tokens) - before
            self.stats.accepted += sequence.accepted - accepted
        self._count(step)
        self._accounts.step(step, [step], lambda rows: rows)
        if self._watch is not None:
            self._watch.decided(step.deciding)
        if self._poisoned:  # or the next row with the same prefix reads the same KV
            self._drop_cache()
        done = self._take_refused() + self._take_finished(emitted, step)
        done += [self._take_recheck(event) for event in judged]
        if self._watch is not None:
            self._watch.stepped([step])
        return done

    def _own_draft(self, request_id: str) -> Seq[int]:
        return () if self._core is None else self._core.own_draft(request_id)

    def _kv_blocks(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self._core is None else self._core.kv_blocks

    def _drop_cache(self) -> None:
        """All that runs is computed anew."""
        self._poisoned = False
        if self._core is not None:
            self._core.drop_cache()
        for sequence in (*self._running.values(), *self._rechecked.values()):
            self.stats.preemptions += sequence.kv.length > 0
            sequence.kv.length = 0

    def _room_for_draft(self, sequence: Sequence, wanted: int) -> int:
        most = 0 if self._core is None else self._core.options.max_depth
        return min(wanted, most, sequence.remaining - 1)

    def _mirrored(
        self,
        emitted: Seq[Emitted],
        drafts: Mapping[Sequence, Draft],
        plan: DraftPlan,
        begun: int,
    ) -> Step:
        """What the core did, as a step of ours: its sequences, and the tokens each had in it."""
        assert self._core is not None
        deciding = [self._running[event.request_id] for event in emitted]
        planned = [
            Planned(s, max(1, s.pending - (0 if s.kv.length else event.cached)))
            for s, event in zip(deciding, emitted, strict=True)
        ]
        heard = set(deciding)
        for request_id, sequence in self._running.items():
            if sequence in heard:
                continue
            if draft := drafts.get(sequence):  # it was put off, and its draft with it
                self._speculator.abandon(sequence, draft)
            computed = self._core.computed(request_id) or 0
            if computed < sequence.kv.length:
                self.stats.preemptions += 1
            elif computed > sequence.kv.length:
                planned.append(Planned(sequence, computed - sequence.kv.length))
            sequence.kv.length = computed
        for request_id, sequence in self._rechecked.items():
            fed = self._core.computed(request_id)
            done = len(sequence.tokens) if fed is None else fed
            if done > sequence.kv.length:
                planned.append(Planned(sequence, done - sequence.kv.length))
                sequence.kv.length = done
        if not planned:  # all were put off: the step is theirs all the same
            put_off = (*self._running.values(), *self._rechecked.values())
            planned = [Planned(sequence, 1) for sequence in put_off]
        of_step = [
            _verified(drafts.get(sequence, NO_DRAFT), event)
            for sequence, event in zip(deciding, emitted, strict=True)
        ]
        ticks = int(plan.drafting_sec * TICKS_PER_SEC)
        return Step(planned, deciding, replace(plan, drafts=of_step), begun, ticks)

    def _accept(self, event: Emitted, sequence: Sequence, draft: Draft) -> None:
        """Append what was decided. The core ends requests itself: then the last token may be an
        agreed draft token, with nothing behind it."""
        tokens, logprobs = event.token_ids, event.logprobs
        self.stats.reused_tokens += event.cached
        if not tokens:
            return  # the core ended it: see `_take_finished`
        if any(map(math.isnan, logprobs)):
            at = sequence.num_output
            sequence.finish_reason = FinishReason.ERROR
            sequence.error = f"the verifier's logits are NaN at token {at}"
            self._poisoned = True
            return
        if event.finished and draft.token_ids[: len(tokens)] == tokens:
            tokens, logprobs = [*tokens, tokens[-1]], [*logprobs, 0.0]  # ends before that one
        agreed = len(tokens) - 1
        tops = [*event.tops, ((), ())] if event.tops else ()
        try:
            sequence.accept(draft.token_ids, tokens, logprobs, tops, draft.proposer)
        except Exception as error:  # its own stop-string check raised
            where = f"step {self.stats.steps + 1} of the engine, at token {sequence.num_output}"
            log.warning("request %s: %s", event.request_id, where, exc_info=error)
            sequence.finish_reason = FinishReason.ERROR
            sequence.error = f"{where}: {with_type(error)}"
            return
        sequence.kv.length = len(sequence.tokens) - 1
        self._speculator.on_verified(sequence, draft, agreed)

    def _count(self, step: Step) -> None:
        self.stats.proposed += sum(map(len, step.drafts))
        self.stats.generated_tokens += sum(step.emitted.values())
        self.stats.verifier_passes += len(step.deciding)

    # --- which requests run --------------------------------------------------------------------
    def _admit(self) -> None:
        """First come, first served among those that may share a batch."""
        for sequence in list(self._admissible()):
            self._waiting.remove(sequence)
            self._start(sequence)

    def _prepare(self, first: Sequence) -> Kind:
        """Have the core that a request needs. With speculation, it is tried before it is used."""
        if 0 < self._failed_tries < TRIES and self.stats.finished > self._failed_at:
            self._verdict = None  # it may have been short of memory, and for a moment
        if self._verdict is None and self._may_draft(first):
            self._verdict = self._tried()
        kind = self._kind_of(first)
        self._changed_core(kind.drafted)
        return kind

    def _tried(self) -> Verdict:
        """What speculation is good for. Where it cannot even be tried, jobs run without it; once
        what ran has ended it is tried a second time. A load takes minutes, so no third time, and no
        second one where vLLM refuses the model or the options."""
        try:
            verdict = self._judge(self._changed_core(True))
        except (DeviceLostError, ModelChangedError):
            raise
        except Exception as error:
            log.warning("vLLM cannot speculate here", exc_info=error)
            self.close()
            self._failed_tries = TRIES if isinstance(error, ModelError) else self._failed_tries + 1
            self._failed_at = self.stats.finished
            again = ", and will be tried once more" if self._failed_tries < TRIES else ""
            fault = f"it cannot be tried: {with_type(error)}{again}"
            return Verdict.of_nothing(fault)
        self._failed_tries = 0
        return verdict

    def _admissible(self) -> Iterator[Sequence]:
        room, passed = self._max_sequences - len(self._running), False
        for sequence in list(self._waiting):
            if not room:
                return
            if self._kind_of(sequence) != self._kind:
                passed = True
                continue
            if passed:
                if self._overtaken >= PASSED_OVER * self._max_sequences:
                    return  # those that run end, then it is its turn
                self._overtaken += 1
            room -= 1
            yield sequence

    def _kind_of(self, sequence: Sequence) -> Kind:
        drafted = self._may_draft(sequence)
        apart = drafted and self._verdict is not None and not self._verdict.mixed
        return Kind(drafted, sequence.request.params.temperature == 0 if apart else None)

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether it runs in a core with speculation. Who never drafts takes the core that is here:
        another one would load the model again."""
        request, verdict = sequence.request, self._verdict
        if not self._max_depth or needs_no_speculation(request.params):
            return False
        if verdict is not None:
            if not (verdict.sampled if request.params.temperature else verdict.drafts):
                return False
            if request.grammar is not None and not verdict.formed:
                return False
        return request.depth != 0 or self._speculates

    @property
    def _speculates(self) -> bool:
        return self._core is not None and self._core.options.max_depth > 0

    def _changed_core(self, drafted: bool) -> Core:
        if self._core is None or self._speculates != drafted:
            self.close()
            self._core = self._make_core(drafted)
        return self._core

    def _start(self, sequence: Sequence) -> None:
        assert self._core is not None
        request, limit = sequence.request, self._core.context_tokens
        sequence.max_length = min(sequence.max_length, limit)
        try:
            if len(request.prompt_ids) >= limit or sequence.remaining <= 0:
                tokens = len(sequence.tokens)
                raise EngineError(f"prompt of {tokens} tokens does not fit the context of {limit}")
            self._core.add(
                Work(
                    request.request_id,
                    sequence.tokens,
                    _reachable(sequence),
                    sequence.stop_ids,
                    sequence.remaining,
                    request.seed,
                    grammar=_begun_grammar(request),
                )
            )
        except EngineError as error:
            sequence.error = str(error)
            self._refused.append(self._finish(sequence, FinishReason.ERROR))
            return
        self._running[request.request_id] = sequence

    # --- ends ----------------------------------------------------------------------------------
    def _take_finished(self, emitted: Seq[Emitted], step: Step) -> list[Completion]:
        done = []
        for event, sequence in zip(emitted, step.deciding, strict=True):
            if event.finished and sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.ERROR
                sequence.error = "vLLM ended the request before its end"
            if sequence.finish_reason is None or self._is_rechecked(sequence):
                continue
            done.append(self._finish(sequence, sequence.finish_reason))
        return done

    def _is_rechecked(self, sequence: Sequence) -> bool:
        """Feed an output again, one of 64, as one prompt: `exactness: fast` has to measure what it
        costs. Only of plainly greedy requests is it known what they should have decided."""
        request, ended = sequence.request, sequence.finish_reason
        if ended not in (FinishReason.STOP, FinishReason.LENGTH) or self._core is None:
            return False
        one_in = self._recheck_one_in
        if not (one_in and is_plainly_greedy(request) and is_chosen(request, one_in)):
            return False
        if len(sequence.tokens) >= self._core.context_tokens:
            return False
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self._core.drop([request.request_id])
        try:
            self._core.add(
                Work(request.request_id, sequence.tokens, params, (), 1, 0, judge_prompt=True)
            )
        except EngineError as error:  # the completion stands; it is only not looked at
            log.warning("recheck failed: %s", error)
            return False
        del self._running[request.request_id]
        self._rechecked[request.request_id] = sequence
        sequence.kv.length = 0
        return True

    def _take_recheck(self, event: Emitted) -> Completion:
        """Count the tokens that were not the likeliest, and by how much."""
        sequence = self._rechecked[event.request_id]
        assert sequence.finish_reason is not None
        judged = event.prompt_tops[-sequence.num_output :]
        pairs = zip(sequence.output, judged, strict=False)
        gaps = [values[0] - values[ids.index(token)] for token, (ids, values) in pairs]
        if len(gaps) == sequence.num_output and not any(map(math.isnan, gaps)):
            differing = [gap for gap in gaps if gap > 0]
            sequence.recheck = Recheck(len(gaps), len(differing), max(differing, default=0.0))
            self.stats.checked_tokens += len(gaps)
            self.stats.differing_tokens += len(differing)
            self.stats.largest_margin = max(self.stats.largest_margin, *differing, 0.0)
        return self._finish(sequence, sequence.finish_reason)

    def _take_refused(self) -> list[Completion]:
        refused, self._refused = self._refused, []
        return refused

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        sequence.finish_reason = reason
        request_id = sequence.request.request_id
        of = self._rechecked if request_id in self._rechecked else self._running
        if of.get(request_id) is sequence:
            del of[request_id]
            if self._core is not None:
                self._core.drop([request_id])
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._accounts.end(sequence)
        self._speculator.forget(sequence)
        if self._watch is not None:
            self._watch.finished(sequence)
        self.stats.finished += 1
        return sequence.completion()

    def _count_failure(self) -> None:
        self.stats.proposer_failures += 1

    def _on_open(self, proposer: str, reason: str) -> None:
        self._speculator.decision_log.record_disabled(proposer, reason)


def _begun_grammar(request: Request) -> GrammarState | None:
    """One for the core, which asks for masks before it tells what was decided. The sequence has
    its own: whatever the core decides must fit that one."""
    if request.grammar is None:
        return None
    state = request.grammar.begin()
    for token in request.decided_ids:
        state.append(token)
    return state


def _reachable(sequence: Sequence) -> SamplingParams:
    """With a least number of tokens that counts what is decided, and that the context has room for;
    vLLM refuses another one."""
    params = sequence.request.params
    least = params.min_tokens - len(sequence.request.decided_ids)
    return replace(params, min_tokens=min(max(0, least), sequence.remaining))


def _verified(draft: Draft, event: Emitted) -> Draft:
    """The part of a draft that the core had room for."""
    if len(draft) <= event.drafted:
        return draft
    return replace(draft, token_ids=draft.token_ids[: event.drafted])
