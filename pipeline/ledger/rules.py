"""What becomes of jobs and groups. Pure: no SQL, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from specbatch.pipeline.policy.acceptance import proposer_of
from specbatch.schemas.earlier_specs import asks_the_same, differences, renewed, stored_spec
from specbatch.schemas.errors import (
    FencedError,
    IdempotencyError,
    ModelChangedError,
    SessionEndedError,
    StoreError,
    UsageError,
)
from specbatch.schemas.fingerprint import TEXT_PARTS, Models, compared, differing, listed
from specbatch.schemas.mapper import whole_spec
from specbatch.schemas.numeric_class import NO_CHANGE, UNKNOWN, Change, contradiction
from specbatch.schemas.policies import Decided, Place, Reviews
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import (
    FIRST_SPLIT_INDEX,
    CompletionRecord,
    JobRow,
    JobState,
    Lease,
    NewGroup,
    NewJob,
    Prompts,
    Stage,
)
from specbatch.schemas.speculation import AcceptanceCount

OPEN = (Stage.PROPOSE, Stage.VERIFY, Stage.RECORD)  # a group that is not finished
CANCELLABLE = (Stage.PROPOSE, Stage.VERIFY)  # at RECORD the work is finished
JOB_ENDED = "the job ended before this group did"
LATEST = "latest"  # names the newest job
MIN_PREFIX = 6  # characters of a job id that are enough to name it
MOST_NAMED = 4  # of several jobs whose ids begin alike
MOST_TESTED = 2000.0  # draft tokens that a prior rests on: so that newer runs weigh more

_DEADLINE = "its deadline of "
_BUDGET = "its budget of $"
_STEPS = {(Stage.PROPOSE, Stage.VERIFY), (Stage.VERIFY, Stage.RECORD)}


def check_step(here: Stage, to: Stage, has_artefact: bool) -> None:
    """Raise `ValueError` unless a group may go from `here` to `to` with its file."""
    if (here, to) not in _STEPS:
        raise ValueError(f"a group cannot advance from {here} to {to}")
    if to is Stage.RECORD and not has_artefact:
        raise ValueError("a group cannot be recorded without its results file")


def stage_without_lease(stage: Stage, attempts: int, max_attempts: int, cancelled: bool) -> Stage:
    """The stage of an open group that nobody holds.

    Drafts are only hints: a group that cannot be proposed for moves to VERIFY without them.
    """
    if cancelled and stage in CANCELLABLE:
        return Stage.CANCELLED
    if attempts < max_attempts:
        return stage
    return Stage.VERIFY if stage is Stage.PROPOSE else Stage.FAILED


def resumes_at(most_open: int) -> int:
    """The number of open groups at which a paused ingest resumes."""
    return most_open // 2


def due_after(was: Stage, was_paused: bool, stage: Stage, is_paused: bool) -> Stage | None:
    """The stage of a job that became due when one of its groups ended.

    PUBLISH after the last group; INGEST when it was paused and now resumes.
    """
    if stage is Stage.PUBLISH and was is not Stage.PUBLISH:
        return stage
    return stage if stage is Stage.INGEST and was_paused and not is_paused else None


def last_error_at(to: Stage, attempts: int, last_error: str | None) -> str | None:
    """The error of a free unit that is sent to `to`."""
    if to is Stage.CANCELLED:
        return last_error
    return last_error or f"the worker vanished {attempts} times while it held this work"


def fenced(lease: Lease) -> FencedError:
    """The error of a write whose lease is not current, or is of another stage."""
    what = "job" if lease.group_index is None else f"group {lease.group_index} of job"
    return FencedError(
        f"{what} {lease.job_id} is no longer held at {lease.stage} by {lease.owner}"
        f" (fencing token {lease.token}): another worker owns the work now"
    )


def check_order(job_id: str, next_group: int, groups: Sequence[NewGroup]) -> None:
    """Raise `StoreError` unless the groups continue the job's planned groups."""
    if [g.index for g in groups] != list(range(next_group, next_group + len(groups))):
        raise StoreError(f"the next group of job {job_id} must have index {next_group}")
    if next_group + len(groups) > FIRST_SPLIT_INDEX:
        raise StoreError(
            f"job {job_id} would have more than {FIRST_SPLIT_INDEX:,} groups: "
            "set a larger group_size"
        )


