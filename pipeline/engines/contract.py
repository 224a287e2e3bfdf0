"""What every verify engine offers, and the types it speaks in. No torch, no SQL, no text.

A worker process has one `Engines`. It hands out a `Service` per way in which a job may ask for the
verifier (dtype, exactness, weights); `Service.submit` takes `Request`s of one job and returns
`Ticket`, which ends with one `Completion` per request:

    engines.service(spec).submit(job_id, requests, priors).wait()

What an engine can do is asked before a job is taken:

    Engines.serves    numeric classes by dtype, exactness and weights, and model fingerprints
    Engines.tag_models draft models that a job's tags may be routed to
    Engines.service   raises `MissingExtraError` for what this installation cannot run
    Completion.error  refuses one request: too long, or sampling parameters that cannot be met

Drafts are hints: `Request.draft_ids`, `past_ids`, `history` and `Engines.hint` may be ignored, and
never change an output. An engine that uses them says so in `proposed` and `accepted`, and in the
`Provenance` of each completion. `exact/` is our engine; `jobs/chaos/stand_in.py` has one without a
model. Engines import this module, and this module imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specbatch.pipeline.policy.breaker import Lessons
from specbatch.schemas.draft_switches import ANY_ROW, DraftSwitches, RowScope
from specbatch.schemas.errors import DeviceLostError
from specbatch.schemas.fingerprint import Fingerprint
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import NO_PROVENANCE, NO_TICKS, Provenance, Ticks
from specbatch.schemas.records import (
    NOT_LOOKED_AT,
    FinishReason,
    Recheck,
    SamplingParams,
    TopLogprobs,
    Verification,
)
from specbatch.schemas.registry import NO_MODELS
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation import NO_SHADOW_PAIR, AcceptanceCount, ShadowPair
from specbatch.schemas.speculation_spec import SpeculationSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Ids of requests in the caller's order. Those of one unit are given back together or not at all.
RowIds = Sequence[Sequence[str]]


class Engines(Protocol):
    """All engines of one worker process, with one verifier (or one proposer). Thread-safe."""

    # --- what it can do ------------------------------------------------------------------------
    @property
    def model(self) -> ModelFolder:
        """The model that decides every token; of a propose worker, its draft model."""
        ...

    @property
    def draft_model(self) -> ModelFolder | None:
        """The draft model beside it."""
        ...

    def serves(self) -> Serves:
        """The numeric classes in which its verifier can run here. Loads nothing."""
        ...

    def tag_models(
        self, wanted: SpeculationSpec, deployed: Mapping[str | None, str] = NO_MODELS
    ) -> Mapping[str | None, str]:
        """Names of draft models by tag; under None that of all other rows, if they have one.

        `deployed`: fingerprints by tag, in the same way; one that is not here has no effect, and a
        job's own routes come first. Raises `UsageError` for a route to a model that is not here.
        """
        ...

    # --- work ----------------------------------------------------------------------------------
    def service(self, spec: EngineSpec) -> Service:
        """The engine for a job's dtype, exactness and weights, made when first asked for.

        Raises `MissingExtraError`, and `RequestCancelledError` after `stop`.
        """
        ...

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Suggest what follows the first `position` output tokens of a request."""
        ...

    def cancel(self, job_id: str) -> None:
        """Drop all requests of a job before the next step; waiting callers get an error."""
        ...

    def switch(self, switches: DraftSwitches) -> None:
        """From the next step on, nothing is drafted for what an operator has switched off."""
        ...

    # --- health --------------------------------------------------------------------------------
    @property
    def stats(self) -> Sequence[EngineStats]:
        """Running totals of every engine."""
        ...

    @property
    def stepping_since(self) -> int | None:
        """When the oldest running step began, by `clock.now`; None: no step runs."""
        ...

    @property
    def loading_since(self) -> int | None:
        """When the oldest running load of a model began, its trial included; None: none runs."""
        ...

    def check(self) -> None:
        """Raises `DeviceLostError` once an engine here has lost its device."""
        ...

    # --- ends ----------------------------------------------------------------------------------
    def give_up(self, error: DeviceLostError) -> None:
        """The running step or load will not end: fail all requests with `error`; `close` will not
        wait."""
        ...

    def stop(self) -> None:
        """Begin to close without waiting. Requests fail at once where no step runs."""
        ...

    def close(self) -> None:
        """Stop after the current step; open requests fail with `RequestCancelledError`."""
        ...


