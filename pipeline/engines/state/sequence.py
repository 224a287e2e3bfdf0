"""The state of one running completion: its request, its tokens and where they came from."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import Completion, GrammarState, Request
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.engines.state.penalties import (
    Adjuster,
    BadWords,
    has_penalties,
)
from specbatch.schemas.provenance import (
    TICKS_PER_SEC,
    Provenance,
    Ticks,
)
from specbatch.schemas.records import (
    NOT_LOOKED_AT,
    FinishReason,
    Origin,
    Recheck,
    TopLogprobs,
    Verification,
)
from specbatch.schemas.speculation import NO_SHADOW_PAIR, ShadowPair


def stop_ids_of(request: Request, eos_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Tokens that end the output: the model's, unless ignored, and the request's own."""
    eos = frozenset() if request.params.ignore_eos else eos_ids
    if request.grammar is not None:
        eos |= frozenset(request.grammar.end_ids)
    stop_ids = eos | frozenset(request.params.stop_token_ids)
    return frozenset(token for token in stop_ids if 0 <= token < vocab_size)


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's state of one request: the only mutable thing a step works on."""

    request: Request
    stop_ids: frozenset[int]
    max_length: int  # prompt and output together
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    kv: KvState = field(default_factory=KvState)
    origins: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] | None = None
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    time: list[int] = field(default_factory=lambda: [0] * 6)  # ticks by kind: see `accounting.py`
    steps: list[int] = field(default_factory=list)  # these six: see `Provenance`
    pass_ticks: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    decode_sec: float = 0.0
    baseline_sec: float = 0.0
    shadow_proposed: int = 0
    shadow_accepted: int = 0
    shadow_pair: ShadowPair = NO_SHADOW_PAIR
    proposed_at_depth: list[int] = field(default_factory=list)
    accepted_at_depth: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    arrived: int = field(default_factory=now)  # ticks
    adjuster: Adjuster | None = None  # only of requests with penalties or biases
    bad_words: BadWords | None = None
    grammar: GrammarState | None = None
    ends_text: Callable[[int], bool] | None = None
    recheck: Recheck = NOT_LOOKED_AT  # once finished

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.decided_ids]
        params = self.request.params
        if has_penalties(params) or params.logit_bias:
            self.adjuster = Adjuster(params, self.request.prompt_ids)
            for token in self.request.decided_ids:
                self.adjuster.append(token)
        if params.bad_token_ids or params.bad_words:
            self.bad_words = BadWords(params)
        if self.request.grammar is not None:
            self.grammar = self.request.grammar.begin()
            for token in self.request.decided_ids:
                self.grammar.append(token)
        if params.tells_logprobs:
            self.top_logprobs = []
        if self.request.watch_text is not None:
            self.ends_text = self.request.watch_text()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def compute_sec(self) -> float:
        """Its share of the engine's time so far."""
        return sum(self.time) / TICKS_PER_SEC

    @property
    def verification(self) -> Verification:
        """Greedy requests are coupled: there every test keeps the drafts that are the argmax."""
        greedy = self.request.params.temperature == 0
        return Verification.COUPLED if greedy else self.request.verification

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be decided."""
        return self.max_length - len(self.tokens)

    @property
    def pending(self) -> int:
        """Decided tokens whose KV is not cached yet: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.kv.length

    def accept(
        self,
        draft: list[int],
        tokens: list[int],
        logprobs: list[float],
        tops: Seq[TopLogprobs] = (),
        proposer: str = "",
    ) -> None:
        """Append the verdict on a draft by `proposer`: the agreed prefix and one token behind it.

        `tokens` holds the agreed prefix and one more, `tops` as many or none. A stop token, the end
        of a stop string or the length limit inside it cuts the rest.
        """
        if self.grammar is not None:
            self.grammar.append(tokens[0])  # it may raise: a pass that decides nothing is none
        agreed = len(tokens) - 1
        self.passes += 1
        self._count(len(draft), agreed)
        last = Origin.PLAIN
        if draft:
            last = Origin.BONUS if agreed == len(draft) else Origin.CORRECTED
            self._note_draft(proposer, len(draft))
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if self.grammar is not None and i > 0:
                self.grammar.append(token)  # first, as it may raise
            self.tokens.append(token)
            if self.adjuster is not None:
                self.adjuster.append(token)
            self.logprobs.append(logprob)
            if self.top_logprobs is not None:
                self.top_logprobs.append(tops[i] if tops else ((), ()))
            self.origins.append(Origin.ACCEPTED if i < agreed else last)
            if i == agreed and last is Origin.CORRECTED:
                self.rejected.append(draft[agreed])
            ends = self.ends_text is not None and self.ends_text(token)
            if ends or token in self.stop_ids:
                self.finish_reason = FinishReason.STOP
                return
            if self.remaining <= 0:
                self.finish_reason = FinishReason.LENGTH
                return

    def append(self, tokens: Seq[int], logprobs: Seq[float]) -> None:
        """Append what as many passes without drafts decided. Nothing follows a stop token."""
        self.passes += len(tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.origins += [Origin.PLAIN] * len(tokens)
        if self.top_logprobs is not None:
            self.top_logprobs += [((), ())] * len(tokens)
        if tokens[-1] in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif self.remaining <= 0:
            self.finish_reason = FinishReason.LENGTH

    def _note_draft(self, proposer: str, tokens: int) -> None:
        if proposer not in self.sources:
            self.sources.append(proposer)
        self.makers.append(self.sources.index(proposer))
        self.drafted.append(tokens)

    def _count(self, proposed: int, agreed: int) -> None:
        """Positions after the first mismatch count as proposed: they were paid for."""
        self.proposed += proposed
        self.accepted += agreed
        while len(self.proposed_at_depth) < proposed:
            self.proposed_at_depth.append(0)
            self.accepted_at_depth.append(0)
        for depth in range(proposed):
            self.proposed_at_depth[depth] += 1
            self.accepted_at_depth[depth] += depth < agreed

    def completion(self) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.output[len(self.request.decided_ids) :]),
            origins=tuple(int(o) for o in self.origins),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or FinishReason.ERROR,
            proposed=self.proposed,
            accepted=self.accepted,
            verifier_passes=self.passes,
            compute_sec=self.compute_sec,
            decode_sec=self.decode_sec,
            baseline_sec=self.baseline_sec,
            proposed_at_depth=tuple(self.proposed_at_depth),
            accepted_at_depth=tuple(self.accepted_at_depth),
            error=self.error,
            top_logprobs=None if self.top_logprobs is None else tuple(self.top_logprobs),
            recheck=self.recheck,
            shadow_proposed=self.shadow_proposed,
            shadow_accepted=self.shadow_accepted,
            shadow_pair=self.shadow_pair,
            provenance=Provenance(
                steps=tuple(self.steps),
                pass_ticks=tuple(self.pass_ticks),
                sources=tuple(self.sources),
                makers=tuple(self.makers),
                drafted=tuple(self.drafted),
                rejected=tuple(self.rejected),
            ),
            ticks=Ticks(*self.time),
        )
