"""What is shown of a job: figures, tokens in colour, progress. Pure functions over records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from specbatch.pipeline.observe.terminal.progress import EngineCounts, Meter, progress_view
from specbatch.pipeline.observe.terminal.summary import JobSummary, summary_rows
from specbatch.pipeline.observe.terminal.token_view import legend, token_pieces, token_text
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import (
    JobRow,
    JobState,
    Origin,
    Stage,
)

JOB = JobRow(
    job_id="0123456789abc", name="night", tenant="default", spec={}, spec_digest="",
    state=JobState.DONE, stage=Stage.END, verifier="v", proposer="p", output_uri="out",
    workspace_uri="w", idempotency_key=None, cancel_requested=False, error=None, rows_total=10,
    groups_total=2, prompt_tokens=100, created_at=0.0, started_at=1.0, finished_at=5.0,
)  # fmt: skip
PROGRESS = JobProgress(
    job_id=JOB.job_id, state=JobState.DONE, rows_total=10, rows_done=10, rows_failed=1,
    groups_total=2, groups_done=2, completions=9, prompt_tokens=100, completion_tokens=400,
    proposed=200, accepted=150, verifier_passes=250, queue_sec=2.0, compute_sec=4.0,
    cost_usd=0.02, ingest_done=True,
)  # fmt: skip


def test_the_figures_are_what_they_are_called() -> None:
    summary = JobSummary(JOB, PROGRESS, 1.5, True)
    assert dict(summary_rows(summary))["acceptance rate"] == "75.0%"
    assert summary.tokens_per_pass == pytest.approx(1.6)
    assert summary.tokens_per_sec == pytest.approx(100)
    assert summary.cost_per_1k_usd == pytest.approx(0.05)
    assert dict(summary_rows(summary))["measured speed-up over depth 0"] == "1.50×"


def test_a_sample_of_fast_tokens_is_shown_with_what_differed() -> None:
    report = {"rechecked_tokens": 4096, "differing_tokens": 3, "largest_margin": 0.0125}
    line = "sampled tokens that differ when computed alone"
    shown = dict(summary_rows(JobSummary(replace(JOB, report=report), PROGRESS, 1.5, True)))
    assert shown[line] == "3 of 4,096 (margin at most 0.013)"
    same = {"rechecked_tokens": 64, "differing_tokens": 0, "largest_margin": 0.0}
    shown = dict(summary_rows(JobSummary(replace(JOB, report=same), PROGRESS, 1.5, True)))
    assert shown[line] == "0 of 64"
    assert line not in dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True)))


def test_what_was_done_about_malformed_outputs_is_shown() -> None:
    report = {"malformed_continued": 1200, "malformed_retried": 2, "malformed_mended": 1201}
    line = "outputs without their form"
    shown = dict(summary_rows(JobSummary(replace(JOB, report=report), PROGRESS, 1.5, True)))
    assert shown[line] == "1,200 continued, 2 sampled again, 1,201 have it now"
    apart = replace(JOB, report={"malformed_quarantined": 3})
    assert dict(summary_rows(JobSummary(apart, PROGRESS, 1.5, True)))[line] == "3 in quarantine"
    assert line not in dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True)))


def test_drafts_in_shadow_are_shown_with_what_would_have_been_accepted() -> None:
    report = {"shadow_proposed": 4096, "shadow_accepted": 2499}
    shown = dict(summary_rows(JobSummary(replace(JOB, report=report), PROGRESS, 1.5, True)))
    assert shown["drafts in shadow"] == "61.0% of 4,096 would have been accepted"
    assert "drafts in shadow" not in dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True)))


def test_scores_are_counted_with_those_that_are_missing() -> None:
    line = "outputs scored to choose the best"
    report = {"scored": 1_200.0, "unscored": 0.0}
    shown = dict(summary_rows(JobSummary(replace(JOB, report=report), PROGRESS, 1.5, True)))
    assert shown[line] == "1,200"
    report["unscored"] = 3.0
    shown = dict(summary_rows(JobSummary(replace(JOB, report=report), PROGRESS, 1.5, True)))
    assert shown[line] == "1,200; 3 without a score, the log says why"
    assert line not in dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True)))


def test_what_was_not_measured_is_said_so() -> None:
    job = replace(JOB, report={}, finished_at=None)
    nothing = replace(PROGRESS, proposed=0, accepted=0, verifier_passes=0, completion_tokens=0)
    rows = dict(summary_rows(JobSummary(job, nothing, None, False)))
    assert rows["measured speed-up over depth 0"] == "nothing was drafted"
    assert rows["acceptance rate"] == "nothing was drafted"
    ahead = dict(summary_rows(JobSummary(job, nothing, None, True)))
    assert ahead["measured speed-up over depth 0"] == "not measured"
    assert ahead["acceptance rate"] == "no draft was verified"
    assert rows["verified tokens per verifier pass"] == "-"
    assert rows["device cost per 1k tokens"] == "-"


def test_cost_is_all_that_a_job_cost_or_says_what_it_is_of() -> None:
    of_rows = dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True)))
    assert of_rows["device cost of recorded rows"] == "$0.020000 (`specbatch cost` has the whole)"
    assert of_rows["device cost per 1k tokens"] == "$0.050000"
    assert "cost" not in of_rows
    whole = dict(summary_rows(JobSummary(JOB, PROGRESS, 1.5, True, usd=0.04)))
    assert (whole["cost"], whole["cost per 1k tokens"]) == ("$0.040000", "$0.100000")


def _decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["", "plain", "naïve ☃ 🎉", "🎉"])
def test_pieces_join_into_the_text(text: str) -> None:
    ids = list(text.encode())
    pieces = token_pieces(ids, _decode)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_pieces_join_also_when_the_text_ends_within_a_character() -> None:
    ids = list("ab🎉".encode())[:-1]
    assert "".join(token_pieces(ids, _decode)) == "ab\ufffd"


def test_tokens_have_the_colour_of_their_origin() -> None:
    text = token_text(["a", "b", "c"], [Origin.ACCEPTED, Origin.CORRECTED, Origin.PLAIN], True)
    assert text.plain == "abc"
    assert [str(span.style) for span in text.spans] == ["green", "bold red", "dim"]


def test_without_colour_runs_are_marked() -> None:
    origins = [Origin.ACCEPTED, Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS]
    assert token_text(["a", "b", "[", "d"], origins, False).plain == "«ab»[[]d"
    assert "«drafted and accepted»" in legend(False).plain


class Clock:
    """A time that moves when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_meter_fills_the_gaps_between_commits_with_the_engine() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    begun = replace(
        PROGRESS, state=JobState.RUNNING, rows_done=0, rows_failed=0, groups_done=0,
        completion_tokens=0, proposed=0, accepted=0,
    )  # fmt: skip
    assert meter.read(begun, EngineCounts(is_loaded=False)).phase == "loading the model"
    assert meter.read(begun, EngineCounts(drafted=5)).phase == "drafting"
    clock.now = 2.0
    reading = meter.read(begun, EngineCounts(finished=4, tokens=160, proposed=10, accepted=5))
    assert (reading.phase, reading.done, reading.tokens) == ("verifying", 4, 160)
    assert reading.tokens_per_sec == pytest.approx(80)
    assert reading.acceptance == 0.5
    assert reading.eta_sec == pytest.approx(3.0)
    assert "4/10 prompts" in reading.line
    assert "ETA 0:03" in reading.line


