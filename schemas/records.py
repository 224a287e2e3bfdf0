"""Frozen, slotted dataclasses that all folders share: ids and numbers, no behaviour.

Units are in the names: `_sec`, `_tokens`, `_usd`. Token ids are Python ints; positions count the
generated tokens of one completion from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from specbatch.schemas.budgets import NOTHING_SURE, LeastTokens
from specbatch.schemas.policies import Ruled
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.provenance import NO_PROVENANCE, NO_TICKS, Provenance, Ticks
from specbatch.schemas.tools import form_of

# The most likely tokens at one place: ids, and their log-probabilities, falling.
TopLogprobs = tuple[tuple[int, ...], tuple[float, ...]]
FIRST_SPLIT_INDEX = 1 << 24  # of groups that were split off; ingest numbers its own below


class Origin(IntEnum):
    """Where a token of a completion came from."""

    PLAIN = 0  # the verifier's own token, at a step without a draft
    ACCEPTED = 1  # a draft token the verifier agreed with
    CORRECTED = 2  # the verifier's token where it disagreed with the draft
    BONUS = 3  # the verifier's token after a fully accepted draft block


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"  # by a stop, behind calls of functions; recording says so
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"
    BLOCKED = "blocked"  # by a content policy: it ended well, and its text is kept back
    REVIEW = "review"  # likewise, until a person has decided


# Completions that ended of themselves.
FINISHED = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH)
WITHHELD = (FinishReason.BLOCKED, FinishReason.REVIEW)


class Verification(StrEnum):
    """The test that accepts or rejects draft tokens.

    With `coupled` drafts never change the output. With the other two the output still follows the
    verifier's distribution, but it depends on the drafts and on where their blocks begin.
    """

    COUPLED = "coupled"  # accepts a draft token that equals the verifier's sample
    REJECTION = "rejection"  # the ratio test, token by token
    BLOCK = "block"  # the ratio test of whole blocks, which accepts a little more


PRIORITIES = ("high", "normal", "low")  # a job's priority is an index of this tuple
NORMAL = PRIORITIES.index("normal")


class JobState(StrEnum):
    """State of a job as users see it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)

    @property
    def has_output(self) -> bool:
        """Whether an output was certainly published; that of a failed job need not exist."""
        return self in (JobState.DONE, JobState.PARTIAL, JobState.CANCELLED)


class Stage(StrEnum):
    """The next step of a unit of work.

    A job goes INGEST → RUN → PUBLISH → END; its groups go (PROPOSE →) VERIFY → RECORD → DONE, or
    to FAILED or CANCELLED. RUN, END, DONE, FAILED and CANCELLED cannot be claimed.
    """

    INGEST = "ingest"
    RUN = "run"
    PUBLISH = "publish"
    END = "end"
    PROPOSE = "propose"
    VERIFY = "verify"
    RECORD = "record"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Stages at which a unit can be claimed, in the order of a job's life. INGEST and PUBLISH are of
# jobs, the others of groups.
CLAIMABLE = (Stage.INGEST, Stage.PROPOSE, Stage.VERIFY, Stage.RECORD, Stage.PUBLISH)
NO_TAG = "(no tag)"  # shown where a row has none


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. Temperature 0 is greedy.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. `min_tokens` keeps stop ids from being chosen before
    that many tokens. `ignore_eos` drops the model's own end tokens from the stop ids.

    Logits are processed in this order: repetition penalty (of prompt and output tokens),
    presence and frequency penalty (of output tokens), bias, bad tokens and words, temperature,
    top-k, top-p, min-p. What the form of the response does not allow is taken out after the bad
    words. A bad word is a row of ids whose last may not follow the others.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added)
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()  # strings that end the text, and are not part of it
    response_format: str = ""  # see `response_format.py`; empty: free text
    tools: str = ""  # see `tools.py`; empty: none
    tool_choice: str = ""  # the same; empty: auto
    parallel_tool_calls: bool = True
    logprobs: bool = False  # hand out each token's log-probability
    top_logprobs: int = 0  # and those of so many most likely tokens; above 0 implies `logprobs`

    @property
    def form(self) -> str:
        """What an output is held to, as `response_format.parsed` reads it; empty: nothing."""
        return self.response_format or form_of(
            self.tools, self.tool_choice, self.parallel_tool_calls
        )

    @property
    def tells_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One accepted input row, tokenised. `overrides` are its own sampling values."""

    row_index: int
    row_id: str
    prompt_ids: tuple[int, ...]
    seed: int  # of sample 0, in [0, 2**63)
    tag: str | None = None
    n: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)


# Why an input row is in quarantine. `pipeline/inputs/rows.py` says what each word means.
ROW_CODES = (
    "null_prompt", "null_column", "template_failed", "empty_prompt", "invalid_utf8", "bad_json",
    "bad_csv", "wrong_type", "bad_messages", "unknown_role", "no_chat_template", "bad_token_id",
    "too_long", "unreadable", "bad_id", "duplicate_id", "missing_id", "bad_seed", "bad_parameter",
    "bad_response_format", "bad_tools", "no_tool_template", "unsupported_parameter",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """One input row in quarantine: `code` is a stable word, `reason` a sentence."""

    row_index: int
    row_id: str | None
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where a group's rows begin. Resuming needs nothing else.

    `version` is the ETag or (size, mtime) of the object, so a changed input is noticed.
    """

    uri: str
    version: str
    row_group: int
    row_offset: int


