"""Reports of all kinds of jobs: each tells what there is, sensibly, and no more than it may."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from contracts.shorthand import claim, claim_job, commit, exhaust, finish, ingest, verified
from ledger.builders import JOB, NO_TIME, RESULTS, Clock, completion, new_group, new_job, position
from tokenizers import Tokenizer

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.pipeline.operations.report_texts import make_pieces
from specbatch.pipeline.policy.costs.controls import Arm, Controls, Measured, Part
from specbatch.pipeline.stages.group_report import group_report
from specbatch.schemas.audit import AuditRecord
from specbatch.schemas.errors import JobNotFoundError, MissingExtraError, StoreError
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.provenance import NO_PROVENANCE, TICKS_PER_SEC, Ticks
from specbatch.schemas.records import JobState, RejectedRow, Stage
from specbatch.schemas.registry import NewModel
from specbatch.schemas.settings import Settings
from specbatch.schemas.speculation import AcceptanceCount, Decision, DecisionAction
from specbatch.schemas.timekeeping import Device, NewSession, Spent
from support import demo
from support.databases import sqlite_store
from support.html_page import Page, check

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
SECRET = "the launch code is swordfish"


@pytest.fixture
def store() -> Store:
    """What it tells is the same on both databases: `tests/contracts` sees to that."""
    return sqlite_store(Clock())


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[Store]:
    opened = open_store(postgres_url, clock=Clock())
    yield opened
    opened.close()


def report(store: Store, job: str = JOB, **values: Any) -> Page:
    settings = Settings(workspace="work", **values.pop("settings", {}))
    values = {"samples": 4, "made_at": 1_000_100.0} | values
    return check(page(gather(store, settings, job, **values)))


def sections(page: Page) -> list[str]:
    return [said for level, said in page.headings if level == 2]


def record(store: Store, index: int, rows: range, **values: Any) -> None:
    """Verify a group with its time, and commit it."""
    lease = claim(store, index).lease
    ticks = Ticks(prefill=TICKS_PER_SEC, verify=2 * TICKS_PER_SEC)
    store.advance(lease, Stage.RECORD, RESULTS, NO_TIME, Spent("s1", 10**9, ticks))
    done = [completion(row, **values) for row in rows]
    report = group_report(done) | measured(drafting=10.0, controls=3).report()
    store.commit_group(claim(store, index, Stage.RECORD).lease, done, NO_TIME, report)


def measured(drafting: float, controls: int) -> Measured:
    """Of a group on a device of $2.5 an hour: drafting steps of so many seconds, twice as quick as
    at depth 0, and some control steps of a second and a bit."""
    sums = Controls()
    for i in range(controls):
        sums.step(Arm.CONTROL, 15.0, 1.0, 0.0, {JOB: Part(1.0 + 0.1 * i, 8, 8)})
    for _ in range(int(drafting)):
        sums.step(Arm.DRAFTS, 15.0, 1.0, 0.2, {JOB: Part(1.0, 16, 8)})
    return sums.take(JOB).priced(2_500_000)


def whole_job(store: Store, groups: int = 3, **job: Any) -> None:
    store.begin_session(NewSession("s1", "w1", Device("h200", "eu", "spot", 2_500_000), 0))
    ingest(store, groups=groups, **job)
    for index in range(groups):
        record(store, index, range(index * 4, index * 4 + 4), text=SECRET)


# --- what a report tells ----------------------------------------------------------------------


def test_a_finished_job_has_every_section(store: Store) -> None:
    whole_job(store)
    decided = Decision(1_000_001.0, DecisionAction.OFF, "ngram", "it did not pay", 0.3, 0.5, 8)
    store.note_decisions(JOB, [decided])
    finish(store)
    store.keep_audit(AuditRecord(JOB, sampled=5, differing=0, tokens=15, intact=True))
    page = report(store)
    assert sections(page) == [
        "Money", "Acceptance", "Depth", "Batches and waiting", "Prompts that stand out",
        "Decisions", "Audits", "Sampled outputs", "Versions",
    ]  # fmt: skip
    for said in (
        "12 completions with 36 tokens",
        "agreed with 25.0 % of the draft tokens",
        "95 % interval",
        "it did not pay",
        "5 completions generated again from scratch; 0 differed.",
        "1 × h200, eu, spot, $2.5 per hour",
        f"row-0 news {SECRET}",
    ):
        assert said in page.text, said
    assert {"p", "a", "c"} == set(page.token_classes)
    assert len(page.token_classes) == 4 * 3


def test_both_databases_tell_the_same(store: Store, on_postgres: Store) -> None:
    told = []
    for one in (store, on_postgres):
        whole_job(one)
        finish(one)
        told.append(report(one).text.partition("audit log, head")[0])
    assert told[0] == told[1]


def test_money_is_that_of_the_cost_command(store: Store) -> None:
    whole_job(store)
    finish(store)
    from specbatch.pipeline.observe.units import usd
    from specbatch.pipeline.policy.costs.job_costs import JobCost

    total = JobCost(store.get_job(JOB), store.job_times(JOB), store.row_times(JOB)).sheet.total
    assert total.usd > 0
    assert f"with 36 tokens for {usd(total.usd)}" in report(store).text


def test_a_job_without_completions_says_so(store: Store) -> None:
    store.create_job(new_job())
    page = report(store)
    assert sections(page) == ["Versions"]
    assert "No completion was recorded yet." in page.text
    assert "The job is still queued: 0 of 0 prompts are done" in page.text


def test_a_job_that_nobody_works_on_is_interrupted_and_names_the_command(store: Store) -> None:
    ingest(store, groups=2)
    commit(store, verified(store, 0))
    page = report(store)
    assert (
        f"was interrupted and nobody works on it, specbatch retry {JOB} --local resumes it: "
        "4 of 8 prompts are done"
    ) in page.text
    head, _, _ = page.text.partition("These are the figures so far")
    assert "interrupted" in head.partition("was interrupted")[0]
    assert "running" not in head


def test_a_running_job_is_told_so_far(store: Store) -> None:
    ingest(store, groups=2)
    commit(store, verified(store, 0))
    assert store.claim_group(JOB, 1, Stage.VERIFY, "w1", 60) is not None
    page = report(store)
    assert "still running: 4 of 8 prompts are done" in page.text
    assert "4 completions with 12 tokens" in page.text


def test_a_cancelled_job_tells_why(store: Store) -> None:
    ingest(store, groups=2)
    commit(store, verified(store, 0))
    store.request_cancel(JOB, "the input was the wrong one")
    finish(store, JobState.CANCELLED)
    page = report(store)
    assert "The job was stopped: the input was the wrong one." in page.text
    assert "group 1, 4 rows, cancelled" in page.text


def test_a_failed_job_tells_its_error(store: Store) -> None:
    store.create_job(new_job())
    store.fail_job(claim_job(store, Stage.INGEST).lease, "the input is a folder of cats")
    page = report(store)
    assert "Error: the input is a folder of cats" in page.text
    assert "No completion was recorded." in page.text


def test_a_job_without_speculation_has_nothing_of_drafts(store: Store) -> None:
    ingest(store, groups=1, proposer=None)
    plain: dict[str, Any] = {
        "origins": (0, 0, 0), "proposed": 0, "accepted": 0, "proposed_at_depth": (),
        "accepted_at_depth": (), "decode_sec": 0.0, "baseline_sec": 0.0, "proposer": None,
        "provenance": replace(NO_PROVENANCE, steps=(1, 2, 3), pass_ticks=(1, 1, 1)),
        "ahead_ticks": 0,
    }  # fmt: skip
    lease = verified(store, 0)
    store.commit_group(lease, [completion(row, **plain) for row in range(4)], NO_TIME, {})
    finish(store)
    page = report(store)
    assert "Nothing was drafted, so there is nothing that speculation saved or lost." in page.text
    assert not {"Acceptance", "Depth", "Decisions"} & set(sections(page))
    assert "Batches and waiting" in sections(page)


def test_nights_of_draft_models_are_drawn_and_said_by_their_names() -> None:
    clock = Clock()
    store = sqlite_store(clock=clock)
    whole_job(store)
    job = store.get_job(JOB)
    store.add_model(NewModel("aa" * 32, "docs", "/models/aa"))
    for fingerprint, agreed in (("aa" * 32, 50.0), ("bb" * 32, 75.0)):
        counts = [AcceptanceCount("draft-model:1", tag, agreed, 100.0, fingerprint) for tag in "xy"]
        store.learn_acceptance(job.tenant, job.name, [*counts, AcceptanceCount("ngram", "x", 1, 2)])
        clock.advance(86_400.0)
    night, other = gather(store, Settings(workspace="work"), JOB, samples=0, made_at=1.0).nights
    assert (night.model, night.tested, night.rate) == ("docs:1", 200.0, 0.5)
    assert (other.model, other.rate) == ("bbbbbbbbbbbb", 0.75)
    assert night.day < other.day
    said = report(store).text
    assert "Draft models by night" in said
    assert "bbbbbbbbbbbb drafts" in said


def test_one_control_step_gives_no_interval(store: Store) -> None:
    ingest(store, groups=1, rows=1)
    told = group_report([completion(0)]) | measured(drafting=2.0, controls=1).report()
    store.commit_group(verified(store, 0), [completion(0)], NO_TIME, told)
    finish(store)
    page = report(store)
    assert "1 completion with 3 tokens" in page.text
    assert "There was only one control step, so there is no interval." in page.text


def test_a_job_whose_drafts_no_control_step_stands_beside_is_not_said_to_save(
    store: Store,
) -> None:
    ingest(store, groups=1, rows=1)
    told = group_report([completion(0)]) | measured(drafting=2.0, controls=0).report()
    store.commit_group(verified(store, 0), [completion(0)], NO_TIME, told)
    finish(store)
    page = report(store)
    assert "the job has no control steps" in page.text
    assert "against depth 0" not in page.text


def test_rows_without_a_result_are_told_by_reason(store: Store) -> None:
    store.create_job(new_job())
    lease = claim_job(store, Stage.INGEST).lease
    bad = [RejectedRow(10 + i, f"id-{i}", "empty_prompt", "it is empty") for i in range(7)]
    bad.append(RejectedRow(20, None, "null_prompt", f"it is {EVIL}"))
    store.add_groups(lease, [new_group(0)], bad, 30, position())
    store.finish_ingest(lease, 30, {})
    exhaust(store, 0)
    finish(store, JobState.PARTIAL)
    page = report(store)
    assert "empty_prompt 7 row 10 (id id-0) : it is empty" in page.text
    assert "id-4" in page.text
    assert "id-5" not in page.text
    assert EVIL in page.text
    assert "group 0, 4 rows, failed out of memory 2" in page.text


def test_no_text_of_a_job_becomes_markup(store: Store) -> None:
    ingest(store, groups=1, name=EVIL, tenant="a<b>")
    record_values: dict[str, Any] = {"text": EVIL, "row_id": EVIL, "tag": EVIL}
    lease = verified(store, 0)
    store.commit_group(lease, [completion(r, **record_values) for r in range(4)], NO_TIME, {})
    store.note_decisions(JOB, [Decision(1.0, DecisionAction.ROUTED, EVIL, EVIL)])
    finish(store)
    page = report(store)  # `check` holds that there is one script
    assert page.text.count(EVIL) >= 5
    assert "<img src" not in page.html


def test_what_is_no_character_of_html_is_replaced(store: Store) -> None:
    store.create_job(new_job())
    facts = gather(store, Settings(workspace="work"), JOB, samples=0, made_at=1.0)
    job = replace(facts.job, name="a\x00b\x1bc\ud800d\ufffee\u202ef", tenant="tab\tand\nline")
    made = page(replace(facts, job=job))
    assert "<title>a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf: specbatch" in made
    assert "tab\tand\nline" in made
    made.encode("utf-8")


def test_without_jinja2_a_report_says_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_job(new_job())
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'specbatch\[report\]'"):
        report(store)


def test_an_unknown_job_is_an_error(store: Store) -> None:
    with pytest.raises(JobNotFoundError):
        report(store, "nobody's")


def test_progress_is_told_up_to_the_last_completion(store: Store) -> None:
    whole_job(store, groups=2)
    heard: list[tuple[int, int]] = []
    report(store, on_progress=lambda read, total: heard.append((read, total)))
    assert heard[0] == (0, 8)
    assert heard[-1] == (8, 8)


# --- what it may not tell ---------------------------------------------------------------------


def test_a_purged_job_keeps_its_figures_and_says_that_texts_are_gone(store: Store) -> None:
    whole_job(store)
    finish(store)
    list(store.purge(JOB, "by a test"))
    page = report(store)
    assert "This job was purged: its texts are deleted, its figures are kept." in page.text
    assert "12 completions with 36 tokens" in page.text
    assert SECRET not in page.html
    assert "row-0" not in page.html


def test_hash_only_shows_no_text_but_what_each_token_was(store: Store) -> None:
    ingest(store, groups=1, privacy=PrivacyMode.HASH_ONLY)
    ids = (NOT_KEPT,) * 3
    gone: dict[str, Any] = {"text": "", "token_ids": ids, "row_id": "hash-of-it"}
    store.commit_group(
        verified(store, 0),
        [completion(row, top_logprobs=None, **gone) for row in range(4)],
        NO_TIME,
        {},
    )
    finish(store)
    page = report(store)
    assert "texts are not kept (hash-only)" in page.text
    assert set(page.token_classes) == {"p", "a", "c"}
    assert "▮" in page.text
    assert "hash-of-it" not in page.text


def test_redacted_shows_what_the_store_holds(store: Store) -> None:
    ingest(store, groups=1, privacy=PrivacyMode.REDACTED)
    less: dict[str, Any] = {"text": "call [PHONE] now", "token_ids": (7, NOT_KEPT, 8)}
    lease = verified(store, 0)
    store.commit_group(
        lease, [completion(row, top_logprobs=None, **less) for row in range(4)], NO_TIME, {}
    )
    finish(store)
    page = report(store)
    assert "call [PHONE] now" in page.text
    assert "▮ marks a token that is not kept." in page.text


def test_a_tenant_that_asks_for_more_by_now_gets_it(store: Store) -> None:
    whole_job(store)
    store.note_decisions(JOB, [Decision(1.0, DecisionAction.OFF, "*", f"because {SECRET}")])
    finish(store)
    page = report(store, settings={"privacy": "redacted"})
    assert "The tenant's privacy is redacted now, and this job was kept full before" in page.text
    assert SECRET not in page.html
    assert "news" not in page.text


def test_texts_may_be_left_out_on_request(store: Store) -> None:
    whole_job(store)
    finish(store)
    page = report(store, with_texts=False)
    assert "Texts were left out of this report on request." in page.text
    assert SECRET not in page.html
    assert "row-0" not in page.html
    assert "news" in page.text


def test_who_may_not_read_texts_gets_the_figures(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_job(store)
    finish(store)

    def refuse(*_: object) -> None:
        raise StoreError("permission denied for table completions")

    monkeypatch.setattr(store, "kept_one", refuse)
    page = report(store)
    assert "Texts cannot be read here: permission denied" in page.text
    assert "12 completions with 36 tokens" in page.text
    assert SECRET not in page.html


# --- token by token ---------------------------------------------------------------------------


def test_pieces_add_up_to_the_text() -> None:
    tokenizer = Tokenizer.from_file(str(demo.VERIFIER / "tokenizer.json"))
    text = "def f(self, größe):\n    return 'naïve 文字 😀'\n" * 20
    ids = tokenizer.encode(text).ids
    pieces = make_pieces(str(demo.VERIFIER))
    assert pieces is not None
    found = pieces([*ids, 0])
    assert len(found) == len(ids) + 1
    assert "".join(found[:-1]) == text
    assert found[-1] == tokenizer.id_to_token(0)  # a special token has no text, but a name


def test_without_a_tokenizer_tokens_are_shown_by_id(store: Store) -> None:
    assert make_pieces("/nowhere") is None
    whole_job(store, groups=1)
    page = report(store)
    assert "tokenizer is not on this machine, so tokens are shown by id" in page.text
    assert "300000" in page.text


def test_long_outputs_are_cut_and_the_rest_is_counted(store: Store) -> None:
    ingest(store, groups=1)
    long: dict[str, Any] = {
        "token_ids": (5,) * 5000, "origins": (0,) * 5000, "logprobs": (-1.0,) * 5000,
        "top_logprobs": None, "provenance": NO_PROVENANCE, "proposed": 0, "accepted": 0,
        "proposed_at_depth": (), "accepted_at_depth": (),
    }  # fmt: skip
    lease = verified(store, 0)
    store.commit_group(lease, [completion(row, **long) for row in range(4)], NO_TIME, {})
    page = report(store)
    assert "… and 3,000 more tokens" in page.text
    assert len(page.token_classes) == 4 * 2000
