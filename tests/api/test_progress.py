"""Progress in a notebook, in a terminal, and nowhere."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from specbatch.jobs.api.progress import in_notebook, view_of
from specbatch.jobs.api.report import Report
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.records import JobState


def counts(done: int, state: JobState = JobState.RUNNING) -> JobProgress:
    return JobProgress(
        job_id="j", state=state, rows_total=8, rows_done=done, rows_failed=0, groups_total=4,
        groups_done=done // 2, completions=done, prompt_tokens=0, completion_tokens=10 * done,
        proposed=0, accepted=0, verifier_passes=0, queue_sec=0.0, compute_sec=0.0, cost_usd=0.0,
        ingest_done=True,
    )  # fmt: skip


class Notebook:
    """IPython as a notebook's kernel has it: what was displayed, and how often it changed."""

    def __init__(self, patch: pytest.MonkeyPatch, *, kernel: object) -> None:
        self.shown: list[str] = []
        self.displays = 0
        whole, inner = ModuleType("IPython"), ModuleType("IPython.display")
        shell = type("Shell", (), {} if kernel is None else {"kernel": kernel})()
        whole.get_ipython = lambda: shell  # type: ignore[attr-defined]  # a stand-in
        inner.HTML, inner.display = str, self.display  # type: ignore[attr-defined]  # the same
        patch.setitem(sys.modules, "IPython", whole)
        patch.setitem(sys.modules, "IPython.display", inner)

    def display(self, html: str, *, display_id: bool) -> Any:
        assert display_id
        self.displays += 1
        self.update(html)
        return self

    def update(self, html: str) -> None:
        self.shown.append(html)


def test_a_notebook_has_one_bar_that_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    assert in_notebook()
    with view_of(True, 1) as show:
        for done in (0, 4, 4, 8):
            show(counts(done), None)
    bars = [re.findall(r'value="(\d+)" max="(\d+)"', html) for html in notebook.shown]
    assert bars[0] == [("0", "8")]
    assert bars[-1] == [("8", "8")]
    assert notebook.displays == 1
    assert "8/8 prompts" in notebook.shown[-1]
    assert capsys.readouterr() == ("", "")


def test_ipython_in_a_terminal_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch, kernel=None)
    assert not in_notebook()
    with view_of(True, 1) as show:
        show(counts(8, JobState.DONE), None)
    assert notebook.shown == []
    captured = capsys.readouterr()
    assert "8/8 prompts" in captured.err
    assert captured.out == ""


def test_progress_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with view_of(False, 1) as show:
        show(counts(8, JobState.DONE), None)
    assert capsys.readouterr() == ("", "")


def test_a_report_is_a_page_of_its_own_in_a_notebook(tmp_path: Any) -> None:
    report = Report("<j>", '<html><body class="x">"quoted" & more</body></html>')
    shown = report._repr_html_()
    assert shown.count("<iframe") == shown.count("</iframe>") == 1
    assert "<body" not in shown
    assert "&lt;body class=&quot;x&quot;&gt;" in shown
    assert "report of job &lt;j&gt;" in shown
    assert report.save(tmp_path / "r.html").read_text() == report.html
    assert "quoted" not in repr(report)
