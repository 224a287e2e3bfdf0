"""The verify engine: each step is one ragged forward pass over every sequence of every group.

Without drafts a step may be several passes.

The engine knows nothing of Celery, SQL or text. Read `step` first: it is the table of contents.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from specbatch.kernels.verify.contract import Verdict
from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Completion, EngineStats, Request, Wanted
from specbatch.pipeline.engines.exact import multi_step
from specbatch.pipeline.engines.exact.model.batch import Chunk, to_host
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.exact.sampling.sampling import LastColumns
from specbatch.pipeline.engines.exact.sampling.verification import MostLikely, verify
from specbatch.pipeline.engines.exact.scheduler import Scheduler
from specbatch.pipeline.engines.observing import Observer, Watch
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.guarded import GuardedProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.drift import EVERY_STEPS
from specbatch.pipeline.engines.speculation.speculator import Speculator
from specbatch.pipeline.engines.state.recovery import (
    Fault,
    TokenBudget,
    fault_of,
    isolate,
    with_type,
)
from specbatch.pipeline.engines.state.refusal import all_within, refusal, sequence_of
from specbatch.pipeline.engines.state.sequence import Sequence, stop_ids_of
from specbatch.pipeline.engines.state.step import Draft, Planned, Step
from specbatch.pipeline.engines.state.step_accounts import StepAccounts
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.draft_switches import DraftSwitches
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import FinishReason, TopLogprobs
from specbatch.schemas.speculation import AcceptanceCount

log = logging.getLogger(__name__)

_NAN = "the verifier's logits are NaN"


class Engine:
    """Continuous batching with verification of drafts. Only one thread may use it."""

    def __init__(
        self,
        runner: ModelRunner,
        proposers: tuple[Proposer, ...] = (),
        max_sequences: int = 64,
        max_batch_tokens: int = 2048,
        rechecker: Rechecker | None = None,
        knowledge: Knowledge | None = None,
        observer: Observer | None = None,
        drift_every: int = EVERY_STEPS,
        passes_at_once: int = tuning.PASSES_AT_ONCE,
    ) -> None:
        """Every `drift_every` steps, `observer` also hears how far a draft model has drifted.

        A step without drafts makes up to `passes_at_once` passes, where its runner can: between
        two passes of a small model, Python takes up to two fifths of the time.
        """
        self._runner = runner
        self._rechecker = rechecker
        self._sampler = choose_sampler(runner.device, runner.kernels)
        self._speculator = Speculator(
            [GuardedProposer(p, self._count_failure, self._on_open) for p in proposers],
            knowledge or Knowledge(),
        )
        self._block = next((p for p in proposers if isinstance(p, BlockProposer)), None)
        self._budget = TokenBudget(max_batch_tokens)
        self._scheduler = Scheduler(
            runner.blocks, max_sequences, max_batch_tokens, self._speculator.forget
        )
        self._columns = LastColumns()
        self._passes_at_once = passes_at_once if runner.runs_several else 1
        self._rejected: list[Completion] = []
        self.stats = EngineStats()
        self._accounts = StepAccounts(
            self.stats, self._speculator.knowledge.step_time, self._passes_at_once > 1
        )
        self._watch: Watch | None = None
        if observer is not None:
            self._watch = Watch(
                observer, self.stats, self._kv_blocks, max_sequences, proposers, drift_every
            )
            self._speculator.decision_log.on_decision = observer.drafting_switched
            self._speculator.decision_log.on_collapse = observer.acceptance_collapsed

    # --- what callers do -----------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. The next step returns an error for one that cannot run."""
        limit, vocab_size = self._runner.context_tokens, self._runner.vocab_size
        if not all_within(request.draft_ids, vocab_size):  # a hint that cannot be right
            request = replace(request, draft_ids=())
        sequence = sequence_of(
            request,
            stop_ids=stop_ids_of(request, self._runner.eos_ids, vocab_size),
            max_length=min(limit, len(request.prompt_ids) + request.params.max_tokens),
        )
        sequence.error = refusal(sequence, limit, vocab_size, self._runner.shortage)
        if sequence.error is not None:
            sequence.finish_reason = FinishReason.ERROR
            self._rejected.append(sequence.completion())
            return
        self._scheduler.waiting.append(sequence)
        self._accounts.begin(sequence)

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        """Drop all matching requests and return what they had so far, as cancelled."""
        return [
            self._finish(s, FinishReason.CANCELLED) for s in self.unfinished if matches(s.request)
        ]

    @property
    def unfinished(self) -> list[Sequence]:
        """All unfinished sequences. Any thread may read this."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    def unstarted(self) -> list[str]:
        """Ids of the requests that no pass has included yet."""
        return [s.request.request_id for s in self._scheduler.waiting if not s.compute_sec]

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """Use what earlier runs of a job found about drafts. Ignored after its first request."""
        self._speculator.decision_log.prime(job, counts)

    def lessons(self, job: str) -> Lessons:
        """What a job taught about drafts since the last call."""
        lessons = self._speculator.decision_log.lessons(job)
        return replace(lessons, measured=self._accounts.take(job))

    @property
    def knowledge(self) -> Knowledge:
        """What it knows of the machine and the proposers; it grows while the engine runs."""
        return self._speculator.knowledge

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Suggest what follows a request's first `position` output tokens. May be late."""
        if self._block is None or not all_within(token_ids, self._runner.vocab_size):
            return
        for sequence in self._scheduler.running:
            if sequence.request.request_id == request_id:
                self.stats.hints_followed += self._block.extend(sequence, position, token_ids)

    def switch(self, switches: DraftSwitches) -> None:
        """From the next step on, nothing is drafted for what an operator has switched off."""
        self._speculator.switch(switches)

    def wanted(self) -> list[Wanted]:
        """Requests for which hints are wanted, each listed once: see `BlockProposer.wanting`."""
        return [] if self._block is None else self._block.wanting()

    @property
    def runner(self) -> ModelRunner:
        """The verifier's runner, to be used only between two steps."""
        return self._runner

    @property
    def largest_pass(self) -> tuple[int, int]:
        """The most tokens of the verifier's pass, and the most rows of logits."""
        drafts = tuning.MAX_DRAFT_TOKENS if self._speculator.proposers else 0
        deciding = min(self._scheduler.max_sequences, self._budget.most)
        return self._budget.most + drafts, deciding + drafts

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self._scheduler.idle and not self._rejected

    def prepare(self) -> None:
        """Load what the next step needs. It is loaded already."""

    def step(self) -> list[Completion]:
        """Run a pass, or several, over what is scheduled and commit their tokens.

        Returns what finished.
        """
        step = self._schedule_and_propose()
        if not step.plan:
            return self._take_rejected()
        parts = [step] if self._decide_several(step) else self._decide_and_commit(step)
        self._share(step)
        self._account(step, parts)
        done = self._take_rejected() + self._take_finished(step)
        if self._watch is not None:
            self._watch.stepped(parts)
        return done

    # --- the stages of a step ------------------------------------------------------------------
    def _schedule_and_propose(self) -> Step:
        begun = now()
        self._scheduler.max_batch_tokens = self._budget.now
        plan = self._scheduler.schedule()
        deciding = [p.sequence for p in plan if p.decides]
        is_off = self._speculator.is_off
        asking = self._watch.ask(deciding, is_off) if self._watch is not None else 0
        draft_plan = self._speculator.propose(deciding, self._room_for_draft, self.stats.busy_sec)
        drafting = asking + int(draft_plan.drafting_sec * TICKS_PER_SEC)
        return Step(plan, deciding, draft_plan, begun, drafting, is_watched=asking > 0)

    def _kv_blocks(self) -> tuple[int, int, int]:
        return self._runner.blocks.counts

    def _room_for_draft(self, sequence: Sequence, wanted: int) -> int:
        return 0 if self._budget.strained else self._scheduler.room_for_draft(sequence, wanted)

    def _decide_and_commit(self, step: Step) -> list[Step]:
        """Run the step's pass: all of the step, or the parts of it whose passes do not raise."""
        parts = self._decide(step)
        for part, verdict in parts:
            self._commit(part, verdict)
        return [part for part, _ in parts]

    def _decide_several(self, step: Step) -> bool:
        """Make several passes in one call and commit their tokens, where each needs only the tokens
        of the one before. False: no sequence has changed."""
        most = self._passes_at_once
        if most < 2 or not multi_step.is_possible(step):
            return False
        columns = self._columns.of(step.deciding, self._runner.device)
        passes = self._accounts.passes_within(tuning.SEVERAL_SEC, len(step.deciding), most)
        if passes < 2 or not columns.multi_step:
            return False
        room = [self._room_for_draft(s, min(passes, s.remaining) - 1) for s in step.deciding]
        begun = now()
        try:
            generated = multi_step.generate(self._runner, step.deciding, columns, room)
        except Exception as error:
            log.warning("several passes in one call raised: one at a time now", exc_info=error)
            self._passes_at_once, self._accounts.multi_step = 1, False
            step.ordinary = False
            self.stats.raised_passes += 1
            return False
        step.pass_ticks = now() - begun
        self.stats.forward_sec += step.pass_ticks / TICKS_PER_SEC
        self._budget.passed()
        for sequence in multi_step.commit(step, generated, self._runner.blocks):
            self._fail(sequence, f"{_NAN} at token {sequence.num_output}")
        self._speculator.on_passes(step.draft_plan.arm, step.passes_made)
        self.stats.generated_tokens += sum(step.emitted.values())
        self.stats.verifier_passes += sum(generated.made)
        if self._watch is not None:
            self._watch.decided(step.deciding)
        return True

    def _decide(self, step: Step) -> list[tuple[Step, Verdict | None]]:
        """Verdicts on all of the step, or on the parts of it whose passes do not raise."""
        try:
            verdict = self._pass(step)
        except Exception as error:
            step.ordinary = False
            self.stats.raised_passes += 1
            failed, fault = error, fault_of(error)
            if fault not in (Fault.MEMORY, Fault.OTHER):
                raise
        else:
            self._budget.passed()
            return [(step, verdict)]
        if fault is Fault.OTHER:
            return self._decide_apart(step, failed)
        # Its frames hold what the pass had made, which is to be had again.
        return self._decide_less(step, failed.with_traceback(None))

    def _decide_less(self, step: Step, error: Exception) -> list[tuple[Step, Verdict | None]]:
        """Memory ran out: try fewer tokens without drafts. Later steps do the rest."""
        tokens = sum(p.take for p in step.plan) + sum(map(len, step.drafts))
        if not self._budget.halve(tokens):
            raise error
        log.warning("no memory for a pass of %d tokens, trying %d", tokens, self._budget.now)
        self._runner.free_unused()
        less = step.part(step.first_tokens(self._budget.now))
        for sequence, draft in zip(step.deciding, step.drafts, strict=True):
            if sequence not in less.deciding:
                self._speculator.abandon(sequence, draft)
        return self._decide(less)

    def _decide_apart(self, step: Step, error: Exception) -> list[tuple[Step, Verdict | None]]:
        """A sequence may be at fault: those that raise alone fail, the others continue."""
        log.warning("a pass of %d sequences raised", len(step.plan), exc_info=error)

        def attempt(plan: list[Planned]) -> tuple[Step, Verdict | None]:
            part = step.part(plan)
            return part, self._pass(part)

        passed, raising = isolate(step.plan, attempt, lambda e: fault_of(e) is not Fault.OTHER)
        if not passed and not (len(step.plan) == 1 and self._runner.is_sound()):
            raise error  # nothing goes through any more: that is no sequence's fault
        for planned, reason in raising:
            self._fail(planned.sequence, self._raised(planned.sequence, reason))
        return passed

    def _pass(self, step: Step) -> Verdict | None:
        """One forward pass and its verdict; None if all of it went into parts of prompts.

        If it raises, no sequence has changed: it can be repeated in part.
        """
        lengths = [p.sequence.kv.length for p in step.plan]
        recordings, begun = self._runner.recordings, now()
        try:
            logits = self._forward(step)
            verdict = self._verify(step, logits) if step.deciding else None
            step.pass_ticks = now() - begun
            step.ordinary &= self._runner.recordings == recordings
            return verdict
        except Exception:
            for planned, length in zip(step.plan, lengths, strict=True):
                self._runner.blocks.trim(planned.sequence.kv, length)
            raise

    def _forward(self, step: Step) -> Tensor:
        """Logits of every row to be verified: the pending token's, then one per draft token."""
        drafts = iter(step.drafts)
        chunks = []
        for planned in step.plan:
            sequence, start = planned.sequence, planned.sequence.kv.length
            tokens = sequence.tokens[start : start + planned.take]
            if planned.decides:
                draft = next(drafts)
                chunks.append(Chunk(sequence.kv, tokens + draft.token_ids, 1 + len(draft)))
            else:
                chunks.append(Chunk(sequence.kv, tokens, 0))
        begun = time.perf_counter()
        logits = self._runner.forward(chunks)
        self.stats.forward_sec += time.perf_counter() - begun
        return logits

    def _verify(self, step: Step, logits: Tensor) -> Verdict:
        if self._watch is not None:
            self._watch.compare(step, logits)
        columns = self._columns.of(step.deciding, logits.device)
        return verify(self._sampler, step.deciding, step.drafts, logits, columns)

    def _commit(self, step: Step, verdict: Verdict | None) -> None:
        """Append what was decided; forget the KV of rejected drafts."""
        if verdict is None:
            return
        begun = now()
        tokens, logprobs, accepted = to_host(verdict)
        step.pass_ticks += now() - begun  # a GPU's pass has been queued, and is waited for here
        most_likely = MostLikely(verdict.top) if verdict.top is not None else None
        has_nan = any(map(math.isnan, logprobs))
        row = 0
        for sequence, draft, agreed in zip(step.deciding, step.drafts, accepted, strict=True):
            before, end = len(sequence.tokens), row + agreed + 1
            if has_nan and any(map(math.isnan, logprobs[row:end])):
                formed = sequence.grammar is not None
                why = "nothing that its response format allows is left" if formed else _NAN
                self._fail(sequence, f"{why} at token {sequence.num_output}")
            else:
                tops = most_likely.of(sequence, row, end) if most_likely is not None else ()
                verdict_on = (tokens[row:end], logprobs[row:end], tops)
                if self._accept(sequence, draft, *verdict_on):
                    self._speculator.on_verified(sequence, draft, agreed)
            step.emitted[sequence] = len(sequence.tokens) - before
            row += len(draft) + 1
        self.stats.proposed += row - len(step.deciding)
        self.stats.accepted += sum(accepted)
        self.stats.generated_tokens += sum(step.emitted[s] for s in step.deciding)
        self.stats.verifier_passes += len(step.deciding)
        if self._watch is not None:
            self._watch.decided(step.deciding)

    def _accept(
        self,
        sequence: Sequence,
        draft: Draft,
        tokens: list[int],
        logprobs: list[float],
        tops: Seq[TopLogprobs],
    ) -> bool:
        """Append a verdict; False: the request's own stop-string check raised."""
        try:
            sequence.accept(draft.token_ids, tokens, logprobs, tops, draft.proposer)
        except Exception as error:
            self._fail(sequence, self._raised(sequence, error))
            return False
        self._runner.blocks.trim(sequence.kv, len(sequence.tokens) - 1)
        return True

    def _raised(self, sequence: Sequence, error: Exception) -> str:
        where = f"step {self.stats.steps + 1} of the engine, at token {sequence.num_output}"
        request_id = sequence.request.request_id
        fields = {"request": request_id}
        log.warning("request %s: %s", request_id, where, exc_info=error, extra=fields)
        return f"{where}: {with_type(error)}"

    @staticmethod
    def _fail(sequence: Sequence, error: str) -> None:
        sequence.finish_reason, sequence.error = FinishReason.ERROR, error

    def _share(self, step: Step) -> None:
        """Offer full blocks to sequences that begin alike; a NaN must not outlive its sequence."""
        blocks = self._runner.blocks
        for sequence in (p.sequence for p in step.plan):
            if sequence.error is None:
                blocks.seal(sequence.kv, sequence.tokens)
            else:
                blocks.disown(sequence.kv)

    def _account(self, step: Step, parts: Seq[Step]) -> None:
        self.stats.reused_tokens = self._scheduler.reused_tokens
        self.stats.preemptions = self._scheduler.preemptions
        self._accounts.step(step, parts, self._runner.padded)

    def _count_failure(self) -> None:
        self.stats.proposer_failures += 1

    def _on_open(self, proposer: str, reason: str) -> None:
        self._speculator.decision_log.record_disabled(proposer, reason)

    # --- ends ----------------------------------------------------------------------------------
    def _take_finished(self, step: Step) -> list[Completion]:
        done = [p.sequence for p in step.plan if p.sequence.finish_reason is not None]
        return [self._finish(s, s.finish_reason or FinishReason.ERROR) for s in done]

    def _take_rejected(self) -> list[Completion]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        self._accounts.end(sequence)
        self._speculator.forget(sequence)
        if self._watch is not None:
            self._watch.finished(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._recheck(sequence)
        self.stats.finished += 1
        return sequence.completion()

    def _recheck(self, sequence: Sequence) -> None:
        if self._rechecker is None or not self._rechecker.wants(sequence.request):
            return
        begun = now()
        found = None
        try:
            found = self._rechecker.check(sequence)
        except Exception as error:  # the completion stands; it is only not looked at
            if fault_of(error) in (Fault.DEVICE, Fault.KERNEL):
                raise
            log.warning("recheck failed: %s", with_type(error), exc_info=error)
            self._runner.free_unused()
        self._accounts.overhead(sequence, now() - begun)
        if found is not None:
            sequence.recheck = found
            self.stats.checked_tokens += found.tokens
            self.stats.differing_tokens += found.differing
            self.stats.largest_margin = max(self.stats.largest_margin, found.largest_margin)


# --- which requests it can run ------------------------------------------------------------------
