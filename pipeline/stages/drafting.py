"""What the stages need to know about drafts: past outputs, priors, how far to write ahead."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.proposers.history import History
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.acceptance import proposer_of
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.depth import block_length
from specbatch.pipeline.policy.tuning import (
    BLOCK_TESTS,
    PILOT_TOKENS,
    SHORTEST_BLOCK,
    USUAL_DRAFT_PRICE,
)
from specbatch.pipeline.runtime.last_used import LastUsed
from specbatch.pipeline.stages.requests import scope_of
from specbatch.pipeline.storage.artefacts import DraftBlock
from specbatch.pipeline.storage.history_files import HISTORY, delete_reported, name_of
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.workspace import put_own, read_own
from specbatch.schemas.draft_switches import DraftSwitches
from specbatch.schemas.errors import (
    FencedError,
    SpecbatchError,
    StoreError,
)
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    Artefact,
    JobRow,
    Lease,
    PromptRow,
    Verification,
)
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation import (
    PRE_GENERATED,
    VOCABULARY,
    AcceptanceCount,
    Decision,
    DecisionAction,
)

log = logging.getLogger(__name__)

MOST_AHEAD = 512  # tokens of a pre-generated continuation
_PRICED_TOKENS = 1000  # of a job, before its price per token is believed
_JOBS_KEPT = 4  # histories in memory at a time
# Of a pilot group's rows, one in so many gets drafts: with one group in 16 a pilot, one row in 64.
# With the demo's models that took 0.5 to 1.1 % of a job's device time, half of it the first pass.
_PILOT_ROWS = 4
_MOST_NOTED = 256  # jobs of which smaller things are kept


@dataclass(slots=True)
class _Slot:
    """One job's history, loaded by the first thread that needs it while the others wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: bool = False
    history: History | None = None


