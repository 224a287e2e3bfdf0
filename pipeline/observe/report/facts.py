"""Everything that a job's report shows, in figures: the templates read nothing else.

Shares are between 0 and 1, times are seconds, moments seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbatch.schemas.audit import AuditRecord
from specbatch.schemas.job_figures import RowFigures, Savings
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobRow, Origin
from specbatch.schemas.speculation import Decision, DecisionAction

MOST_SOURCES = 4  # that have a line of their own
MOST_DECISIONS = 40  # that are marked in a chart


@dataclass(frozen=True, slots=True)
class CostPart:
    """A kind of device time and its cost."""

    kind: str
    meaning: str
    sec: float
    usd: float


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage's cost in dollars, by part of the bill."""

    stage: str
    parts: tuple[float, ...]  # the device, then `usage.PARTS`
    usd: float
    lost: float  # of that


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of one source, or of rows of one tag."""

    name: str
    proposed: int
    accepted: int
    drafts: int = 0  # blocks of draft tokens
    completions: int = 0
    tokens: int = 0
    usd: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True, slots=True)
class Moment:
    """What was finished in a stretch of the job's time."""

    begin: float
    end: float
    groups: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    passes: int = 0  # of the verifier, once for each sequence
    queue_sec: float = 0.0
    compute_sec: float = 0.0
    by_source: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # proposed, accepted

    @property
    def middle(self) -> float:
        return (self.begin + self.end) / 2

    @property
    def depth(self) -> float | None:
        """Draft tokens of a sequence in a pass, on average."""
        return self.proposed / self.passes if self.passes else None

    @property
    def rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of some values."""

    middle: float
    p90: float
    p99: float
    most: float
    total: float
    values: int


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Rows that were quarantined for one reason, with the first few of them."""

    code: str
    rows: int
    examples: tuple[tuple[str, str], ...]  # which row, and why


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token. Its text is None where it is not kept."""

    text: str | None
    origin: Origin
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A completion that stands out, or a sampled one. Texts are None where none may be shown."""

    figures: RowFigures
    tag: str | None
    row_id: str | None = None
    prompt: str | None = None
    output: str | None = None  # an excerpt, of those that stand out
    tokens: tuple[ShownToken, ...] = ()  # of sampled ones: the first


@dataclass(frozen=True, slots=True)
class Night:
    """What jobs of this name found of one draft model on one day."""

    day: str  # in UTC
    model: str  # in the registry, or the beginning of its fingerprint
    tested: float
    accepted: float

    @property
    def rate(self) -> float:
        return self.accepted / self.tested


@dataclass(frozen=True, slots=True)
class Facts:
    """One job's report."""

    job: JobRow
    progress: JobProgress
    resume: str | None  # the command that resumes an interrupted job; None: it is not
    made_at: float
    version: str
    texts: str | None  # why no texts are shown; None: they are
    words: bool  # whether reasons and errors may be shown
    tokens_as_ids: bool  # the tokenizer is not here
    usd: float  # the cost of all attempts
    parts: tuple[CostPart, ...]
    stages: tuple[StagePart, ...]
    saved: Savings | None
    usd_per_1k: float | None
    usd_per_document: float | None
    drafted: bool  # whether anything was drafted, for any row
    by_tag: tuple[Drafts, ...]
    tags_left_out: int
    by_source: tuple[Drafts, ...]
    over_time: tuple[Moment, ...]
    nights: tuple[Night, ...]  # of draft models, those of this job among them; oldest first
    depths: tuple[Bar, ...]  # passes by draft tokens
    positions: tuple[Drafts, ...]  # by position in the draft, from 1
    fill: tuple[Bar, ...]  # passes by sequences of this job in them
    mean_fill: float | None
    fill_sampled: int  # one pass in so many was sampled
    queue: Spread | None  # of groups
    compute: Spread | None
    slowest: tuple[ShownRow, ...]
    least_accepted: tuple[ShownRow, ...]
    decisions: tuple[Decision, ...]
    decisions_by_action: Mapping[str, int]
    quarantined: tuple[Quarantined, ...]
    failed_groups: tuple[tuple[str, str], ...]  # the first groups or single rows: which, why
    failed_groups_total: int
    audits: tuple[AuditRecord, ...]
    versions: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    samples: tuple[ShownRow, ...]

    @property
    def wall_sec(self) -> float | None:
        """From the job's start to its end, or to now; None before it has begun."""
        begin, end = self.job.started_at, self.job.finished_at
        if begin is None:
            return None
        return max(0.0, (self.made_at if end is None else end) - begin) or None

    @property
    def tokens_per_sec(self) -> float | None:
        return self.progress.completion_tokens / self.wall_sec if self.wall_sec else None

    @property
    def tokens_per_pass(self) -> float | None:
        return self.progress.tokens_per_pass(self.job.report)

    @property
    def sources_drawn(self) -> tuple[str, ...]:
        """Sources with a line of their own; none where there is only one source."""
        names = tuple(source.name for source in self.by_source[:MOST_SOURCES])
        return names if len(names) > 1 else ()

    @property
    def decisions_drawn(self) -> tuple[Decision, ...]:
        """Those that changed something while groups were done."""
        if not self.over_time:
            return ()
        first, last = self.over_time[0].begin, self.over_time[-1].end
        inside = [decision for decision in self.decisions if first <= decision.at <= last]
        changed = [d for d in inside if d.action is not DecisionAction.SKIPPED]
        return tuple(changed[:MOST_DECISIONS])

    @property
    def has_depth_over_time(self) -> bool:
        """Whether there is more than one stretch of time, and drafts were made."""
        return len(self.over_time) > 1 and any(moment.depth for moment in self.over_time)

    @property
    def has_lost_tokens(self) -> bool:
        """Whether a token of a sampled output is not kept."""
        return any(token.text is None for output in self.samples for token in output.tokens)