def check_place(lease: Lease, next_row: int, from_row: int | None) -> None:
    """Raise `FencedError` unless a job's reader is where the store expects it.

    They differ after the store was restored from a copy. What was read since the copy is in no
    group then, and a reader that continued would leave it out.
    """
    if from_row is not None and from_row != next_row:
        raise FencedError(
            f"the reader of job {lease.job_id} is at row {from_row}, the store at row {next_row}: "
            "the store was restored from a copy; reading resumes from there"
        )


def check_retry(
    job: JobRow,
    quarantined: bool = False,
    ingest_done: bool = True,
    change: Change = NO_CHANGE,
) -> None:
    """Raise `UsageError` unless the job, or its quarantined rows alone, can be retried with the
    change."""
    if not job.state.is_final:
        raise UsageError(
            f"job {job.job_id} is {job.state}; only a job that has ended can be retried"
        )
    if job.purged_at is not None:
        raise UsageError(
            f"job {job.job_id} was purged: its prompts are gone, submit its rows as a new job"
        )
    if quarantined and not ingest_done:
        # Else it would end as if there were no more rows than those that were read.
        raise UsageError(
            f"the input of job {job.job_id} was not read to its end: retry all of the job"
        )
    check_change(job, change)


def check_review(
    job: JobRow, ingest_done: bool, reviews: Reviews, decided: Mapping[Place, Decided]
) -> None:
    """Raise `UsageError` unless all of these completions wait for a decision."""
    if job.purged_at is not None:
        raise UsageError(f"job {job.job_id} was purged: the texts that were held back are gone")
    if not job.state.has_output:
        raise UsageError(
            f"job {job.job_id} is {job.state}: its completions can be reviewed once its output is "
            f"published; `specbatch retry {job.job_id} --local` does that here"
        )
    if not ingest_done:  # else its output could not be written again if the input has changed
        raise UsageError(
            f"job {job.job_id} was stopped before its input was read to the end: retry it, and "
            "review its completions when it has ended"
        )
    for place in decided:
        called = f"row {place[0]}, sample {place[1]} of job {job.job_id}"
        if place not in reviews.held:
            raise UsageError(f"{called} is not held back for review")
        if place in reviews.decided:
            raise UsageError(f"{called} was already {reviews.decided[place]}: a decision is final")


def check_move(job: JobRow, change: Change, quarantined: bool) -> None:
    """Raise `UsageError` unless a running job can be moved to another numeric class or model."""
    if job.state.is_final:
        raise UsageError(f"job {job.job_id} has ended in the meantime: retry it again")
    if quarantined:
        raise UsageError(f"job {job.job_id} is running: --quarantined is for jobs that have ended")
    if job.cancel_requested:
        raise UsageError(f"job {job.job_id} is being stopped: wait for its end, then retry it")
    check_change(job, change)


def check_change(job: JobRow, change: Change) -> None:
    """Raise `UsageError` unless the job may pin this."""
    if change.numeric_class is not None:
        check_class(job, change.numeric_class)
    if change.models is not None:
        check_models(job, change.models)


def columns_of(job: JobRow, change: Change) -> dict[str, Any]:
    """What is new in a change, by column of the job's row."""
    wanted: dict[str, Any] = {}
    if change.numeric_class is not None:
        wanted["numeric_class"] = change.numeric_class
    if change.models is not None:
        wanted |= change.models.as_columns()
    known = {name: getattr(job, name) for name in wanted}
    return {} if known == wanted else wanted


