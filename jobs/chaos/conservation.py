"""Conservation of rows and of device time.

Rows: submitted = ok + failed + cancelled + pending, and each (row, sample) occurs once, bit for
bit. Time: rows are charged exactly what the attempts that made them took; everything else was lost,
idle or overhead, to the last unit. One exception: a worker may be taken for dead in mid-step. Its
session ends there, and the part of the step before that end counts as lost, though the worker
finishes the step in its next session and charges the rows for all of it.

The checks read the store and the published files alone, so they work for any job at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.names import MANIFEST, MARKER
from specbatch.pipeline.outputs.outputs import read_manifest, read_output
from specbatch.pipeline.policy.costs.balance import NOTHING, Amount, Sheet, at, by_kind
from specbatch.pipeline.stages.unfinished import with_unfinished_rows
from specbatch.pipeline.storage.artefacts import read_prompts
from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.pipeline.storage.workspace import read_own
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.errors import SpecbatchError
from specbatch.schemas.provenance import TimeKind
from specbatch.schemas.records import (
    FINISHED,
    WITHHELD,
    CompletionRecord,
    FinishReason,
    JobRow,
    JobState,
    Stage,
)
from specbatch.schemas.timekeeping import SessionRow

Key = tuple[int, int]  # row, sample
Outcome = tuple[object, ...]  # of a (row, sample): what does not depend on how it came about

# Columns of the output; what is left out depends on drafts and on the machine.
DECIDED = (
    "id",
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "seed",
    "verifier",
    "proposer",
    "error",
    "logprobs",
)
_NAMED = 5  # keys that a violation names


@dataclass(frozen=True, slots=True)
class Census:
    """The places of a job's keys."""

    submitted: int
    ok: int
    failed: int
    cancelled: int
    pending: int
    lost: tuple[Key, ...] = ()  # nowhere
    doubled: tuple[Key, ...] = ()  # more than once among what is finished
    unknown: tuple[Key, ...] = ()  # never submitted

    @property
    def holds(self) -> bool:
        parts = self.ok + self.failed + self.cancelled + self.pending
        return parts == self.submitted and not (self.lost or self.doubled or self.unknown)

    def __str__(self) -> str:
        sign = "=" if self.holds else "≠"
        return (
            f"submitted {self.submitted} {sign} ok {self.ok} + failed {self.failed}"
            f" + cancelled {self.cancelled} + pending {self.pending}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The violations that were found; none if rows and time are conserved."""

    job_id: str
    state: JobState
    census: Census
    violations: tuple[str, ...] = ()


def census(store: Store, objects: Objects, job_id: str, submitted: Collection[Key]) -> Census:
    """Count a job's keys at any time. A key that moves meanwhile counts at one of both places."""
    job = store.get_job(job_id)
    waiting = _planned(store, objects, job)
    reading = job.stage is Stage.INGEST
    keys, ends = _finished(store, objects, job)
    rest = set(submitted) - keys.keys()
    pending = rest if reading else rest & waiting
    return Census(
        submitted=len(submitted),
        ok=sum(ends[reason] for reason in (*FINISHED, *WITHHELD)),
        failed=ends[FinishReason.ERROR],
        cancelled=ends[FinishReason.CANCELLED],
        pending=len(pending),
        lost=tuple(sorted(rest - pending)),
        doubled=tuple(sorted(key for key, times in keys.items() if times > 1)),
        unknown=tuple(sorted(keys.keys() - set(submitted))),
    )


def report(
    store: Store,
    objects: Objects,
    job_id: str,
    expected: Mapping[Key, Outcome],
    restored: bool = False,
) -> Report:
    """Check a job against its expected outcomes; of a running job, check conservation alone.

    `restored`: an older copy replaced the store during the job.
    """
    job = store.get_job(job_id)
    counted = census(store, objects, job_id, expected)
    violations = list(_of_census(counted))
    if job.state.is_final:
        violations += _of_end(store, job, counted)
        violations += _of_output(store, objects, job, expected)
        violations += job_time_violations(store, job, restored)
        violations += usage_violations(store, job, restored)
    return Report(job_id, job.state, counted, tuple(violations))


def outcomes(uri: str, objects: Objects) -> list[tuple[Key, Outcome]]:
    """The outcomes in a finished output. Raises `SpecbatchError` if a file was changed."""
    return [
        (
            (row["row_index"], row["sample_index"]),
            tuple(_hashable(row[name]) for name in DECIDED),
        )
        for row in read_output(uri, objects).to_pylist()
    ]


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _planned(store: Store, objects: Objects, job: JobRow) -> set[Key]:
    """Keys of all rows in groups. Groups that were split share their files."""
    keys: set[Key] = set()
    for index in range(job.groups_total):
        prompts = store.prompts_of(job.job_id, index)
        if prompts is not None:
            rows = read_prompts(read_own(objects, job, prompts.artefact))
            keys |= {(row.row_index, sample) for row in rows for sample in range(row.n)}
    return keys


def _finished(
    store: Store, objects: Objects, job: JobRow
) -> tuple[Counter[Key], Counter[FinishReason]]:
    """Finished keys, and how they ended."""
    keys: Counter[Key] = Counter()
    ends: Counter[FinishReason] = Counter()
    for record in with_unfinished_rows(store, objects, job):
        keys[record.row_index, record.sample_index] += 1
        ends[record.finish_reason] += 1
    for row in store.rejected(job.job_id):
        keys[row.row_index, 0] += 1
        ends[FinishReason.ERROR] += 1
    return keys, ends


def _of_census(counted: Census) -> Iterator[str]:
    for word in ("lost", "doubled", "unknown"):
        keys = getattr(counted, word)
        if keys:
            yield f"{len(keys)} {word}: {_some(keys)}"
    if not counted.holds:
        yield str(counted)


def _of_end(store: Store, job: JobRow, counted: Census) -> Iterator[str]:
    """Check that an ended job has nothing open and that its totals match its rows."""
    if counted.pending:
        yield f"the job is {job.state} and {counted.pending} are pending"
    progress = store.progress(job.job_id)
    unfinished = len(store.failed_groups(job.job_id))
    if progress.groups_done + unfinished != progress.groups_total:
        yield (
            f"the job is {job.state} with {progress.groups_total} groups, of which "
            f"{progress.groups_done} are done and {unfinished} failed or cancelled"
        )
    records = list(store.completions(job.job_id))
    for what, said, counted_now in (
        ("completions", progress.completions, len(records)),
        ("tokens", progress.completion_tokens, sum(len(r.token_ids) for r in records)),
        ("proposed tokens", progress.proposed, sum(r.proposed for r in records)),
    ):
        if said != counted_now:
            yield f"groups say {said} {what}, their rows {counted_now}"


def _of_output(
    store: Store, objects: Objects, job: JobRow, expected: Mapping[Key, Outcome]
) -> Iterator[str]:
    """Check that listed files exist, with each key once, as in the store and as expected."""
    try:
        rows = outcomes(job.output_uri, objects)
        manifest = read_manifest(job.output_uri, objects)
        listed = {
            file.name for file in (*manifest.parts, *manifest.remainder, *manifest.quarantine)
        }
        root = join(tidy(job.output_uri), "")
        there = {info.uri.removeprefix(root) for info in objects.list(root)}
        there = {name for name in there if not name.startswith(".")}  # half a file of a killed one
    except SpecbatchError as error:
        yield f"the output of a job that is {job.state}: {error}"
        return
    if strays := there - listed - {MARKER, MANIFEST}:
        yield f"files that no manifest lists: {', '.join(sorted(strays))}"
    times = Counter(key for key, _ in rows)
    if many := [key for key, n in times.items() if n > 1]:
        yield f"{len(many)} are in the output more than once: {_some(many)}"
    if missing := expected.keys() - times.keys():
        yield f"{len(missing)} are not in the output: {_some(missing)}"
    if others := [key for key, outcome in rows if expected.get(key, outcome) != outcome]:
        yield f"{len(others)} differ from the undisturbed run: {_some(others)}"
    said = dict(rows)
    tokens = DECIDED.index("token_ids")
    records: Iterator[CompletionRecord] = store.completions(job.job_id)
    if unlike := [
        key
        for record in records
        if (key := (record.row_index, record.sample_index)) not in said
        or said[key][tokens] != record.token_ids
    ]:
        yield f"{len(unlike)} are not in the output as they are in the store: {_some(unlike)}"


def _some(keys: Collection[Key]) -> str:
    named = ", ".join(f"row {row} sample {sample}" for row, sample in sorted(keys)[:_NAMED])
    return named + (", ..." if len(keys) > _NAMED else "")


def job_time_violations(store: Store, job: JobRow, restored: bool = False) -> Iterator[str]:
    """Check the device time of a job that has ended.

    An attempt is kept as a whole, because a worker whose clock is ahead may have ended its session
    meanwhile. `restored`: an older copy replaced the store. It lacks earlier reports and reuses
    numbers of attempts, so their time is not checked.
    """
    if restored:
        return
    rows = store.row_times(job.job_id)
    given, ahead = Sheet(), Amount()
    for row in rows:
        given += by_kind(row.ticks, row.price_microusd)
        ahead += at(row.ahead_ticks, row.ahead_price_microusd)
    verified, drafted = Sheet(), Amount()
    slices = list(store.time_slices(job.job_id))
    kept = {one.attempt for one in slices if one.kept}
    for one in slices:
        if one.attempt in kept and one.attempt.stage is Stage.VERIFY:
            verified += by_kind(one.ticks, one.device.price_microusd)
        elif one.attempt in kept and one.attempt.stage is Stage.PROPOSE:
            drafted += at(one.ticks.total, one.device.price_microusd)
    wasted = bool(store.failed_groups(job.job_id))  # of their time some may be in no row
    owners = {session.owner for session in store.sessions(job.job_id)}
    cut_off = lost_in_mid_step(one for one in store.sessions() if one.owner in owners)
    for what, had, in_rows in (
        *((kind, verified.of(kind), given.of(kind)) for kind in TimeKind),
        ("drafts", drafted, ahead),
    ):
        more = in_rows - had
        if not (wasted or _is_within(NOTHING, more)) or not _is_within(more, cut_off):
            yield f"of {what} time, attempts had {had} and their rows were given {in_rows}"
        elif _is_within(NOTHING, more):
            cut_off -= more  # no lost time is given to two kinds


def usage_violations(store: Store, job: JobRow, restored: bool = False) -> Iterator[str]:
    """Check what attempts used beside devices: results that were stored once were paid for once.

    `restored` as in `job_time_violations`.
    """
    if restored:
        return
    kept: Counter[Stage] = Counter()
    for one in store.stage_usage(job.job_id):
        kept[one.stage] += one.attempts * one.kept
    logged = Counter(entry.kind for entry in store.log(job.job_id))
    for stage, kind in ((Stage.RECORD, EntryKind.GROUP), (Stage.PUBLISH, EntryKind.PUBLISHED)):
        if kept[stage] != logged[kind]:
            yield (
                f"the log has {logged[kind]} results of stage {stage}, and {kept[stage]} attempts "
                "at it are kept"
            )


def _is_within(less: Amount, more: Amount) -> bool:
    return less.ticks <= more.ticks and less.units <= more.units


def lost_in_mid_step(sessions: Iterable[SessionRow]) -> Amount:
    """What sessions lost whose process lived on and began another one."""
    last: dict[str, SessionRow] = {}
    lost = Amount()
    for session in sessions:  # in the order of their beginnings
        if (before := last.get(session.owner)) is not None:
            lost += at(before.lost, before.device.price_microusd)
        last[session.owner] = session
    return lost
