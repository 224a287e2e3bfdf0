"""What the stages know of drafts: past outputs of the same tenant, priors, and caps by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import (
    JOB,
    LEASE_SEC,
    NO_TIME,
    RESULTS,
    Clock,
    completion,
    new_group,
    new_job,
    position,
)

from specbatch.pipeline.engines.proposers.history import History
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.stages.drafting import Drafting, uses_history
from specbatch.pipeline.stages.requests import cap_of
from specbatch.pipeline.storage.artefacts import DraftBlock
from specbatch.pipeline.storage.history_files import HISTORY
from specbatch.pipeline.storage.objects import Objects, local_path
from specbatch.schemas.errors import StoreError
from specbatch.schemas.records import JobRow, Lease, PromptRow, Stage
from specbatch.schemas.spec import JobSpec, SamplingSpec
from specbatch.schemas.speculation import (
    VOCABULARY,
    AcceptanceCount,
    Decision,
    DecisionAction,
)
from support.databases import new_database

TONIGHT = "jobtonight"
BLOCKS = (DraftBlock(0, 0, (1, 2)),)  # by nobody known
COUNTS = (AcceptanceCount("block", None, 30.0, 40.0), AcceptanceCount("ngram:2", "x", 1.0, 4.0))
DECISION = Decision(5.0, DecisionAction.OFF, "*", "dear")


class Counting(SqlStore):
    """Counts its reads of priors; refuses what is in `away`."""

    def __init__(self) -> None:
        super().__init__(new_database(), clock=Clock())
        self.priors_read = 0
        self.away: set[str] = set()

    def acceptance(self, tenant: str, job_name: str) -> list[AcceptanceCount]:
        self.priors_read += 1
        self._check("acceptance")
        return super().acceptance(tenant, job_name)

    def past_outputs(self, *args: Any, **kwargs: Any) -> Any:
        self._check("past_outputs")
        return super().past_outputs(*args, **kwargs)

    def learn_acceptance(self, *args: Any) -> None:
        self._check("learn_acceptance")
        super().learn_acceptance(*args)

    def note_decisions(self, *args: Any) -> None:
        self._check("note_decisions")
        super().note_decisions(*args)

    def _check(self, method: str) -> None:
        if method in self.away:
            raise StoreError(f"{method}: the database is away")


def past_job(store: SqlStore, job_id: str, tokens: tuple[int, ...], **job: Any) -> None:
    """A job whose row 0 wrote `tokens`, in the token ids of vocabulary `v1`."""
    vocabulary, usd = job.pop("vocabulary", "v1"), job.pop("usd", 0.25)
    store.create_job(new_job(job_id, **job))
    work = store.claim_job(job_id, Stage.INGEST, "i", LEASE_SEC)
    assert work is not None
    store.add_groups(work.lease, [new_group(0)], [], 4, position())
    store.finish_ingest(work.lease, 4, {VOCABULARY: vocabulary})
    lease = _lease(store, job_id, Stage.VERIFY)
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME)
    written = completion(0, token_ids=tokens, cost_usd=usd)
    store.commit_group(_lease(store, job_id, Stage.RECORD), [written], NO_TIME, {})


def _lease(store: SqlStore, job_id: str, stage: Stage) -> Lease:
    work = store.claim_group(job_id, 0, stage, "w", LEASE_SEC)
    assert work is not None
    return work.lease


def spec_of(**speculation: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "nightly",
            "input": {"uri": "in.jsonl"},
            "output": {"uri": "out"},
            "verifier": "big",
            "proposer": "small",
            "speculation": speculation,
        }
    )


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def prepared(store: Counting, tmp_path: Path) -> Callable[..., JobRow]:
    """Tonight's job as it is after `prepare`."""

    def prepare(tenant: str = "default", **speculation: Any) -> JobRow:
        workspace = f"file://{tmp_path}/work"
        store.create_job(new_job(TONIGHT, tenant=tenant, workspace_uri=workspace))
        work = store.claim_job(TONIGHT, Stage.INGEST, "i", LEASE_SEC)
        assert work is not None
        spec = spec_of(**speculation).model_copy(update={"tenant": tenant})
        Drafting(store, Objects()).prepare(work.lease, store.get_job(TONIGHT), spec, "v1")
        return store.get_job(TONIGHT)

    return prepare


def history_of(store: Counting, job: JobRow) -> History:
    history = Drafting(store, Objects()).history(job)
    assert history is not None
    return history


# --- history ------------------------------------------------------------------------------------


