"""Parts of an output that are written while groups run: the same bytes, whatever dies meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.in_process import PLAIN, Died, Shop, armed, shop

from specbatch.jobs.chaos.conservation import usage_violations
from specbatch.jobs.chaos.plan import Plan
from specbatch.pipeline.bootstrap import make_client
from specbatch.pipeline.outputs import outputs
from specbatch.pipeline.outputs.names import MANIFEST, MARKER, STAGING
from specbatch.pipeline.outputs.outputs import OutputWriter, read_manifest
from specbatch.pipeline.runtime.purge import Purger
from specbatch.pipeline.stages.unfinished import with_unfinished_rows
from specbatch.schemas.crash_points import CrashPoint
from specbatch.schemas.malformed import MalformedSpec
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.staging import StagedPart

KEY = "A" * 43 + "="
ROWS_PER_PART = 3  # so that samples of one row lie in two parts
ALL = [None, *range(12)]  # groups; None: the job itself
PAIRS = Plan(0, (), group_size=2, writes_ahead=False)  # six groups


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(tmp_path_factory.mktemp("parts")) as made:
        yield made


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "ROWS_PER_PART", ROWS_PER_PART)


def submit(bed: Shop, spec: JobSpec) -> str:
    job, _ = make_client(bed.settings, lambda _: None, bed.store).submit(spec)
    return job.job_id


def with_output(spec: JobSpec, **values: Any) -> JobSpec:
    return spec.model_copy(update={"output": spec.output.model_copy(update=values)})


def run_without(bed: Shop, job_id: str, stage: Stage, groups: Container[int | None] = ALL) -> None:
    """Do what is due, but for these groups at this stage and what waits for them."""
    while True:
        due = [m for m in bed.store.due() if m.job_id == job_id]
        due = [m for m in due if m.stage is not stage or m.group_index not in groups]
        if not due:
            return
        bed.workers[-1].run(due[0].stage, job_id, due[0].group_index)


def running(bed: Shop, spec: JobSpec | None = None) -> tuple[str, Path, list[StagedPart]]:
    """A job whose last group is not recorded yet: its id, its output, what is staged of it."""
    job_id = submit(bed, spec or bed.spec(PAIRS))
    run_without(bed, job_id, Stage.RECORD, [5])
    folder = Path(bed.store.get_job(job_id).output_uri)
    assert bed.store.get_job(job_id).stage is Stage.RUN
    return job_id, folder, bed.store.staged_parts(job_id)


def files_below(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def written_at_once(bed: Shop, job_id: str, kind: Any = "parquet") -> dict[str, bytes]:
    """The parts of the job as they are written where nothing is staged."""
    job = bed.store.get_job(job_id)
    folder = bed.folder / "at-once" / job_id
    rows = with_unfinished_rows(bed.store, bed.objects, job)
    writer = OutputWriter(bed.objects, str(folder), job_id, kind=kind)
    writer.write(rows, bed.store.rejected(job_id))
    return files_below(folder / "data")


def assert_published(bed: Shop, job_id: str, kind: Any = "parquet") -> None:
    job = bed.store.get_job(job_id)
    folder = Path(job.output_uri)
    assert job.state is JobState.PARTIAL  # it has bad rows
    assert files_below(folder / "data") == written_at_once(bed, job_id, kind)
    assert {path.name for path in folder.iterdir()} == {"data", MANIFEST, MARKER}
    assert bed.store.staged_parts(job_id) == []
    if kind == "parquet":
        assert bed.report(job_id).violations == ()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_parts_are_written_while_a_group_runs_and_published_as_they_are(
    bed: Shop, kind: str
) -> None:
    job_id, folder, staged = running(bed, with_output(bed.spec(PAIRS), format=kind))
    assert [part.number for part in staged] == [0, 1, 2, 3, 4]
    there = files_below(folder)
    assert set(there) - {MARKER} == {name for name in there if name.startswith(f"{STAGING}/")}
    assert len(there) == 1 + len(staged)
    inodes = [path.stat().st_ino for path in sorted((folder / STAGING).iterdir())]
    bed.drain(job_id)
    parts = sorted((folder / "data").iterdir())
    assert [path.stat().st_ino for path in parts[:5]] == inodes, "they were moved, not written"
    assert len(parts) > len(staged)
    assert_published(bed, job_id, kind)


def test_what_staging_used_counts_for_who_recorded_the_group(bed: Shop) -> None:
    job_id, _, staged = running(bed)
    usage = bed.store.stage_usage(job_id)
    used = [one.used for one in usage if one.stage is Stage.RECORD and one.kept]
    stored = sum(one.stored_bytes for one in used)
    assert stored == sum(part.size_bytes for part in staged), "recording stores no files"
    bed.drain(job_id)
    assert list(usage_violations(bed.store, bed.store.get_job(job_id))) == []


def test_a_slow_group_holds_back_what_comes_behind_it(bed: Shop) -> None:
    job_id = submit(bed, bed.spec(PAIRS))
    run_without(bed, job_id, Stage.RECORD, [2])
    staged = bed.store.staged_parts(job_id)
    # Rows 0 to 3 and the quarantined row 4 are before it.
    assert [part.number for part in staged] == [0, 1, 2]
    assert sum(part.rows for part in staged) == 9
    assert sum(part.rejected for part in staged) == 1
    bed.drain(job_id)
    assert_published(bed, job_id)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [damaged, Path.unlink, lambda path: path.write_bytes(b"PAR1")])
def test_a_damaged_part_is_written_again_with_those_behind_it(bed: Shop, harm: Any) -> None:
    job_id, folder, _ = running(bed)
    files = sorted((folder / STAGING).iterdir())
    first = files[0].stat().st_ino
    harm(files[2])
    bed.drain(job_id)
    assert (folder / "data" / "part-00000.parquet").stat().st_ino == first
    assert_published(bed, job_id)


class Points:
    """Counts the crash points of the test's thread, and ends it at the n-th."""

    def __init__(self, n: int = 0) -> None:
        self.seen: list[CrashPoint] = []
        self._n = n
        self._thread = threading.current_thread()

    def __call__(self, point: CrashPoint) -> None:
        if threading.current_thread() is self._thread:
            self.seen.append(point)
            if len(self.seen) == self._n:
                raise Died