class Drafting:
    """Reads and writes what is known of drafts. Thread-safe.

    No output depends on it: failures are logged, and the job continues.
    """

    def __init__(
        self,
        store: Store,
        objects: Objects,
        drafts_beside: bool = False,
        switches: Callable[[], DraftSwitches] = DraftSwitches,
    ) -> None:
        """`drafts_beside`: this process's own verifier has a draft model beside it. `switches`:
        what an operator has switched off by now."""
        self._drafts_beside = drafts_beside
        self._switches = switches
        self._store = store
        self._objects = objects
        self._histories: LastUsed[str, _Slot] = LastUsed(_JOBS_KEPT)
        self._priors: LastUsed[str, tuple[AcceptanceCount, ...]] = LastUsed(_MOST_NOTED)
        # Fingerprints of the models that wrote the jobs' newest blocks.
        self._writers: LastUsed[str, str] = LastUsed(_MOST_NOTED)
        self._draft_usd: dict[str, float] = {}  # of a drafted token, by proposer
        self._not_worth: LastUsed[str, bool] = LastUsed(_MOST_NOTED)  # jobs where that was noted

    # --- when a job begins ----------------------------------------------------------------------
    def prepare(self, lease: Lease, job: JobRow, spec: JobSpec, vocabulary: str) -> None:
        """Note what the job's token ids mean, and write what earlier jobs gave to its history.

        Only jobs of the same tenant with the same token ids count, those of the same name first.
        """
        report: dict[str, object] = {VOCABULARY: vocabulary}
        if uses_history(spec) and HISTORY not in job.report:  # it may be there from an attempt
            try:
                artefact = self._write_history(lease, job, spec, vocabulary)
            except FencedError:
                raise
            except (SpecbatchError, ValueError, MemoryError) as error:
                log.warning("job %s begins without a history: %s", job.job_id, _words(error))
                artefact = None
            if artefact is not None:
                report[HISTORY] = asdict(artefact)
        self._store.note_report(lease, report)

    def _write_history(
        self, lease: Lease, job: JobRow, spec: JobSpec, vocabulary: str
    ) -> Artefact | None:
        """The file with the outputs of earlier jobs; None if there are none.

        The lease is in its name: a worker that lost the lease must not overwrite another's file.
        """
        most = spec.speculation.history_tokens
        past = self._store.past_outputs(
            job.tenant, job.name, vocabulary, most, job.job_id, spec.placement
        )
        history = History.build(past, most)
        if not len(history):
            return None
        log.info("job %s: drafts from the past outputs of %d prompts", job.job_id, len(history))
        return put_own(self._objects, job, name_of(lease), history.to_bytes())

    # --- while it runs --------------------------------------------------------------------------
    def history(self, job: JobRow) -> History | None:
        """What earlier jobs gave, or None."""
        if not job.report.get(HISTORY):
            return None
        slot = self._histories.get(job.job_id, _Slot)
        with slot.lock:  # jobs do not wait for each other's files
            if not slot.loaded:
                slot.history, slot.loaded = self._load(job), True
            return slot.history

    def _load(self, job: JobRow) -> History | None:
        try:
            artefact = Artefact(**job.report[HISTORY])
            return History.from_bytes(read_own(self._objects, job, artefact))
        except (SpecbatchError, TypeError, ValueError, MemoryError) as error:
            log.warning("job %s continues without its history: %s", job.job_id, _words(error))
            return None

    def forget(self, job: JobRow) -> None:
        """Delete the outputs of earlier jobs: the job has ended, and those may be purged any time.

        If rows of it are done again, they go without.
        """
        self._histories.drop(job.job_id)
        try:
            delete_reported(self._objects, job)
        except (SpecbatchError, TypeError) as error:
            log.warning("could not delete the history of job %s: %s", job.job_id, _words(error))

    def priors(self, job: JobRow, blocks: Iterable[DraftBlock] = ()) -> list[AcceptanceCount]:
        """How drafts fared in earlier jobs of the name; read once per job.

        Of blocks written ahead: how those of the model fared that wrote these.
        """
        writers = {block.proposer for block in blocks}
        if writers:
            self._writers.drop(job.job_id)
            self._writers.get(job.job_id, lambda: max(writers))
        return [c for c in self._all_priors(job) if not _is_block(c) or c.fingerprint in writers]

    def _all_priors(self, job: JobRow) -> Sequence[AcceptanceCount]:
        return self._priors.get(job.job_id, lambda: self._read_priors(job))

    def _read_priors(self, job: JobRow) -> tuple[AcceptanceCount, ...]:
        try:
            return tuple(self._store.acceptance(job.tenant, job.name))
        except StoreError as error:
            log.warning("job %s begins without priors: %s", job.job_id, error)
            return ()

    # --- how far to write ahead -----------------------------------------------------------------
    def proposes(self, job: JobRow, spec: JobSpec, group_index: int) -> bool:
        """Whether a group passes through the propose stage.

        If verifiers have a draft model beside them, blocks are made for pilots only; if this
        process has one, not even for those.
        """
        if self.is_off(spec):
            return False
        if spec.speculation.pregenerate != "auto" or not spec.may_propose:
            return spec.proposes(group_index)
        if self._drafts_beside:
            return False
        return spec.proposes(group_index, self._is_worth_it(job))

    def rows_ahead(self, job: JobRow, spec: JobSpec, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """The rows of a group to write ahead for: of a pilot group a part, else all."""
        rows = [row for row in rows if not self.is_off(spec, row.tag)]
        if spec.speculation.pregenerate is True or self._is_worth_it(job):
            return rows
        return rows[: max(1, len(rows) // _PILOT_ROWS)]

    def is_off(self, spec: JobSpec, tag: str | None = None) -> bool:
        """Whether an operator has switched blocks off for rows of this tag; None: for all rows."""
        return self._switches().is_off(scope_of(spec, tag), PRE_GENERATED)

    def _is_worth_it(self, job: JobRow) -> bool:
        """Whether blocks were worth making in earlier jobs of the name."""
        counts = self._all_priors(job)
        local = any(proposer_of(c.proposer).startswith(DRAFT_MODEL) for c in counts)
        newest = max(filter(_is_block, counts), key=lambda c: c.learned_at, default=None)
        acceptance, tested = _of_blocks(counts, "" if newest is None else newest.fingerprint)
        judged = tested >= BLOCK_TESTS
        return judged and not local and block_length(acceptance, tested, PILOT_TOKENS) > 0

    def length(self, job: JobRow, spec: JobSpec, proposer: str = "") -> int:
        """Tokens to write ahead for the job's next group; 0: none are worth it, or wanted.

        `proposer`: fingerprint of the model that would write.
        """
        if self.is_off(spec):
            return 0
        if spec.speculation.pregenerate_tokens != "auto":
            return spec.speculation.pregenerate_tokens
        try:
            counts = self._store.acceptance(job.tenant, job.name)
            progress = self._store.progress(job.job_id)
        except StoreError as error:
            log.warning(
                "job %s: cannot read acceptance; using the default draft length: %s",
                job.job_id,
                error,
            )
            return PILOT_TOKENS
        most = min(spec.sampling.max_tokens, MOST_AHEAD)
        draft_usd = self._draft_usd.get(job.proposer or "")
        # Copies cost nothing, so such a job does not tell what its tokens cost.
        price = None if spec.reuse_outputs else _price(progress, draft_usd)
        acceptance, tested = _of_blocks(counts, proposer)
        length = block_length(acceptance, tested, most, price)
        if not length:
            self._note_not_worth(
                job, acceptance, tested, USUAL_DRAFT_PRICE if price is None else price
            )
        return length

    def _note_not_worth(self, job: JobRow, acceptance: float, tested: float, price: float) -> None:
        """Once per job: all its groups would say the same."""
        if self._not_worth.find(job.job_id):
            return
        self._not_worth.get(job.job_id, lambda: True)  # noting it twice does no harm
        reason = (
            f"pre-generated drafts: acceptance {acceptance:.2f} over the last {tested:.0f} tested "
            f"tokens; too little for blocks of {SHORTEST_BLOCK} tokens or more while a drafted "
            f"token costs {price:.2f} of a verified one"
        )
        decision = Decision(time.time(), DecisionAction.DISABLED, PRE_GENERATED, reason, acceptance)
        self.learn(job, Lessons(decisions=(decision,)))

    def drafted(self, job: JobRow, tokens: int, usd: float) -> None:
        """What writing ahead cost, for one group."""
        if tokens:
            self._draft_usd[job.proposer or ""] = usd / tokens

    def learn(self, job: JobRow, lessons: Lessons) -> None:
        """Write down what a group taught about drafts."""
        try:
            if lessons.decisions:
                self._store.note_decisions(job.job_id, lessons.decisions)
            if lessons.counts:
                writer = self._writers.find(job.job_id) or ""
                counts = [
                    replace(c, fingerprint=writer) if _is_block(c) else c for c in lessons.counts
                ]
                self._store.learn_acceptance(job.tenant, job.name, counts)
        except StoreError as error:
            log.warning("could not save draft statistics of job %s: %s", job.job_id, error)


def _words(error: Exception) -> str:
    """The words that may be logged: an error that is not ours may quote what was read."""
    return str(error) if isinstance(error, SpecbatchError) else type(error).__name__


def _price(progress: JobProgress, draft_usd_per_token: float | None) -> float | None:
    """Of a drafted token in tokens of the verifier; None while that is not measured."""
    if draft_usd_per_token is None:
        return None
    if progress.completion_tokens < _PRICED_TOKENS or not progress.cost_usd:
        return None
    return draft_usd_per_token * progress.completion_tokens / progress.cost_usd


def _is_block(count: AcceptanceCount) -> bool:
    return proposer_of(count.proposer) == PRE_GENERATED


def _of_blocks(counts: Sequence[AcceptanceCount], proposer: str) -> tuple[float, float]:
    """(acceptance, tests) of tokens that one model wrote ahead, all tags together."""
    of = [c for c in counts if _is_block(c) and c.fingerprint == proposer]
    tested = sum(c.tested for c in of)
    return (sum(c.agreed for c in of) / tested if tested else 0.0), tested


def uses_history(spec: JobSpec) -> bool:
    speculation = spec.speculation
    return (
        speculation.enabled
        and speculation.history_tokens > 0
        and speculation.allows("history")
        and speculation.verification is Verification.COUPLED
    )
