"""Records of what is learned about drafts, and of decisions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

ALL_PROPOSERS = "*"
PRE_GENERATED = "block"  # the proposer of what propose workers wrote ahead
VOCABULARY = "vocabulary"  # key of a job's report: a hash of what its token ids mean


class DecisionAction(StrEnum):
    """A change to drafting on a job."""

    ON = "on"  # drafting pays, and begins
    OFF = "off"  # drafting does not pay: depth 0 from here on, except for trials
    DISABLED = "taken out"  # one proposer is disabled for a while
    HALF_OPENED = "tried again"  # after that while
    ENABLED = "taken in"  # and enabled, because it pays again
    ROUTED = "routed"  # rows of a tag have gone to one of several draft models
    SWITCHED_OFF = "switched off"  # by an operator: nothing is drafted, trials neither
    SWITCHED_ON = "switched on"  # that has ended
    SKIPPED = "skipped"  # a group continues without the drafts it waited for


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about drafting, with its reason."""

    at: float  # seconds since the epoch
    action: DecisionAction
    proposer: str  # its name, or ALL_PROPOSERS
    reason: str  # one sentence, with the figures it rests on
    acceptance: float | None = None  # measured: accepted share of verified draft tokens
    break_even: float | None = None  # the acceptance from which on drafting would pay
    sequences: int = 0  # in the step that it was taken in


@dataclass(frozen=True, slots=True)
class AcceptanceCount:
    """Counts of verified draft tokens: the accepted ones and the first rejected one of a block."""

    proposer: str
    tag: str | None  # of the rows
    agreed: float
    tested: float
    fingerprint: str = ""  # of the model that drafted; empty: no model did, or it is not known
    learned_at: float = field(default=0.0, compare=False)  # by the store's clock; 0: not kept yet


@dataclass(frozen=True, slots=True)
class AcceptanceDay:
    """What the jobs of one name found in one day, in UTC, of one proposer on rows of one tag."""

    proposer: str
    tag: str | None
    day: int  # since the epoch
    agreed: float
    tested: float
    superseded: bool = False  # an operator accepted what came later as the new baseline
    fingerprint: str = ""  # of the model that drafted; empty: no model did, or it is not known


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """Drafts of a candidate model and of the serving one, of the same places and never served."""

    drafts: int = 0  # places at which both drafted
    candidate: int = 0  # draft tokens of each that were what was decided
    serving: int = 0

    def __add__(self, other: ShadowPair) -> ShadowPair:
        return ShadowPair(
            self.drafts + other.drafts,
            self.candidate + other.candidate,
            self.serving + other.serving,
        )


NO_SHADOW_PAIR = ShadowPair()


@dataclass(frozen=True, slots=True)
class PastOutput:
    """A prompt's completion in an earlier job of the same tenant."""

    job_id: str
    row_id: str
    sample_index: int
    token_ids: tuple[int, ...]
