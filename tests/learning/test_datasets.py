"""A data set is what the verifier wrote to kept prompts, of one tenant, and of nobody private."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger.builders import JOB, Clock

from specbatch.pipeline.learning import datasets
from specbatch.pipeline.learning.datasets import DataSet, DataSets, Example, Wanted
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EntryKind
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import FinishReason
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.speculation import VOCABULARY
from specbatch.schemas.training import DataOrder
from support.databases import migrated, sqlite_store
from support.exported import ExportedJob, exported_job
from support.planted import PLAIN, PLANTED, Site, masked_logs

MEANING = "of-these-tokens"
WANTED = Wanted(MEANING, vocab_size=1 << 20, context_tokens=4096)
ORDER = DataOrder(held_out=0.3)


def made_job(folder: Path, **job: Any) -> ExportedJob:
    report = {VOCABULARY: job.pop("vocabulary", MEANING)}
    return exported_job(sqlite_store(), folder / "work", report=report, **job)


def data_of(made: ExportedJob, order: DataOrder = ORDER, wanted: Wanted = WANTED) -> DataSet:
    return DataSets(made.store, Objects(), {}).make(order, wanted, "there")


def all_of(data: DataSet) -> list[Example]:
    return [*data.train, *data.choosing, *data.judging]


def refusal(made: ExportedJob, **more: Any) -> str:
    with pytest.raises(UsageError) as refused:
        DataSets(made.store, Objects(), more.pop("retention", {})).make(
            more.pop("order", ORDER), more.pop("wanted", WANTED), "there"
        )
    return str(refused.value)


def test_an_example_is_a_prompt_and_what_the_verifier_wrote(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    good = [r for r in made.completions if r.finish_reason in ("stop", "length") and r.token_ids]
    found = {tuple(one.ids.tolist()): one for one in all_of(data_of(made))}
    for record in good:
        prompt = made.prompts[record.row_index].prompt_ids
        one = found[(*prompt, *record.token_ids)]
        assert one.prompt_tokens == len(prompt)
        if record.top_logprobs:
            assert one.top_ids is not None
            assert one.top_ids.tolist() == [list(ids) for ids, _ in record.top_logprobs]
    whole = {(*made.prompts[r.row_index].prompt_ids, *r.token_ids) for r in good}
    assert set(found) == whole


@pytest.mark.parametrize(
    ("change", "prompt", "reason"),
    [
        ({}, (1, 2), None),
        ({"finish_reason": FinishReason.ERROR}, (1, 2), datasets.ENDED_BADLY),
        ({"finish_reason": FinishReason.CANCELLED}, (1, 2), datasets.ENDED_BADLY),
        ({"error": "it broke"}, (1, 2), datasets.ENDED_BADLY),
        ({"token_ids": ()}, (1, 2), datasets.TOKENS_GONE),
        ({"token_ids": (5, NOT_KEPT)}, (1, 2), datasets.TOKENS_GONE),
        ({}, None, datasets.PROMPT_GONE),
        ({}, (1, NOT_KEPT), datasets.PROMPT_GONE),
        ({"model_fingerprint": "another"}, (1, 2), datasets.OTHER_MODEL),
    ],
)
def test_outputs_that_nothing_can_be_learned_from(
    tmp_path: Path, change: dict[str, Any], prompt: tuple[int, ...] | None, reason: str | None
) -> None:
    made = made_job(tmp_path)
    record = replace(made.completions[0], **change)
    job = made.store.get_job(JOB)
    assert datasets._reason_to_omit(record, prompt, job, WANTED) == reason


def test_prompts_whose_files_are_gone_are_counted(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    Objects().delete(made.files[1].uri)
    data = data_of(made)
    assert data.left_out[datasets.PROMPT_GONE] == 12
    assert sum(data.left_out.values()) + len(all_of(data)) == len(made.completions)


def test_equal_stores_give_equal_data_in_one_order(tmp_path: Path) -> None:
    data = [data_of(made_job(tmp_path / name)) for name in ("one", "other")]
    assert data[0].digest == data[1].digest
    for part in (data[0].train, data[0].choosing, data[0].judging):
        digests = [one.digest for one in part]
        assert digests == sorted(digests)


def test_a_prompt_is_on_one_side_whatever_is_held_out_elsewhere(tmp_path: Path) -> None:
    """So more of them held out are the same ones and more."""
    made = made_job(tmp_path)
    held: list[set[bytes]] = []
    for share in (0.1, 0.5, 0.9):
        data = data_of(made, replace(ORDER, held_out=share))
        learned = {one.prompt_digest for one in data.train}
        held.append({one.prompt_digest for one in (*data.choosing, *data.judging)})
        assert not learned & held[-1]
    assert held[0] <= held[1] <= held[2]


def test_a_context_that_is_too_short_cuts_or_leaves_out(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    data = data_of(made, wanted=replace(WANTED, context_tokens=4))
    assert max(len(one.ids) for one in all_of(data)) <= 4
    assert data.left_out[datasets.TOO_LONG]


def test_tokens_that_the_proposer_lacks_are_left_out(tmp_path: Path) -> None:
    data = data_of(made_job(tmp_path), wanted=replace(WANTED, vocab_size=200))
    assert all(one.ids.max() < 200 for one in all_of(data))
    assert data.left_out[datasets.FOREIGN]


def test_a_job_s_log_says_that_a_model_learned_from_it(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    data_of(made)
    *_, entry = made.store.log(JOB)
    assert entry.kind == EntryKind.EXPORTED
    assert json.loads(entry.payload) == {"what": "training", "to": "there"}


# --- which jobs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY])
def test_a_job_whose_texts_are_not_kept_gives_nothing(tmp_path: Path, mode: PrivacyMode) -> None:
    assert f"is kept {mode}" in refusal(made_job(tmp_path, privacy=mode))


def test_another_tenant_s_job_gives_nothing(tmp_path: Path) -> None:
    said = refusal(made_job(tmp_path, tenant="somebody"))
    assert (
        said == "nothing to learn from for tenant 'default': 0 of its jobs ended, none in this time"
    )


def test_a_purged_job_gives_nothing_from_the_moment_that_it_is_marked(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    rows = made.store.purge(JOB, "asked for", unfinished=True)
    next(rows)  # marked; no row is emptied yet
    assert "was purged" in refusal(made)


def test_a_job_past_its_tenant_s_retention_gives_nothing(tmp_path: Path) -> None:
    clock = Clock()
    made = exported_job(sqlite_store(clock), tmp_path / "work", report={VOCABULARY: MEANING})
    clock.advance(3 * DAY_SEC)
    assert "is past its tenant's retention" in refusal(made, retention={"default": 2.0})
    DataSets(made.store, Objects(), {"default": 4.0}).make(ORDER, WANTED, "there")


def test_a_job_of_other_tokens_is_refused_by_name(tmp_path: Path) -> None:
    said = refusal(made_job(tmp_path, vocabulary="other"), order=replace(ORDER, jobs=("nightly",)))
    assert f"job {JOB} (nightly) has a verifier with other tokens than the proposer" in said


def test_a_job_that_runs_gives_nothing(tmp_path: Path) -> None:
    made = exported_job(sqlite_store(), tmp_path / "work", False, report={VOCABULARY: MEANING})
    assert "nothing to learn from" in refusal(made)


@pytest.mark.parametrize("change", [{"jobs": ("other",)}, {"since": 1e12}, {"until": 1.0}])
def test_only_jobs_of_the_name_and_the_window_count(tmp_path: Path, change: dict[str, Any]) -> None:
    assert "nothing to learn from" in refusal(made_job(tmp_path), order=replace(ORDER, **change))


@pytest.mark.parametrize("most", [1, 40, 100])
def test_no_more_tokens_are_taken_than_were_asked_for_of_one_job_either(
    tmp_path: Path, most: int
) -> None:
    made = made_job(tmp_path)
    data = data_of(made, replace(ORDER, most_tokens=most))
    sizes = [one.completion_tokens for one in all_of(data)]
    assert most <= sum(sizes) < most + max(sizes)
    assert data.left_out[datasets.TOO_MANY] > 0
    assert sum(data.left_out.values()) + len(sizes) == len(made.completions)


def test_only_what_the_verifier_that_was_asked_for_wrote_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_job(tmp_path)
    before, verifier = data_of(made), made.completions[0].model_fingerprint or "v1"
    old = replace(made.store.get_job(JOB), model_fingerprint=verifier)
    newest = replace(old, job_id="newest", model_fingerprint="another")
    pages = {None: [old, newest]}
    monkeypatch.setattr(
        made.store, "ended_jobs", lambda *_, after=None: pages.get(after and after.job_id, [])
    )
    found = data_of(made, replace(ORDER, verifier=verifier))
    assert (found.verifier, found.digest) == (verifier, before.digest)
    assert found.skipped == ("job newest (nightly) has another verifier (another)",)
    assert "has another verifier" in refusal(made, order=replace(ORDER, verifier="a third"))


def test_the_audit_log_says_what_the_outputs_were_for(tmp_path: Path) -> None:
    made = made_job(tmp_path)
    DataSets(made.store, Objects(), {}).make(ORDER, WANTED, "verifier v", what="trial")
    entry = list(made.store.log(JOB))[-1]
    assert json.loads(entry.payload) == {"what": "trial", "to": "verifier v"}


# --- planted personal data ----------------------------------------------------------------------


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (PrivacyMode.FULL, set(PLANTED)),
        (PrivacyMode.REDACTED, set()),
        (PrivacyMode.HASH_ONLY, set()),
    ],
)
def test_planted_personal_data_of_private_jobs_is_in_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: PrivacyMode, found: set[str]
) -> None:
    """The tenant was private when the first job ran, and no more when the second one does. So only
    what a job has pinned keeps its texts out."""
    masked_logs(monkeypatch)
    url = migrated(tmp_path / "store.db")
    site = Site(tmp_path, url, mode, monkeypatch)
    site.drain(site.submit("first", breaks=False).job_id)
    site.close()
    site = Site(tmp_path, url, PrivacyMode.FULL, monkeypatch)
    job, _ = site.client.submit(plain(site, tmp_path / "plain.jsonl"))
    site.drain(job.job_id)
    wanted = Wanted(site.store.get_job(job.job_id).report[VOCABULARY], 1 << 20, 4096)
    sets = DataSets(site.store, Objects.of_settings(site.settings), {})
    data = sets.make(DataOrder(tenant="clinic"), wanted, "there")
    site.close()
    assert all_of(data)
    assert said_by(all_of(data)) == found
    assert any(f"is kept {mode}" in text for text in data.skipped) != mode.is_full


def plain(site: Site, path: Path) -> JobSpec:
    """A job without personal data in its prompts."""
    path.write_text(json.dumps({"id": "one", "prompt": PLAIN}))
    spec = site.spec("plain")
    return spec.model_copy(
        update={"input": spec.input.model_copy(update={"uri": str(path)}), "name": "plain"}
    )


def said_by(examples: Sequence[Example]) -> set[str]:
    """Which planted data are in these; the stand-in's tokens are bytes."""
    texts = [bytes(one.ids[one.ids < 256].astype(np.uint8)) for one in examples]
    return {kind for kind, value in PLANTED.items() if any(value.encode() in t for t in texts)}
