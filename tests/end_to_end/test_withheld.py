"""What a policy keeps back is nowhere: in no table, log, report, command, export or output, in no
drafts of later jobs and in no training set. It lies where the worker has left its results."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from end_to_end.test_private_data import everything, exported, said_by

from specbatch.jobs.chaos import stand_in
from specbatch.jobs.chaos.stand_in import StandInEngine
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.operations.tools import held_completions, make_auditor
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.exports import ExportKind
from specbatch.schemas.policies import Decided
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.spec import JobSpec, load_spec
from support.databases import migrated
from support.planted import Echo, Site, masked_logs, tokenizer

FULL, REDACTED, HASH_ONLY = PrivacyMode.FULL, PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY
KEPT_BACK = "UNSPEAKABLE"  # the model writes its prompt in capitals
SPOKEN = "HARBOUR"


class Capitals(Echo):
    def __init__(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().__init__(request, *args, **kwargs)
        self._tokens = tuple(t - 32 if ord("a") <= t <= ord("z") else t for t in self._tokens)


class Judged(Site):
    """With a policy for its outputs."""

    ruling = "block"
    ahead = True  # drafts are written beforehand

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patch.setattr(stand_in, "HashedTokens", Capitals)

    def spec(self, output: str, breaks: bool = True) -> JobSpec:
        path = self.folder / "in.jsonl"
        words = ("unspeakable", "harbour", "more unspeakable")
        rows = [{"id": f"r{i}", "prompt": f"the {word} {i}"} for i, word in enumerate(words)]
        path.write_text("\n".join(map(json.dumps, rows)))
        own = {"use": "patterns", "patterns": {"word": "UN[S]PEAKABLE"}, "verdict": self.ruling}
        plain = super().spec(output, breaks).model_dump(mode="json")
        changed: Mapping[str, Any] = {
            "name": "letters",
            "input": {"uri": str(path)},
            "sampling": {"max_tokens": 64, "n": 2, "logprobs": True, "top_logprobs": 2},
            "policies": [own],
            "speculation": {"pregenerate": self.ahead, "pregenerate_tokens": 64},
        }
        return load_spec({**plain, **changed})


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    masked_logs(monkeypatch)
    return monkeypatch


def site(tmp_path: Path, mode: PrivacyMode, ruling: str, patch: pytest.MonkeyPatch) -> Judged:
    Judged.ruling = ruling
    return Judged(tmp_path / "site", migrated(tmp_path / "s.db"), mode, patch)


def two_nights(site: Judged) -> JobRow:
    first = site.drain(site.submit("out").job_id)
    assert first.state is JobState.DONE
    again = site.drain(site.submit("again").job_id)
    assert again.state is JobState.DONE
    return first


REPEATED = [(REDACTED, "block"), (HASH_ONLY, "review"), (HASH_ONLY, "redact")]


@pytest.mark.parametrize(
    ("mode", "ruling"),
    [
        *((FULL, "block"), (FULL, "review"), (FULL, "redact")),
        *((REDACTED, "review"), (REDACTED, "redact"), (HASH_ONLY, "block")),
        *(pytest.param(*both, marks=pytest.mark.long) for both in REPEATED),
    ],
)
def test_what_is_kept_back_is_nowhere(
    mode: PrivacyMode,
    ruling: str,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    capsys: Any,
    caplog: Any,
) -> None:
    caplog.set_level(logging.DEBUG)
    here = site(tmp_path, mode, ruling, patch)
    first = two_nights(here)
    pending = here.store.reviews(first.job_id).pending
    assert bool(pending) is (ruling == "review" and mode is FULL), "others have nothing to review"
    for kind in ExportKind:
        said = exported(here, first.job_id, kind)
        assert KEPT_BACK not in said
        if mode is FULL and kind in (ExportKind.COMPLETIONS, ExportKind.CORRECTIONS):
            assert SPOKEN in said
    for output in ("out", "again"):
        for path in (here.folder / output).rglob("*"):
            assert not path.is_file() or KEPT_BACK.encode() not in path.read_bytes()
        rows = read_output(str(here.folder / output)).to_pylist()
        if ruling == "review" and mode is not FULL:
            reasons = [row["finish_reason"] for row in rows[::2]]
            assert reasons == ["blocked", "stop", "blocked"]
        assert KEPT_BACK not in str(rows)
        assert SPOKEN in str(rows)
        letters = [chr(t) for row in rows for t in row["token_ids"] or () if 0 <= t < 256]
        assert KEPT_BACK not in "".join(letters)
    left = everything(here, patch, capsys, caplog)
    for words in ("results", "--json"):
        left[words] = said_by(patch, capsys, "results", first.job_id, "--json")
    assert not [w for w, said in left.items() if KEPT_BACK in said and not w.startswith("file ")]
    if mode is FULL:
        assert SPOKEN in left["completions.text"]


def test_a_reviewer_reads_the_text_and_once_released_it_is_in_the_output_alone(
    tmp_path: Path, patch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    here = site(tmp_path, FULL, "review", patch)
    first = two_nights(here)
    reviews = here.store.reviews(first.job_id)
    with patch.context() as read:
        read.setattr("specbatch.pipeline.inputs.tokenizer.TextTokenizer.load", tokenizer)
        found = held_completions(here.settings, here.store, first, reviews)
    assert all(KEPT_BACK in record.text for record in found.values())
    assert len(found) == 4, "two rows of two samples"
    here.client.review(first.job_id, dict.fromkeys(reviews.pending, Decided.RELEASED))
    assert here.drain(first.job_id).state is JobState.DONE
    rows = read_output(str(here.folder / "out")).to_pylist()
    assert KEPT_BACK in rows[0]["text"]
    assert bytes(rows[0]["token_ids"][:-1]).decode() == rows[0]["text"]
    left = everything(here, patch, capsys, caplog)
    assert not [w for w, said in left.items() if KEPT_BACK in said and not w.startswith("file ")]


@pytest.mark.parametrize("mode", list(PrivacyMode))
def test_what_a_stopped_job_keeps_is_judged_too(
    mode: PrivacyMode, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    here = site(tmp_path, mode, "review", patch)
    here.ahead = False
    job_id = here.submit("out").job_id
    stop_behind(here, job_id, 4)
    assert here.drain(job_id).state is JobState.CANCELLED
    rows = read_output(str(here.folder / "out")).to_pylist()
    held = "review" if mode is FULL else "blocked"
    assert [row["finish_reason"] for row in rows[::2]] == [held, "stop", "cancelled"]
    assert KEPT_BACK not in str(rows)
    if mode is FULL:
        pending = here.store.reviews(job_id).pending
        assert pending == [(0, 0), (0, 1)]
        here.client.review(job_id, dict.fromkeys(pending, Decided.RELEASED))
        assert here.drain(job_id).state is JobState.CANCELLED
        rows = read_output(str(here.folder / "out")).to_pylist()
        assert all(KEPT_BACK in row["text"] for row in rows[:2])
        assert not make_auditor(here.settings, here.store).chain(job_id).findings
    here.close()


def stop_behind(here: Judged, job_id: str, completions: int) -> None:
    """Cancel the job once the verifier has finished so many."""
    do_step, finished = StandInEngine.step, list[Any]()

    def cancelling(engine: StandInEngine) -> Any:
        done = do_step(engine)
        before = len(finished)
        finished.extend(c for c in done if c.request_id.startswith(job_id))
        if before < completions <= len(finished):
            here.client.cancel(job_id, "cancelled by a test")
            here.worker.lease_keeper.check_cancelled()
        return done

    here.patch.setattr(StandInEngine, "step", cancelling)
