"""The verify engine: one ragged forward pass per step over every sequence of every group.

The engine knows nothing of Celery, SQL or text. Read `step` first: it is the table of contents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.verify.contract import PLACEHOLDER, Verdict
from specbatch.pipeline.engine.adjusting import problem_of
from specbatch.pipeline.engine.batch import Chunk
from specbatch.pipeline.engine.proposer import Proposer
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.sampler import choose_sampler
from specbatch.pipeline.engine.sampling import sampling_rows
from specbatch.pipeline.engine.scheduler import Planned, Scheduler
from specbatch.pipeline.engine.sequence import Completion, Request, Sequence
from specbatch.pipeline.engine.speculator import Speculator
from specbatch.pipeline.engine.transfer import to_device, to_host
from specbatch.pipeline.policy.step_time import StepTime
from specbatch.schemas.records import FinishReason


@dataclass(slots=True)
class EngineStats:
    """Running totals, read by whoever shows progress."""

    steps: int = 0
    generated_tokens: int = 0
    finished: int = 0
    proposed: int = 0
    accepted: int = 0
    verifier_passes: int = 0  # (sequence, step) pairs that decided tokens
    busy_sec: float = 0.0
    forward_sec: float = 0.0  # the verifier's forward passes alone; on a GPU, queueing them
    reused_tokens: int = 0  # of prompts and preempted sequences: the verifier's KV was there


@dataclass(slots=True)
class _Work:
    """One step's sequences that decide tokens, with their drafts."""

    plan: list[Planned]
    deciding: list[Sequence]
    drafts: list[list[int]]
    makers: list[Proposer | None]
    begun: float  # seconds, by the performance counter
    proposing_sec: float
    emitted: list[int] = field(default_factory=list)  # tokens decided, per deciding sequence

    @property
    def plain(self) -> bool:
        """A pure decoding step at depth 0: a measurement of the baseline."""
        return not any(self.drafts) and self.decoding

    @property
    def decoding(self) -> bool:
        """No prompt takes part."""
        return len(self.deciding) == len(self.plan) and all(p.take == 1 for p in self.plan)