def models_to_pin(job: JobRow, models: Models) -> dict[str, Any]:
    """What ingest adds to a job's pinned models, by column.

    Raises `ModelChangedError` where the job has pinned others.
    """
    if job.model_fingerprint == UNKNOWN:
        return {}
    if job.model_fingerprint not in (None, models.verifier.digest):
        raise ModelChangedError(
            f"model `{job.verifier}` of job {job.job_id} has "
            + compared(job.model_fingerprint, job.model_parts, models.verifier)
        )
    pinned = job.proposer_fingerprint
    if pinned is not None and pinned != models.proposer:
        raise ModelChangedError(
            f"draft model `{job.proposer}` of job {job.job_id} has other files than the job began "
            "with, on which its outputs depend"
        )
    is_known = bool(job.model_fingerprint and job.model_parts) and pinned == models.proposer
    return {} if is_known else models.as_columns()


def check_models(job: JobRow, models: Models) -> None:
    """Raise `UsageError` unless this model can decide the rest of the job, whose prompts are
    tokens already."""
    names = differing(job.model_parts, models.verifier.parts)
    texts = [name for name in names if name in TEXT_PARTS]
    if texts and job.groups_total:
        raise UsageError(
            f"job {job.job_id} cannot continue with that model: its prompts are tokens of another "
            f"{listed(texts)}; submit it as a new job"
        )


def check_class(job: JobRow, numeric_class: str) -> None:
    """Raise `UsageError` unless the job may be verified in this class."""
    engine = job.spec.get("engine") or {}
    asked = (engine.get("dtype", "auto"), numeric_class, engine.get("verifier_weights", "as-is"))
    if problem := contradiction(*asked):
        raise UsageError(f"job {job.job_id} cannot be moved: {problem}")


def check_purge(job: JobRow) -> None:
    """Raise `UsageError` unless the job's stored texts may be emptied."""
    if not job.state.is_final:
        raise UsageError(f"job {job.job_id} is {job.state}: cancel it first, or wait for its end")