def test_the_time_left_rests_on_rows_that_were_worked_on_alone() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    begun = replace(
        PROGRESS, state=JobState.RUNNING, rows_total=100, rows_done=0, rows_failed=0,
        groups_done=0, completions=0, completion_tokens=0, ingest_done=False,
    )  # fmt: skip
    meter.read(begun)
    clock.now = 2.0  # 50 rows are quarantined while it is read, and 5 are worked on
    read = replace(begun, rows_done=55, rows_failed=50, completions=5, ingest_done=True)
    assert meter.read(replace(read, completion_tokens=500)).eta_sec == pytest.approx(18.0)
    engine = meter.read(replace(read, completion_tokens=500), EngineCounts(10, tokens=1000))
    assert (engine.done, engine.eta_sec) == (60, pytest.approx(40 * 2.0 / 10))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("here", [True, False])
def test_rows_that_failed_with_tokens_took_their_time(samples: int, here: bool) -> None:
    """As outputs without their form do. One row was quarantined without any."""
    clock = Clock()
    meter = Meter(samples, clock=clock)
    begun = replace(
        PROGRESS, state=JobState.RUNNING, rows_total=101, rows_done=1, rows_failed=1,
        groups_done=0, completions=0, completion_tokens=0,
    )  # fmt: skip
    meter.read(begun, EngineCounts() if here else None)
    clock.now = 10.0
    done = replace(begun, rows_done=21, rows_failed=11, completions=20 * samples)
    engine = EngineCounts(20 * samples, tokens=2000) if here else None
    reading = meter.read(replace(done, completion_tokens=2000), engine)
    assert (reading.done, reading.eta_sec) == (21, pytest.approx(40.0))


def test_the_time_left_is_shown_with_its_range() -> None:
    clock = Clock()
    meter = Meter(clock=clock, max_tokens=100)
    begun = replace(
        PROGRESS, state=JobState.RUNNING, rows_total=100, rows_done=0, rows_failed=0,
        groups_done=0, completion_tokens=0,
    )  # fmt: skip
    meter.read(begun)
    clock.now = 10.0  # nothing has ended: each may have as many tokens as the job allows
    shown = meter.read(begun, EngineCounts(tokens=1000))
    assert shown.eta_sec == pytest.approx(90.0)
    assert "ETA 1:30 (1:21 to 1:39)" in shown.line


def test_rows_that_ask_for_more_tokens_than_the_job_are_believed() -> None:
    clock = Clock()
    meter = Meter(clock=clock, max_tokens=10)
    begun = replace(
        PROGRESS, state=JobState.RUNNING, rows_total=100, rows_done=0, rows_failed=0,
        groups_done=0, completion_tokens=0,
    )  # fmt: skip
    meter.read(begun)
    clock.now = 10.0
    recorded = replace(begun, rows_done=10, completion_tokens=1000)
    assert meter.read(recorded).eta_sec == pytest.approx(90.0)


def test_several_samples_make_one_prompt() -> None:
    meter = Meter(samples_per_row=4)
    begun = replace(PROGRESS, state=JobState.RUNNING, rows_done=0, rows_failed=0, groups_done=0)
    assert meter.read(begun, EngineCounts(finished=8)).done == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_off_it(terminal: bool) -> None:
    console = Console(force_terminal=terminal, width=100, record=True, quiet=False, file=None)
    with console.capture() as shown, progress_view(console) as show:
        show(PROGRESS, None)
    assert "10/10 prompts" in shown.get()