@dataclass(frozen=True, slots=True)
class Artefact:
    """A bulk file in the job's workspace, named by its content."""

    uri: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """The place of a group's prompts: `rows` rows of a file, from row `row_start` on.

    Groups that were split in two share one file.
    """

    artefact: Artefact
    row_start: int
    rows: int


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A planned group, before the store knows it."""

    index: int
    source: SourcePosition
    rows: int
    prompt_tokens: int
    prompts: Artefact
    first_stage: Stage  # PROPOSE or VERIFY
    most_tokens: int  # that its prompts and outputs can have, with all samples …
    most_row_tokens: int  # … and those of its longest row


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one unit until the lease expires. `group_index` None: the job itself.

    `token` is the fencing token (`generation` in the store). Every claim raises it, and every later
    write names it.
    """

    job_id: str
    group_index: int | None
    stage: Stage
    token: int
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A claimed group: the lease and where its files lie."""

    lease: Lease
    rows: int
    prompts: Artefact
    drafts: Artefact | None
    results: Artefact | None
    row_start: int = 0  # which of the prompts file's rows are this group's
    row_stop: int | None = None  # None: to the end
    rows_kept: int = 0  # finished when its job was stopped, and not to be repeated
    prompt_tokens: int = 0
    # It may have killed its workers, so no worker holds two of these at a time.
    suspect: bool = False
    waited_sec: float = 0.0  # from ready, or from its last lease's end, to this claim
    # What its job had pinned when it was claimed for VERIFY.
    numeric_class: str | None = None
    model_fingerprint: str | None = None
    proposer_fingerprint: str | None = None

    @property
    def where(self) -> Prompts:
        """Where its prompts lie."""
        return Prompts(self.prompts, self.row_start, self.rows)


class Released(NamedTuple):
    """The result of releasing a unit."""

    was_held: bool  # else the lease was lost, and nothing changed
    split_off: int | None = None  # index of the second half, if the group was split


class Beat(NamedTuple):
    """The answer to a heartbeat about the leases that it named."""

    lost: set[Lease]  # no longer held
    cancelled: set[str]  # ids of jobs with the cancel flag
    split_wanted: set[Lease]  # an idle worker asks for half of the group


@dataclass(frozen=True, slots=True)
class JobWork:
    """A claimed job (to ingest or to publish)."""

    lease: Lease
    next_group: int  # index of the next group to plan
    next_row: int  # row_index of the next input row
    cursor: SourcePosition | None  # where to read on; None at the start


@dataclass(frozen=True, slots=True)
class StageTiming:
    """What one attempt at a stage took."""

    compute_sec: float  # device or CPU time spent on the unit
    device_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Recheck:
    """The result of verifying a completion again, where bits may depend on the batch.

    A margin is the distance between the scores (processed logits with their noise) of the recorded
    token and of the token that the second verification decides.
    """

    tokens: int = 0  # that were verified again
    differing: int = 0
    largest_margin: float = 0.0


NOT_LOOKED_AT = Recheck()


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """Everything that the store keeps of one finished (row, sample).

    The per-token tuples have one entry per token of `token_ids`. `proposed` counts verified draft
    tokens, `accepted` those that the verifier agreed with, `verifier_passes` the forward passes
    that emitted tokens of this completion.
    """

    row_index: int
    sample_index: int
    row_id: str
    tag: str | None
    seed: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    origins: tuple[int, ...]
    logprobs: tuple[float, ...]
    proposed: int
    accepted: int
    verifier_passes: int
    cost_usd: float
    verifier: str
    proposer: str | None
    error: str | None = None
    proposed_at_depth: tuple[int, ...] = ()  # [depth] draft tokens checked at draft position j
    accepted_at_depth: tuple[int, ...] = ()  # [depth] of those, accepted
    compute_sec: float = 0.0  # its share of the verifier's time
    draft_sec: float = 0.0  # its share of the propose stage's time
    decode_sec: float = 0.0  # of compute_sec, in steps whose price at depth 0 is known
    baseline_sec: float = 0.0  # what the tokens of those steps would have taken at depth 0
    # One entry per token where log-probabilities were asked for, else None. `logprobs` itself is
    # always kept.
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    # The job's report has these, the completion's row has not.
    recheck: Recheck = NOT_LOOKED_AT
    shadow_proposed: int = 0
    shadow_accepted: int = 0
    # Kept in the completion's row: see `provenance.py`. Prices are of an hour of the device, in
    # millionths of a dollar, so that 100-ns units × price is a whole number.
    provenance: Provenance = NO_PROVENANCE
    ticks: Ticks = NO_TICKS  # of the verifying device
    price_microusd: int = 0
    ahead_ticks: int = 0  # of the device that drafted ahead
    ahead_price_microusd: int = 0
    numeric_class: str | None = None  # that its tokens were decided in; None: not known
    model_fingerprint: str | None = None  # of the model that decided them; None: not known
    receipt: bytes | None = None  # see `audit/receipts.py`; None: there was no key when recorded
    # `job/row/sample` of the completion that it is a copy of: then no pass decided its tokens, and
    # its origins are all PLAIN. None: decided here.
    reused_from: str | None = None
    rulings: tuple[Ruled, ...] = ()  # of the job's policies; the audit log has them, the row not
    # By what `output.best_by` names, the higher the better; None: it was not asked, or failed.
    score: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error, or has another response format than it was asked for."""
        return self.finish_reason is FinishReason.ERROR or self.is_malformed

    @property
    def is_withheld(self) -> bool:
        """Whether a content policy keeps its text back."""
        return self.finish_reason in WITHHELD

    @property
    def is_malformed(self) -> bool:
        """Whether it ended of itself without the response format or the calls it was asked for."""
        return self.finish_reason in FINISHED and self.error is not None