def staging_and_publishing(bed: Shop) -> Iterator[tuple[int, CrashPoint]]:
    """The crash points of a job, from its first RECORD on, that are not those of recording."""
    job_id, points = submit(bed, bed.spec(PLAIN)), Points()
    run_without(bed, job_id, Stage.RECORD)
    with armed(points):
        while not bed.store.get_job(job_id).state.is_final:
            before = len(points.seen)
            stage = bed.do_next(job_id).stage
            found = list(enumerate(points.seen, 1))[before:]
            if stage is Stage.RECORD:
                yield from found[5:]  # its claim, its begin, its commit
            elif stage is Stage.PUBLISH:
                heartbeats = (CrashPoint.SQL_COMMIT, CrashPoint.COMMITTED)
                yield from (one for one in found[3:-2] if one[1] not in heartbeats)
                yield from found[-2:]


def test_a_kill_in_staging_or_publishing_costs_nothing_but_time(bed: Shop) -> None:
    found = list(staging_and_publishing(bed))
    seen = [point for _, point in found]
    assert seen.count(CrashPoint.UPLOAD) == 2 + 8, "of those that are staged, and of all"
    assert seen.count(CrashPoint.MANIFEST) == 1
    for n, point in found:
        job_id, killer = submit(bed, bed.spec(PLAIN)), Points(n)
        run_without(bed, job_id, Stage.RECORD)
        with armed(killer):
            bed.drain(job_id)
        assert killer.seen[n - 1] is point
        assert_published(bed, job_id)


def test_a_job_that_is_stopped_publishes_what_was_staged(bed: Shop) -> None:
    job_id = submit(bed, bed.spec(PAIRS))
    bed.do_next(job_id)
    assert bed.store.claim_group(job_id, 5, Stage.VERIFY, "another", 60.0) is not None
    run_without(bed, job_id, Stage.PUBLISH)
    staged, folder = bed.store.staged_parts(job_id), Path(bed.store.get_job(job_id).output_uri)
    assert len(staged) == 5
    bed.store.request_cancel(job_id)
    bed.drain(job_id)
    assert bed.store.get_job(job_id).state is JobState.CANCELLED
    published = read_manifest(str(folder)).parts
    assert [part.sha256 for part in published[:5]] == [part.sha256 for part in staged]
    assert not (folder / STAGING).exists()


@pytest.mark.parametrize(
    "output",
    [
        {"keep_columns": ("prompt",)},
        {"keep_best": 1},
        {"malformed": MalformedSpec(then="quarantine")},
    ],
)
def test_of_jobs_whose_rows_are_needed_together_nothing_is_staged(
    bed: Shop, output: dict[str, Any]
) -> None:
    _, folder, staged = running(bed, with_output(bed.spec(PAIRS), **output))
    assert staged == []
    assert not (folder / STAGING).exists()


def test_of_a_private_job_nothing_is_staged(bed: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bed.spec(PAIRS)
    private = bed.settings.model_copy(
        update={"tenant_privacy": {spec.tenant: PrivacyMode.REDACTED}, "encryption_key": KEY}
    )
    monkeypatch.setattr(bed, "settings", private)
    bed.hire()
    job_id, folder, staged = running(bed, spec)
    bed.dismiss_hired()
    assert bed.store.get_job(job_id).privacy is PrivacyMode.REDACTED
    assert staged == []
    assert not (folder / STAGING).exists()


def fail(bed: Shop, job_id: str) -> None:
    """End the job before it is published."""
    run_without(bed, job_id, Stage.PUBLISH)
    work = bed.store.claim_job(job_id, Stage.PUBLISH, "w", 60.0)
    assert work is not None
    bed.store.fail_job(work.lease, "no room")


def test_a_purge_deletes_what_was_never_published(bed: Shop) -> None:
    job_id, folder, staged = running(bed)
    fail(bed, job_id)
    assert len(list((folder / STAGING).iterdir())) >= len(staged)
    purger = Purger(bed.store, bed.objects, {})
    for _ in purger.purge(purger.asked_for(job_id)):
        pass
    assert files_below(folder).keys() == {MARKER}


def test_a_retried_job_takes_nothing_of_its_earlier_run(bed: Shop) -> None:
    job_id, folder, _ = running(bed)
    fail(bed, job_id)
    inodes = {path.stat().st_ino for path in (folder / STAGING).iterdir()}
    assert bed.store.retry_job(job_id)
    bed.drain(job_id)
    assert not inodes & {path.stat().st_ino for path in (folder / "data").iterdir()}
    assert_published(bed, job_id)
