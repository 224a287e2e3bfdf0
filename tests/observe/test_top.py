"""The board of `specbatch top`: figures of a moment come from two looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from specbatch.pipeline.observe.terminal.top import Board, Watch, as_json, tables
from specbatch.schemas.backlog import Backlog, StageBacklog, WorkerNow
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.provenance import TICKS_PER_SEC
from specbatch.schemas.records import CLAIMABLE, JobRow, JobState, Stage
from specbatch.schemas.timekeeping import Device

WORKER = WorkerNow(
    "s1", "night-1:77", Device("h200", "eu", "spot", 2_000_000), 60.0, 1.0,
    seen=50 * TICKS_PER_SEC, idle=20 * TICKS_PER_SEC, overhead=5 * TICKS_PER_SEC, leases=3,
)  # fmt: skip
JOB = JobRow(
    job_id="job00000000000001", name="nightly", tenant="default", spec={}, spec_digest="d",
    state=JobState.RUNNING, stage=Stage.RUN, verifier="big", proposer=None, output_uri="out",
    workspace_uri="work", idempotency_key=None, cancel_requested=False, error=None,
    rows_total=100, groups_total=10, prompt_tokens=0, created_at=900.0, started_at=960.0,
    finished_at=None,
)  # fmt: skip
PROGRESS = JobProgress(
    job_id=JOB.job_id, state=JobState.RUNNING, rows_total=100, rows_done=40, rows_failed=1,
    groups_total=10, groups_done=4, completions=39, prompt_tokens=400, completion_tokens=4000,
    proposed=1000, accepted=600, verifier_passes=3000, queue_sec=1.0, compute_sec=1.0,
    cost_usd=0.5, ingest_done=True,
)  # fmt: skip


def backlog(at: float = 1000.0, workers: tuple[WorkerNow, ...] = (WORKER,)) -> Backlog:
    stages = {Stage.VERIFY: StageBacklog(Stage.VERIFY, 5, 2, 1, 33.0)}
    return Backlog(
        at,
        tuple(stages.get(stage, StageBacklog(stage)) for stage in CLAIMABLE),
        {JobState.QUEUED: 2, JobState.RUNNING: 1},
        1,
        workers,
    )


def shown(board: Board, width: int = 140) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(tables(board))
    return captured.get().replace("\u00a0", " ")


def test_what_a_worker_found_when_it_tried_its_engine_is_shown() -> None:
    serves = replace(Serves.of("big", {}), probe="vLLM 0.32.0: speculation is off: drafts of 1")
    worker = replace(WORKER, serves=Serves.from_json(serves.as_json()))
    board = Watch().board(backlog(workers=(worker,)), [])
    assert "worker night-1:77: vLLM 0.32.0: speculation is off" in shown(board)
    assert as_json(board)["workers"][0]["probe"] == serves.probe


def test_one_sample_shows_means_since_the_start() -> None:
    board = Watch().board(backlog(), [(JOB, PROGRESS)], left_out=2)
    assert board.busy == (0.5,)
    (job,) = board.jobs
    assert job.tokens_per_sec == 100  # in 40 seconds
    assert job.eta_sec == pytest.approx(40 * 60 / 39)
    text = shown(board)
    for said in (
        "1 device · 1 job running, 2 queued · 1 row failed",
        "night-1:77", "50 %", "1.0 s ago",
        "nightly", "40/100", "60 %", "61.5 s", "█████░░░░░░░", "and 2 more", "33.0 s",
    ):  # fmt: skip
        assert said in text, said


def test_ids_are_as_long_as_tells_them_apart() -> None:
    jobs = [(replace(JOB, job_id=f"1a21391077068c{end}"), PROGRESS) for end in ("01", "02", "11")]
    text = shown(Watch().board(backlog(), jobs))
    assert all(job.job_id in text for job, _ in jobs)
    text = shown(Watch().board(backlog(), jobs[1:]))
    assert "1a21391077068c0 " in text
    assert "1a21391077068c02" not in text
    assert "1a2139107706 " in shown(Watch().board(backlog(), jobs[:1]))


def test_two_samples_show_what_grew_between_them() -> None:
    watch = Watch()
    watch.board(backlog(), [(JOB, PROGRESS)])
    idle = replace(WORKER, seen=60 * TICKS_PER_SEC, idle=29 * TICKS_PER_SEC)
    more = replace(PROGRESS, rows_done=50, completion_tokens=5000, completions=50)
    board = watch.board(backlog(1002.0, (idle,)), [(JOB, more)])
    assert board.busy == (0.1,)
    assert board.jobs[0].tokens_per_sec == 500
    unheard = watch.board(backlog(1003.0, (replace(idle, silent_sec=90.0),)), [])
    assert unheard.busy == (0.1,)  # nothing new is known of it
    assert "90.0 s ago" in shown(unheard)


def test_a_job_of_which_nothing_is_done_has_no_end_in_sight() -> None:
    refused = replace(PROGRESS, rows_done=4, rows_failed=4, completions=0, completion_tokens=0)
    (job,) = Watch().board(backlog(workers=()), [(JOB, refused)]).jobs
    assert job.eta_sec is None
    assert "has not reported its device yet" in shown(Watch().board(backlog(workers=()), []))


def test_rows_that_failed_with_tokens_count_in_the_time_left() -> None:
    """A row was quarantined without any; half of the others have no good output of their two."""
    job = replace(JOB, spec={"sampling": {"n": 2}})
    failed = replace(PROGRESS, rows_done=41, rows_failed=21, rows_total=101, completions=80)
    (now,) = Watch().board(backlog(workers=()), [(job, failed)]).jobs
    assert now.eta_sec == 60.0, "40 rows took 40 s"


def test_an_empty_store_says_what_to_start() -> None:
    backlog = Backlog(1.0, (), {JobState.QUEUED: 0, JobState.RUNNING: 0}, 0, ())
    text = shown(Watch().board(backlog, []))
    assert "start `specbatch worker`" in text
    assert "no job is running or queued" in text


def test_programs_get_the_same_figures() -> None:
    told = as_json(Watch().board(backlog(), [(JOB, PROGRESS)]))
    assert told["jobs"][0]["rows_done"] == 40
    assert told["jobs_by_state"] == {"queued": 2, "running": 1}
    (worker,) = told["workers"]
    assert (worker["owner"], worker["busy_share"], worker["leases"]) == ("night-1:77", 0.5, 3)
    verify = next(stage for stage in told["stages"] if stage["stage"] == "verify")
    assert (verify["ready"], verify["leased"], verify["expired"]) == (5, 2, 1)