def test_a_jobs_history_is_what_its_tenants_jobs_gave(
    store: Counting, prepared: Callable[..., JobRow]
) -> None:
    past_job(store, "ours", (1, 2, 3), name="weekly")
    past_job(store, "theirs", (7, 8, 9), tenant="other")
    past_job(store, "ids", (4, 5, 6), vocabulary="v2")
    job = prepared()
    assert job.report[VOCABULARY] == "v1"
    history = history_of(store, job)
    assert history.past("row-0", 0) == (1, 2, 3)
    assert len(history) == 1
    assert history.index.find([7]) is history.index.find([4]) is None


def test_the_same_name_comes_before_newer_jobs_of_another(
    store: Counting, prepared: Callable[..., JobRow]
) -> None:
    past_job(store, "a", (1, 2, 3))
    past_job(store, "b", (4, 5, 6), name="weekly")
    assert history_of(store, prepared()).past("row-0", 0) == (1, 2, 3)


@pytest.mark.parametrize(
    "speculation",
    [
        {"depth": "off"},
        {"depth": 0},
        {"sources": ["ngram"]},
        {"verification": "rejection"},
        {"history_tokens": 0},
        {"history_tokens": 2},  # the only past output is longer
    ],
)
def test_who_does_not_draft_from_history_has_none(
    store: Counting, prepared: Callable[..., JobRow], speculation: dict[str, Any]
) -> None:
    past_job(store, "ours", (1, 2, 3))
    job = prepared(**speculation)
    assert job.report[VOCABULARY] == "v1", "others may draft from this one"
    assert HISTORY not in job.report
    assert Drafting(store, Objects()).history(job) is None
    assert uses_history(spec_of(**speculation)) is (speculation == {"history_tokens": 2})


