"""The page over jobs that were really done: by a worker in this process, with an engine that writes
its prompts in capitals and a policy that holds some of them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.test_withheld import KEPT_BACK, SPOKEN, Judged
from serve.test_sign_in import MODELS
from serve.visitor import Visitor

from specbatch.jobs.serve.file_store import FileStore
from specbatch.jobs.serve.service import Service
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobState
from support.databases import migrated
from support.html_page import check
from support.planted import masked_logs, tokenizer

LOAD = "specbatch.pipeline.inputs.tokenizer.TextTokenizer.load"


def visited(here: Judged) -> Visitor:
    """The page of its tenant."""
    privacy = Privacy.of_settings(here.settings)
    files = FileStore(here.folder / "serve-dir")
    service = Service(
        *(here.store, here.client, files, MODELS, 0), privacy=privacy, page=here.settings
    )
    found = Visitor(service)
    found.sign_in("clinic")
    return found


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    masked_logs(monkeypatch)
    monkeypatch.setattr(LOAD, tokenizer)
    monkeypatch.setattr(Judged, "ruling", "review")
    return monkeypatch


def site(tmp_path: Path, mode: PrivacyMode, patch: pytest.MonkeyPatch) -> Judged:
    return Judged(tmp_path / "site", migrated(tmp_path / "s.db"), mode, patch)


@pytest.fixture
def judged(tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[Judged]:
    here = site(tmp_path, PrivacyMode.FULL, patch)
    yield here
    here.close()


def test_a_reviewer_reads_and_releases_on_the_page_alone(judged: Judged) -> None:
    job = judged.drain(judged.submit("out").job_id)
    visitor = visited(judged)
    paths = ("/jobs", "/reviews", f"/jobs/{job.job_id}", f"/jobs/{job.job_id}/report")
    for path in paths:
        assert KEPT_BACK not in visitor.get(path).text, path
    report = check(visitor.get(f"/jobs/{job.job_id}/report").text)
    assert SPOKEN in report.text, "what is not held back is there, token by token"
    assert "a" in report.token_classes or "p" in report.token_classes
    assert str(judged.folder) not in report.html
    page = visitor.page(f"/reviews/{job.job_id}")
    assert f"THE {KEPT_BACK} 0" in page.text
    assert "Row 0/1" in page.text
    assert "4 completions wait" in page.text
    form = {"csrf": visitor.token(f"/reviews/{job.job_id}")}
    decided = {"decide-0-0": "released", "decide-0-1": "released", "decide-2-0": "blocked"}
    assert visitor.post(f"/reviews/{job.job_id}", {**form, **decided}).status_code == 303
    assert "2 released, 1 blocked." in visitor.page(f"/reviews/{job.job_id}").text
    assert judged.drain(job.job_id).state is JobState.DONE
    rows = read_output(str(judged.folder / "out")).to_pylist()
    assert f"THE {KEPT_BACK} 0" in rows[0]["text"]
    assert rows[4]["error"] == "blocked by a reviewer"
    for path in paths:
        assert KEPT_BACK not in visitor.get(path).text, path


@pytest.mark.parametrize("mode", [PrivacyMode.HASH_ONLY, PrivacyMode.REDACTED])
def test_of_a_private_job_no_text_is_shown(
    tmp_path: Path, patch: pytest.MonkeyPatch, mode: PrivacyMode
) -> None:
    here = site(tmp_path, mode, patch)
    job = here.drain(here.submit("out").job_id)
    visitor = visited(here)
    paths = ("/jobs", "/reviews", "/tenants", f"/jobs/{job.job_id}", f"/reviews/{job.job_id}")
    for path in (*paths, f"/jobs/{job.job_id}/report"):
        page = visitor.get(path)
        assert page.status_code == 200
        assert KEPT_BACK not in page.text
        assert "unspeakable" not in page.text
        assert SPOKEN not in page.text or mode is PrivacyMode.REDACTED
    here.close()