class Service(Protocol):
    """One engine for many callers. Thread-safe."""

    def submit(
        self, job_id: str, requests: Sequence[Request], priors: Sequence[AcceptanceCount] = ()
    ) -> Ticket:
        """Add requests to the running batch. `priors`: acceptance in earlier runs of the job.

        Raises `RequestCancelledError` once the service is closed, and `DeviceLostError`.
        """
        ...


class Ticket(Protocol):
    """Requests that one caller handed over together."""

    def wait(self, timeout_sec: float | None = None) -> list[Completion]:
        """Wait for all; completions in the order of the requests, without those given back.

        Raises `RequestCancelledError`, or `EngineError` after a failure or the timeout.
        """
        ...

    def finished(self) -> Sequence[Completion]:
        """Completions so far, without cancelled ones."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the engine will spend no more time on them."""
        ...

    @property
    def begun_ns(self) -> int:
        """When they were handed over, in nanoseconds since the epoch."""
        ...

    @property
    def ended_ns(self) -> Mapping[str, int]:
        """When requests ended, by their ids."""
        ...

    @property
    def ticks(self) -> Ticks:
        """Their share of the engine's time so far, whatever became of it."""
        ...

    @property
    def lessons(self) -> Lessons:
        """What the job taught about drafts, once all requests are done."""
        ...

    def ask_back(self, units: RowIds) -> None:
        """Ask for half of the unstarted `units`, taken from their end."""
        ...

    def next_given_back(self) -> Sequence[Request]:
        """Wait until requests are given back; empty once all others are done."""
        ...


# --- what goes in ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked model folder."""

    ref: str  # as the user named it
    path: Path
    model_type: str
    vocab_size: int
    context_tokens: int
    fingerprint: Fingerprint
    revision: str | None = None  # of a hub id: the commit that it led to


@dataclass(frozen=True, slots=True)
class Cohort:
    """What requests have in common by which drafts are judged."""

    job: str = ""
    tag: str | None = None  # of the row: a language, a domain


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked to complete. Ids are the caller's and need only be unique now."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # Philox key, in [0, 2**63)
    draft_ids: tuple[int, ...] = ()  # a pre-generated continuation, only ever a hint
    depth: int | None = None  # draft tokens per step; None: as many as pay
    # Returns a function that is called with each decided token and tells if the text ends there.
    watch_text: Callable[[], Callable[[int], bool]] | None = None
    verification: Verification = Verification.COUPLED
    route: Cohort = Cohort()
    scope: RowScope = ANY_ROW  # by which an operator may have switched its drafts off
    max_depth: int | None = None  # a cap on what `depth` None may choose
    # (tokens, cap) pairs: the cap of any depth once prompt and output have so many tokens
    context_depths: tuple[tuple[int, int], ...] = ()
    sources: frozenset[str] | None = None  # names of proposers that may be asked; None: all
    draft_model: str | None = None  # name of the only one that may be asked; None: any of them
    shadow: bool = False  # drafts are only compared with what depth 0 decides
    candidate: str | None = None  # a draft model that is compared with the one that serves the row
    past_ids: tuple[int, ...] = ()  # what the same prompt gave before, only ever a hint
    history: PastOutputs | None = None  # outputs of earlier jobs; shared by a job's requests
    decided_ids: tuple[int, ...] = ()  # output that exists already and is continued
    grammar: Grammar | None = None  # what the output must be a sentence of
    # Draft tokens of the pass that begins behind so much output, as a recorded run had them; the
    # other passes have none. With it, `depth` is any number but 0.
    pass_depths: Mapping[int, int] | None = None