class Engine:
    """Continuous batching with verification by coupled sampling. Only one thread may use it."""

    def __init__(
        self,
        runner: ModelRunner,
        proposers: tuple[Proposer, ...] = (),
        max_sequences: int = 64,
        max_batch_tokens: int = 2048,
    ) -> None:
        self._runner = runner
        self._sampler = choose_sampler(runner.device, runner.kernels)
        self._speculator = Speculator(proposers)
        self._scheduler = Scheduler(
            runner.blocks, max_sequences, max_batch_tokens, self._speculator.forget
        )
        self._plain_time = StepTime()  # decoding steps at depth 0, by number of sequences
        self._rejected: list[Completion] = []
        self.stats = EngineStats()

    # --- what callers do -----------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. One that cannot fit is answered with an error by the next step."""
        limit, vocab_size = self._runner.context_tokens, self._runner.vocab_size
        if not _all_within(request.draft_ids, vocab_size):  # a hint that cannot be right
            request = replace(request, draft_ids=())
        eos = frozenset() if request.params.ignore_eos else self._runner.eos_ids
        stop_ids = eos | frozenset(request.params.stop_token_ids)
        sequence = Sequence(
            request=request,
            stop_ids=frozenset(token for token in stop_ids if 0 <= token < vocab_size),
            max_length=min(limit, len(request.prompt_ids) + request.params.max_tokens),
        )
        if len(request.prompt_ids) >= limit or not request.prompt_ids:
            sequence.error = (
                f"prompt of {len(request.prompt_ids)} tokens does not fit the context of {limit}"
            )
        elif not _all_within(request.prompt_ids, vocab_size):
            sequence.error = f"prompt has a token outside the vocabulary of {vocab_size}"
        elif request.params.stop and request.watch_text is None:
            sequence.error = "stop strings need something that makes text of tokens"
        else:
            sequence.error = problem_of(request.params, sequence.stop_ids, vocab_size)
        if sequence.error is not None:
            sequence.finish_reason = FinishReason.ERROR
            self._rejected.append(sequence.completion())
            return
        self._scheduler.waiting.append(sequence)

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        """Drop all requests that match; what they had so far is returned as cancelled."""
        everyone = [*self._scheduler.running, *self._scheduler.waiting]
        return [self._finish(s, FinishReason.CANCELLED) for s in everyone if matches(s.request)]

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._rejected

    def step(self) -> list[Completion]:
        """Decide at least one token for every decoding sequence; returns what finished."""
        work = self._schedule_and_propose()
        if not work.plan:
            return self._take_rejected()
        logits = self._forward(work)
        if work.deciding:  # else all of the pass went into parts of prompts
            self._commit(work, self._verify(work, logits))
        self._share(work)
        self._account(work)
        return self._take_rejected() + self._take_finished(work)

    # --- the stages of a step ------------------------------------------------------------------
    def _schedule_and_propose(self) -> _Work:
        begun = time.perf_counter()
        plan = self._scheduler.schedule()
        deciding = [p.sequence for p in plan if p.decides]
        drafts, makers = self._speculator.propose(deciding, self._scheduler.room_for_draft)
        return _Work(plan, deciding, drafts, makers, begun, time.perf_counter() - begun)

    def _forward(self, work: _Work) -> Tensor:
        """Logits of every row to be verified: the pending token's, then one per draft token."""
        drafts = iter(work.drafts)
        chunks = []
        for planned in work.plan:
            sequence, start = planned.sequence, planned.sequence.kv.length
            tokens = sequence.tokens[start : start + planned.take]
            draft = next(drafts) if planned.decides else []
            rows = 1 + len(draft) if planned.decides else 0
            chunks.append(Chunk(sequence.kv, [*tokens, *draft], rows))
        begun = time.perf_counter()
        logits = self._runner.forward(chunks)
        elapsed = time.perf_counter() - begun
        self.stats.forward_sec += elapsed
        return logits

    @torch.inference_mode()
    def _verify(self, work: _Work, logits: Tensor) -> Verdict:
        rows = [1 + len(d) for d in work.drafts]
        sampling, counters = sampling_rows(work.deciding, rows, logits.device, work.drafts)
        draft_rows = [token for d in work.drafts for token in (*d, PLACEHOLDER)]
        offsets = to_device(np.cumsum([0, *rows]), logits.device)
        draft = to_device(np.array(draft_rows, dtype=np.int64), logits.device)
        return self._sampler.verify(logits, draft, offsets, counters, sampling)

    def _commit(self, work: _Work, verdict: Verdict) -> None:
        """Append what was decided; forget the KV of rejected drafts."""
        tokens, logprobs, accepted = to_host(verdict)
        row = 0
        for i, (sequence, draft) in enumerate(zip(work.deciding, work.drafts, strict=True)):
            agreed, before = accepted[i], sequence.num_output
            end = row + agreed + 1
            if any(math.isnan(x) for x in logprobs[row:end]):
                sequence.finish_reason = FinishReason.ERROR
                sequence.error = f"the verifier's logits are NaN at token {sequence.num_output}"
            else:
                sequence.accept(draft, tokens[row:end], logprobs[row:end])
                self._runner.blocks.trim(sequence.kv, len(sequence.tokens) - 1)
                self._speculator.observe(sequence, work.makers[i], draft, agreed)
            work.emitted.append(sequence.num_output - before)
            self.stats.proposed += len(draft)
            self.stats.accepted += agreed
            row += len(draft) + 1
        self.stats.generated_tokens += sum(work.emitted)
        self.stats.verifier_passes += len(work.deciding)

    def _share(self, work: _Work) -> None:
        """Offer full blocks to sequences that begin alike; a NaN must not outlive its sequence."""
        blocks = self._runner.blocks
        for sequence in (p.sequence for p in work.plan):
            if sequence.error is None:
                blocks.seal(sequence.kv, sequence.tokens)
            else:
                blocks.disown(sequence.kv)

    def _account(self, work: _Work) -> None:
        """Share the step's time among its sequences, and note what depth 0 would have taken."""
        elapsed = time.perf_counter() - work.begun
        self.stats.steps += 1
        self.stats.reused_tokens = self._scheduler.reused_tokens
        self.stats.busy_sec += elapsed
        drafted = dict(zip(work.deciding, work.drafts, strict=True))
        sizes = [p.take + len(drafted.get(p.sequence, ())) for p in work.plan]
        if work.decoding:  # a prompt's rows are cheaper: they need no logits
            self._speculator.verify_time.observe(sum(sizes), elapsed - work.proposing_sec)
        for planned, size in zip(work.plan, sizes, strict=True):
            planned.sequence.compute_sec += elapsed * size / sum(sizes)
        count = len(work.deciding)
        if work.plain:
            self._plain_time.observe(count, elapsed)
        if work.decoding and self._plain_time.observations >= 3:
            per_token = self._plain_time.predict(count) / count
            for sequence, emitted, size in zip(work.deciding, work.emitted, sizes, strict=True):
                sequence.baseline_sec += emitted * per_token
                sequence.decode_sec += elapsed * size / sum(sizes)

    # --- ends ----------------------------------------------------------------------------------
    def _take_finished(self, work: _Work) -> list[Completion]:
        done = [s for s in work.deciding if s.finish_reason is not None]
        return [self._finish(s, s.finish_reason or FinishReason.ERROR) for s in done]

    def _take_rejected(self) -> list[Completion]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        self._speculator.forget(sequence)
        self.stats.finished += 1
        return sequence.completion()


def _all_within(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