def reason_to_stop(
    is_late: bool, deadline_at: float | None, spent_usd: float, budget_usd: float | None
) -> str | None:
    """In words, why a job must stop; None: it need not."""
    if is_late and deadline_at is not None:
        when = datetime.fromtimestamp(deadline_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"{_DEADLINE}{when} passed"
    if budget_usd is not None and spent_usd >= budget_usd:
        return f"{_BUDGET}{budget_usd:g} was spent"
    return None


def deadline_passed(stop_reason: str | None) -> bool:
    """Whether this is why a job was stopped."""
    return stop_reason is not None and stop_reason.startswith(_DEADLINE)


def budget_was_spent(stop_reason: str | None) -> bool:
    """Whether this is why a job was stopped."""
    return stop_reason is not None and stop_reason.startswith(_BUDGET)


def session_ended(session_id: str) -> SessionEndedError:
    """The error of a report for a session that is over or unknown."""
    return SessionEndedError(f"session {session_id} has ended: its worker was silent for too long")


def leased_and_lost(seen: int, accounted: int) -> tuple[int, int]:
    """(leased, lost) time of a session that ends, so that leased = accounted + lost."""
    leased = max(seen, accounted)
    return leased, leased - accounted


def check_final(state: JobState) -> None:
    """Raise `ValueError` unless a job can end in `state`."""
    if not state.is_final:
        raise ValueError(f"a job cannot end as {state}")


def merge_report(report: Mapping[str, Any], added: Mapping[str, float]) -> dict[str, Any]:
    """The report with numbers added key by key; anything that is not a number is replaced.

    Under a key that begins with `largest_` the larger number stays.
    """
    merged = dict(report)
    for key, value in added.items():
        if not _are_numbers(merged.get(key), value):
            merged[key] = value
        elif key.startswith("largest_"):
            merged[key] = max(merged[key], value)
        else:
            merged[key] = merged[key] + value
    return merged


def _are_numbers(*values: object) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _rows_failed(completions: Sequence[CompletionRecord], keep_best: int | None) -> int:
    """Rows of which a completion has failed that is published."""
    samples, good = Counter[int](), Counter[int]()
    for completion in completions:
        samples[completion.row_index] += 1
        good[completion.row_index] += not completion.has_failed
    most = math.inf if keep_best is None else keep_best
    return sum(good[row] < min(count, most) for row, count in samples.items())


def group_totals(
    completions: Sequence[CompletionRecord], keep_best: int | None = None
) -> dict[str, Any]:
    """The totals of a group's completions that its row keeps. `keep_best`: so many of a prompt's
    are published, all if it is None."""
    return {
        "completions": len(completions),
        "rows_failed": _rows_failed(completions, keep_best),
        "completion_tokens": sum(len(c.token_ids) for c in completions),
        "proposed": sum(c.proposed for c in completions),
        "accepted": sum(c.accepted for c in completions),
        "verifier_passes": sum(c.verifier_passes for c in completions),
        "cost_usd": sum(c.cost_usd for c in completions),
    }


def check_same_job(known: JobRow, new: NewJob) -> None:
    """Raise `IdempotencyError`, which names what differs, unless both ask for the same.

    The known job may be of an earlier version, which had fewer fields or other defaults.
    """
    if known.spec_digest == new.spec_digest:
        return
    asked = whole_spec(new.spec, new.sealed_spec)
    earlier, later = stored_spec(known.spec), stored_spec(asked)
    one, other = known.spec, asked
    if earlier is not None and later is not None:
        if asks_the_same(later, earlier):
            return
        one, other = (renewed(spec).model_dump(mode="json") for spec in (earlier, later))
    fields = ", ".join(sorted(differences(one, other))) or "spec_digest"
    name = (
        f"idempotency key {new.idempotency_key!r}"
        if new.idempotency_key is not None and known.idempotency_key == new.idempotency_key
        else f"job id {new.job_id}"
    )
    raise IdempotencyError(
        f"{name} was used for job {known.job_id} with a different spec (differs in: {fields});"
        " use another key or the same spec",
        job_id=known.job_id,
    )


def row_order(prompts: Prompts) -> tuple[str, int]:
    """Sort key of a job's groups by their rows: prompts files are numbered in the order of the
    input, and groups that were split share one."""
    return prompts.artefact.uri, prompts.row_start


def is_whole(token_ids: Sequence[int]) -> bool:
    """Whether all tokens of an output are stored: only then can it serve as drafts."""
    return NOT_KEPT not in token_ids


def prior_key(count: AcceptanceCount) -> tuple[str, str, str]:
    """The key of a prior within its tenant and job name. No tag is the empty one."""
    return count.proposer, count.fingerprint, count.tag or ""


def by_proposer(counts: Iterable[AcceptanceCount]) -> list[AcceptanceCount]:
    """The counts with all confidence buckets of a proposer together: one for each key."""
    sums: dict[tuple[str, ...], AcceptanceCount] = {}
    for count in counts:
        one = replace(count, proposer=proposer_of(count.proposer))
        known = sums.get(prior_key(one), replace(one, agreed=0.0, tested=0.0))
        sums[prior_key(one)] = replace(
            one, agreed=known.agreed + one.agreed, tested=known.tested + one.tested
        )
    return list(sums.values())


def learned(agreed: float, tested: float, count: AcceptanceCount) -> tuple[float, float]:
    """(agreed, tested) with a count added, scaled down to `MOST_TESTED` when they exceed it."""
    agreed, tested = agreed + count.agreed, tested + count.tested
    if tested > MOST_TESTED:
        return agreed * MOST_TESTED / tested, MOST_TESTED
    return agreed, tested


def find_by_prefix(prefix: str, found: Sequence[str]) -> str | None:
    """The message of `JobNotFoundError`, or None when exactly one job was found."""
    if len(found) == 1:
        return None
    if found:
        more = ", …" if len(found) > MOST_NAMED else ""
        named = f"{', '.join(found[:MOST_NAMED])}{more}"
        return f"more than one job id begins with {prefix!r}: {named}; give more of it"
    return f"no job {prefix!r} in this store"


def find_by_name(name: str, found: Sequence[str]) -> str | None:
    """The same for the ids of jobs with a name, newest first."""
    if len(found) < 2:
        return find_by_prefix(name, found)
    more = ", …" if len(found) > MOST_NAMED else ""
    named = f"{', '.join(found[:MOST_NAMED])}{more}"
    return f"more than one job is named {name!r}: {named}; give the id of one"