class Grammar(Protocol):
    """A set of token sequences, each with an end token behind it. Shared by requests."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_ids(self) -> Sequence[int]:
        """The tokens that end an output."""
        ...

    def begin(self) -> GrammarState:
        """At the beginning of an output."""
        ...


class GrammarState(Protocol):
    """Where one output stands in its grammar.

    Methods raise `EngineError` where the grammar grew too complex, or a token does not fit.
    """

    def append(self, token: int) -> None:
        """The output has one more token."""
        ...

    def masks(self, allowed: NDArray[np.int32], draft: Sequence[int], first: int) -> None:
        """Which tokens may follow: into row j of `allowed`, int32 [num_rows, ceil(vocab_size / 32)]
        of set bits, those behind the first `first + j` tokens of `draft`. Rows behind a draft token
        that does not fit stay as they are.
        """
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must follow, as the tokenizer would write them; mostly none."""
        ...


class Match(NamedTuple):
    """Where the newest tokens of a context occurred."""

    length: int  # tokens in common
    position: int  # of the token to continue with: one of the majority
    share: float  # of the occurrences looked at that continue with that token


class PastOutputs(Protocol):
    """Outputs of earlier jobs, found by what was written before each token."""

    largest_token: int  # -1: it holds none

    def find(self, context: Sequence[int], shortest: int = 1) -> Match | None:
        """The longest suffix of `context`, of at least `shortest` tokens, that some output has."""
        ...

    def follow(self, position: int, count: int) -> list[int]:
        """At most `count` tokens from `position` on, to the end of its output."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for which an engine would like a hint."""

    request_id: str
    output: tuple[int, ...]
    late: int = 0  # tokens that will be decided by the time of an answer: to be guessed besides


# --- what comes out ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request: `token_ids` are those decided here, without `decided_ids`.

    Per-token tuples have one entry per token of `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    proposed: int
    accepted: int
    verifier_passes: int
    compute_sec: float  # this request's share of the steps it took part in
    decode_sec: float  # of that, in steps whose depth-0 price is known
    baseline_sec: float  # what the tokens of those steps would have taken at depth 0
    proposed_at_depth: tuple[int, ...]
    accepted_at_depth: tuple[int, ...]
    error: str | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None  # None: log-probabilities not asked for
    recheck: Recheck = NOT_LOOKED_AT
    shadow_proposed: int = 0  # draft tokens compared with what depth 0 decided …
    shadow_accepted: int = 0  # … and of those, the same
    shadow_pair: ShadowPair = NO_SHADOW_PAIR  # of `Request.candidate`, with the serving model
    provenance: Provenance = NO_PROVENANCE
    ticks: Ticks = NO_TICKS
    reused_from: str | None = None  # the completion that it is a copy of; None: it was computed
    retry: int = 0  # by which seed of its sample: see `retry_seed`


@dataclass(slots=True)
class EngineStats:
    """Running totals of one engine."""

    steps: int = 0  # passes: without drafts, a step of the engine may make several
    generated_tokens: int = 0
    finished: int = 0
    proposed: int = 0
    accepted: int = 0
    verifier_passes: int = 0  # (sequence, pass) pairs that decided tokens
    busy_sec: float = 0.0
    time: list[int] = field(default_factory=lambda: [0] * 6)  # ticks by kind, as `Ticks` has them
    # The verifier's forward passes, with sampling where several are one call; on a GPU, queueing.
    forward_sec: float = 0.0
    reused_tokens: int = 0  # of prompts and preempted sequences: the verifier's KV was there
    checked_tokens: int = 0  # rechecked, where bits may depend on the batch
    differing_tokens: int = 0  # of those, decided otherwise the second time
    largest_margin: float = 0.0  # between the scores of two such tokens
    raised_passes: int = 0  # steps whose pass raised: sequences were tried apart, or fewer tokens
    proposer_failures: int = 0  # calls of proposers that raised: their drafts were dropped
    preemptions: int = 0  # sequences put off for want of KV blocks
    kv_blocks: tuple[int, int, int] = (0, 0, 0)  # held, free, cached; if metrics are on
    hints_followed: int = 0  # late hints that still led on from where a sequence was

    @property
    def ticks(self) -> Ticks:
        """All that was shared among sequences, whatever became of them."""
        return Ticks(*self.time)