def request_id_of(job_id: str, row_index: int, sample_index: int) -> str:
    """What the engine calls a request, and `CompletionRecord.reused_from` its completion."""
    return f"{job_id}/{row_index}/{sample_index}"


class Answered(NamedTuple):
    """A completion that is in the store, and the job that it is of."""

    job_id: str
    record: CompletionRecord

    @property
    def name(self) -> str:
        return request_id_of(self.job_id, self.record.row_index, self.record.sample_index)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be created. `spec` is the resolved spec as plain JSON values.

    For a private tenant `spec` omits texts, and `sealed_spec` is the complete spec as JSON.
    """

    job_id: str
    name: str
    tenant: str
    spec: Mapping[str, Any]
    spec_digest: str
    verifier: str
    proposer: str | None
    output_uri: str
    workspace_uri: str
    idempotency_key: str | None = None
    priority: int = NORMAL
    deadline_sec: float | None = None  # from its creation
    budget_usd: float | None = None
    privacy: PrivacyMode = PrivacyMode.FULL
    sealed_spec: str | None = None
    numeric_class: str | None = None  # None: the first claim for VERIFY chooses it
    model_fingerprint: str | None = None  # None: ingest tells it
    least: LeastTokens = NOTHING_SURE  # for its tenant's budgets; not kept


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in the store. `spec` is complete if the store can decrypt it."""

    job_id: str
    name: str
    tenant: str
    spec: Mapping[str, Any]
    spec_digest: str
    state: JobState
    stage: Stage
    verifier: str
    proposer: str | None
    output_uri: str
    workspace_uri: str
    idempotency_key: str | None
    cancel_requested: bool
    error: str | None
    rows_total: int  # rows read from the input, known once ingest is done
    groups_total: int  # those that were planned, and those that were split off from them
    prompt_tokens: int
    created_at: float  # seconds since the epoch
    started_at: float | None
    finished_at: float | None
    report: Mapping[str, Any] = field(default_factory=dict)  # engine measurements, merged per group
    priority: int = NORMAL
    deadline_at: float | None = None
    budget_usd: float | None = None
    stop_reason: str | None = None  # why it was cancelled, in words
    paused: bool = False  # its input waits until fewer of its groups are open
    privacy: PrivacyMode = PrivacyMode.FULL
    purged_at: float | None = None  # when its texts and files were deleted
    numeric_class: str | None = None  # `unknown` of old jobs; None: not chosen yet
    # Of the verifier that decides its tokens: `unknown` of old jobs; None: its input is not begun.
    model_fingerprint: str | None = None
    model_parts: Mapping[str, str] = field(default_factory=dict)  # of that fingerprint
    proposer_fingerprint: str | None = None  # of its draft model, where outputs depend on it
    last_error: str | None = None  # why ingest or publish was released


@dataclass(frozen=True, slots=True)
class DueWork:
    """A unit of work that is due, and what its queue depends on. Messages only point to it."""

    job_id: str
    stage: Stage
    group_index: int | None
    model: str | None = None  # the verifier or proposer that must serve it: routing
    priority: int = NORMAL  # of its job: routing