def test_a_first_night_has_no_history(store: Counting, prepared: Callable[..., JobRow]) -> None:
    assert Drafting(store, Objects()).history(prepared()) is None


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "empty"])
def test_a_damaged_history_is_gone_on_without(
    store: Counting,
    prepared: Callable[..., JobRow],
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    past_job(store, "ours", (1, 2, 3))
    job = prepared()
    path = local_path(job.report[HISTORY]["uri"])
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        damaged = {"cut": whole[:-1], "flipped": whole[:-1] + b"\xff", "empty": b""}[damage]
        path.write_bytes(damaged)
    drafting = Drafting(store, Objects())
    caplog.clear()  # preparing told something too, where others have turned logging up
    with caplog.at_level(logging.WARNING):
        assert drafting.history(job) is None
        assert drafting.history(job) is None
    assert len(caplog.records) == 1, "said once"
    assert f"job {TONIGHT} continues without its history" in caplog.text


def test_a_history_is_loaded_once(store: Counting, prepared: Callable[..., JobRow]) -> None:
    past_job(store, "ours", (1, 2, 3))
    job, drafting = prepared(), Drafting(store, Objects())
    first = drafting.history(job)
    local_path(job.report[HISTORY]["uri"]).unlink()
    assert drafting.history(job) is first is not None


def test_a_store_without_past_outputs_lets_the_job_begin(
    store: Counting, prepared: Callable[..., JobRow]
) -> None:
    past_job(store, "ours", (1, 2, 3))
    store.away.add("past_outputs")
    job = prepared()
    assert job.report[VOCABULARY] == "v1"
    assert HISTORY not in job.report


# --- priors and lessons -------------------------------------------------------------------------


def _job(store: SqlStore, job_id: str = JOB, **values: Any) -> JobRow:
    store.create_job(new_job(job_id, **values))
    return store.get_job(job_id)


def test_lessons_are_the_next_nights_priors_and_the_jobs_decisions(store: Counting) -> None:
    job = _job(store)
    Drafting(store, Objects()).learn(job, Lessons(COUNTS, (DECISION,)))
    assert store.decisions(JOB) == [DECISION]
    tomorrow, other, stranger = (
        _job(store, "jobtomorrow"),
        _job(store, "jobother", name="weekly"),
        _job(store, "jobstranger", tenant="other"),
    )
    drafting = Drafting(store, Objects())
    assert drafting.priors(tomorrow, BLOCKS) == list(COUNTS)
    assert drafting.priors(other, BLOCKS) == []
    assert drafting.priors(stranger, BLOCKS) == []


def test_priors_are_read_once_per_job_and_stay_what_they_were(store: Counting) -> None:
    job = _job(store)
    drafting = Drafting(store, Objects())
    before = drafting.priors(job, BLOCKS)
    drafting.learn(job, Lessons(COUNTS))
    assert drafting.priors(job, BLOCKS) == before == []
    assert store.priors_read == 1
    assert Drafting(store, Objects()).priors(job, BLOCKS) == list(COUNTS)


def test_priors_that_cannot_be_read_are_none(
    store: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    job, drafting = _job(store), Drafting(store, Objects())
    store.away.add("acceptance")
    with caplog.at_level(logging.WARNING):
        assert drafting.priors(job) == []
    assert "begins without priors: acceptance: the database is away" in caplog.text
    assert drafting.priors(job) == []
    assert store.priors_read == 1


@pytest.mark.parametrize("away", ["learn_acceptance", "note_decisions"])
def test_lessons_that_cannot_be_written_are_only_logged(
    store: Counting, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = _job(store)
    store.away.add(away)
    with caplog.at_level(logging.WARNING):
        Drafting(store, Objects()).learn(job, Lessons(COUNTS, (DECISION,)))
    assert f"could not save draft statistics of job {JOB}: {away}" in caplog.text


def test_what_is_learned_of_blocks_is_learned_of_the_model_that_wrote_them(store: Counting) -> None:
    old, new = (DraftBlock(0, 0, (1, 2), proposer=of) for of in ("old", "new"))
    tonight, drafting = _job(store), Drafting(store, Objects())
    drafting.priors(tonight, [old])
    drafting.learn(tonight, Lessons(COUNTS))
    tomorrow, drafting = _job(store, "jobtomorrow"), Drafting(store, Objects())
    of_blocks, of_others = COUNTS
    assert drafting.priors(tomorrow) == [of_others], "who will write blocks is not known"
    assert drafting.priors(tomorrow, [new]) == [of_others]
    assert drafting.priors(tomorrow, [old]) == [replace(of_blocks, fingerprint="old"), of_others]
    drafting.learn(tomorrow, Lessons((of_blocks,)))
    assert [c.fingerprint for c in store.acceptance("default", tonight.name)] == ["old", ""]


def test_a_new_model_is_tried_where_blocks_of_the_old_one_were_not_worth_it(
    store: Counting,
) -> None:
    job, spec, drafting = _job(store), spec_of(), Drafting(store, Objects())
    useless = AcceptanceCount("block", None, 5.0, 500.0, "old")
    store.learn_acceptance(job.tenant, job.name, [useless])
    assert drafting.length(job, spec, "old") == 0
    assert drafting.length(job, spec, "new") > 0


def test_nothing_learned_is_nothing_written(store: Counting) -> None:
    job = _job(store)
    store.away |= {"learn_acceptance", "note_decisions"}
    Drafting(store, Objects()).learn(job, Lessons())
    assert store.decisions(JOB) == []


# --- how far to write ahead ---------------------------------------------------------------------


def test_drafts_that_no_price_is_known_of_have_the_usual_one(store: Counting) -> None:
    """Not none at all: they would be written as far ahead as may be, where they are worth least."""
    past_job(store, TONIGHT, tuple(range(5000)), usd=1.0)
    job = store.get_job(TONIGHT)
    store.learn_acceptance(job.tenant, job.name, [AcceptanceCount("block", None, 25.0, 500.0)])
    spec = spec_of().model_copy(update={"sampling": SamplingSpec(max_tokens=512)})
    drafting = Drafting(store, Objects())
    assert drafting.length(job, spec) == 0
    drafting.drafted(job, 1000, 1e-9)
    assert drafting.length(job, spec) > 0, "drafts that cost next to nothing pay at any acceptance"


# --- caps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculation", "tag", "prompt_tokens", "tenant", "cap"),
    [
        ({}, None, 10, None, None),
        ({}, None, 8192, None, 4),  # long prompts are capped unless somebody says otherwise
        ({}, None, 40_000, None, 2),
        ({"prompt_depths": {}}, None, 40_000, None, None),
        ({"max_depth": 3}, None, 10, None, 3),
        ({"max_depth": 3}, None, 10, 2, 2),
        ({"tag_depths": {"poem": 0}}, "poem", 10, 5, 0),
        ({"tag_depths": {"poem": 0}}, "prose", 10, 5, 5),
    ],
)
def test_a_rows_cap_is_the_least_of_all(
    speculation: dict[str, Any],
    tag: str | None,
    prompt_tokens: int,
    tenant: int | None,
    cap: int | None,
) -> None:
    row = _row(tag, [1] * prompt_tokens)
    assert cap_of(spec_of(**speculation), row, tenant) == cap


def _row(tag: str | None, prompt: Sequence[int]) -> PromptRow:
    return PromptRow(row_index=0, row_id="row-0", prompt_ids=tuple(prompt), seed=1, tag=tag)
