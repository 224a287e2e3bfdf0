"""The page of `specbatch serve`: what it shows of real jobs in a real store, and to whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from contracts.shorthand import found
from contracts.test_budgets import GROUP, ingest
from ledger.builders import LEASE_SEC, completion
from serve.conftest import KEY, Made, made_service
from serve.test_sign_in import MODELS
from serve.visitor import Visitor, checked, done_job, held_job, started_job

from specbatch.schemas.audit import AuditRecord, EntryKind
from specbatch.schemas.budgets import Period
from specbatch.schemas.policies import Decided
from specbatch.schemas.records import FinishReason, JobState, Stage
from specbatch.schemas.registry import DeployScope, NewModel
from specbatch.schemas.rollouts import Observed
from specbatch.schemas.serving import Scope
from support.html_page import check

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}\u202e"
SECRET = "the launch code is swordfish"
HIDDEN = "it is called swordfish too"
FOLDER = "/srv/operators/models/verifier"


def job_id(number: int) -> str:
    return f"0{number:020x}"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with made_service(tmp_path / "serve-dir", MODELS) as found:
        yield found


@pytest.fixture
def store(made: Made) -> Any:
    return made.service.store


@pytest.fixture
def visitor(made: Made) -> Visitor:
    found = Visitor(made.service)
    found.sign_in()
    return found


def rollout_of(store: Any, scope: DeployScope, reason: str = "trained", name: str = "draft") -> int:
    """With four groups; its number."""
    numbers = len(store.rollouts(history=True))
    present, candidate = f"{2 * numbers:02x}" * 16, f"{2 * numbers + 1:02x}" * 16
    for fingerprint in (present, candidate):
        store.add_model(NewModel(fingerprint, name, f"{FOLDER}/{fingerprint}"))
    store.promote(present, scope, "the first")
    begun = store.begin_rollout(candidate, scope, (0.5, 1.0), reason)
    for group in range(4):
        seen = Observed(0.5, group % 2 == 0, 100 + group, 1.0, accepted=40)
        store.observe_rollout(begun.number, "job", group, seen)
    return int(begun.number)


# --- what is shown --------------------------------------------------------------------------------
def test_the_list_has_the_newest_jobs_with_their_figures(store: Any, visitor: Visitor) -> None:
    done_job(store, job_id(1))
    started_job(store, job_id(2), name="evening")
    found(store.claim_group(job_id(2), 0, Stage.VERIFY, "w1", LEASE_SEC))
    page = visitor.page("/jobs")
    assert page.headings == [(1, "Jobs")]
    for said in ("nightly", "evening", "done", "verifying", "4 of 4", "0 of 4", "$1.00", "25"):
        assert said in page.text
    assert page.text.index("evening") < page.text.index("nightly")
    assert {f"/jobs/{job_id(1)}", f"/jobs/{job_id(2)}"} <= set(page.links)


def test_an_empty_list_says_what_to_do(visitor: Visitor) -> None:
    assert "send a batch to /v1/batches" in visitor.page("/jobs").text


def test_jobs_are_chosen_by_state_and_shown_a_page_at_a_time(
    store: Any, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.jobs.serve.page.MOST_JOBS", 3)
    for number in range(5):
        started_job(store, job_id(number))
    done_job(store, job_id(99), name="the end")
    first = visitor.page("/jobs")
    assert "running 5" in first.text
    assert f"/jobs/{job_id(2)}" not in first.links
    older = next(link for link in first.links if "after=" in link)
    rest = visitor.page(older)
    assert [link for link in rest.links if job_id(2) in link]
    assert "the end" not in rest.text
    only = visitor.page("/jobs?state=done")
    assert "the end" in only.text
    assert "nightly" not in only.text
    assert "the end" in visitor.page("/jobs?state=nonsense&after=" + "z" * 999).text


def test_a_job_has_its_figures_limits_and_a_report(store: Any, visitor: Visitor) -> None:
    done_job(store, job_id(1), budget_usd=12.5, priority=0)
    page = visitor.page(f"/jobs/{job_id(1)}")
    for said in ("nightly done", "100 %", "4 of 4 prompts", "verified tokens per verifier pass",
                 "budget $12.50", "priority high", "submitted"):  # fmt: skip
        assert said in page.text
    assert f"/jobs/{job_id(1)}/report" in page.links
    report = check(visitor.get(f"/jobs/{job_id(1)}/report").text)
    assert "4 completions with 12 tokens" in report.text
    assert {"Sampled outputs", "Versions"} <= {said for _, said in report.headings}


def test_a_job_says_why_it_ended_without_the_operators_folders(
    store: Any, visitor: Visitor
) -> None:
    said = f"model {FOLDER} has no config.json"
    done_job(
        store, job_id(1), state=JobState.FAILED, error=said, verifier=FOLDER,
        output_uri="s3://operators/out", workspace_uri="file:///srv/operators/work",
    )  # fmt: skip
    store.keep_audit(AuditRecord(job_id(1), 4, 0, 12, True))
    pages = [visitor.get(path).text for path in (f"/jobs/{job_id(1)}", f"/jobs/{job_id(1)}/report")]
    assert all("Error: model … has no config.json" in page for page in pages)
    assert "the operator" in pages[1]
    for page in (*pages, visitor.get("/jobs").text):
        assert "operators" not in page
        assert store.audits(job_id(1))[0].actor not in page


def test_a_stopped_and_a_waiting_job_say_so(store: Any, visitor: Visitor) -> None:
    started_job(store, job_id(1))
    assert "Job 0" in visitor.page(f"/jobs/{job_id(1)}").text  # nobody works on it
    assert f"specbatch retry {job_id(1)} --local" in visitor.page(f"/jobs/{job_id(1)}").text
    store.request_cancel(job_id(1), "too dear")
    assert "The job is being stopped: too dear" in visitor.page(f"/jobs/{job_id(1)}").text


def test_the_tenants_page_has_what_the_store_counts(store: Any, visitor: Visitor) -> None:
    done_job(store, job_id(1))
    done_job(store, job_id(2))
    done_job(store, job_id(3), tenant="other")
    progress = [store.progress(job_id(number)) for number in (1, 2)]
    page = visitor.page("/tenants")
    tokens = sum(one.completion_tokens for one in progress)
    usd = sum(one.cost_usd for one in progress)
    for period in ("today", "this month", "in all"):
        assert f"{period} 2 8 40 {tokens} ${usd:.2f}" in page.text
    assert "Weight of its share 1" in page.text
    assert "scopes read, write" in page.text


def test_the_tenants_page_has_its_budgets_and_no_others(store: Any, visitor: Visitor) -> None:
    assert "It has no budget" in visitor.page("/tenants").text
    done = [replace(completion(row), reused_from=None) for row in range(4)]
    done_job(store, job_id(1), done)
    tenant = store.get_job(job_id(1)).tenant
    spent = sum(one.prompt_tokens + len(one.token_ids) for one in done)
    store.set_budget(tenant, Period.MONTH, 10_000, None, "agreed")
    store.set_budget(tenant, Period.TOTAL, None, 5.0, "agreed")
    store.set_budget("other", Period.DAY, 777, None, "agreed")
    text = visitor.page("/tenants").text
    assert f"a month 10,000 {10_000 - spent:,} any any" in text
    assert "in all any any $5.00 $" in text
    assert "777" not in text


def test_the_tenants_page_says_what_of_its_balance_is_an_estimate(
    store: Any, visitor: Visitor
) -> None:
    done = [replace(completion(row), reused_from=None) for row in range(4)]
    done_job(store, job_id(1), done)
    tenant = store.get_job(job_id(1)).tenant
    store.set_budget(tenant, Period.TOTAL, None, 50.0, "agreed")
    ingest(store, job_id(2), tenant)
    lost = store.claim_next(Stage.VERIFY, "big", "lost", 0.0)
    assert lost is not None, "its lease has run out"
    (account,) = store.tenant_accounts(tenant)
    assert (account.reserved_tokens, account.spent[Period.TOTAL].usd) == (GROUP, 1.0)
    text = visitor.page("/tenants").text
    assert f"{GROUP} tokens are reserved for groups under way" in text
    assert f"their cost, ${account.reserved_usd:.2f}, is an estimate" in text
    assert "lost with their worker are not charged" in text


def test_a_rollout_shows_how_its_candidate_does(store: Any, visitor: Visitor) -> None:
    number = rollout_of(store, DeployScope("default"), "trained last night")
    page = visitor.page("/rollouts")
    assert "draft:2" in page.text
    assert "drafts for 50% of groups" in page.text
    shown = visitor.page(f"/rollouts/{number}")
    for said in ("trained last night", "Of 4 groups", "tokens per device second", "present model"):
        assert said in shown.text
    store.stop_rollout(DeployScope("default"), "enough seen")
    assert "stopped" in visitor.page("/rollouts").text
    assert "enough seen" in visitor.page(f"/rollouts/{number}").text


def test_the_script_gets_figures_of_the_jobs_that_it_names(store: Any, visitor: Visitor) -> None:
    started_job(store, job_id(1), name="evening")
    page = visitor.get("/jobs").text
    asks = re.search(r'data-now="([^"]+)"', page)
    assert asks is not None
    url = asks[1].replace("&amp;", "&")
    told = visitor.get(url).json()
    (job,) = told["jobs"]
    assert (job["id"], job["live"], job["share"]) == (job_id(1), True, 0.0)
    assert job["said"].startswith("evening: ")
    for name, text in job["cells"].items():
        assert f'data-cell="{name}">{text}<' in page or name in ("share", "failed")
    assert (told["newer"], told["again_ms"]) == (False, 2000)
    done_job(store, job_id(2))
    assert visitor.get(url).json()["newer"]
    ended = visitor.get(f"/jobs/now?id={job_id(2)}").json()
    assert (ended["jobs"][0]["said"], ended["again_ms"]) == ("nightly: done", 15_000)
    assert "data-now" not in visitor.get(f"/jobs/{job_id(2)}").text, "nothing changes any more"


# --- to whom --------------------------------------------------------------------------------------
def test_what_is_another_tenants_looks_like_what_is_not(store: Any, made: Made) -> None:
    theirs, nowhere = held_job(store, job_id(1), tenant="other", name="swordfish"), job_id(2)
    rollout = rollout_of(store, DeployScope("other"), "for swordfish")
    mine = Visitor(made.service)
    mine.sign_in("mine")
    for path in ("/jobs/{}", "/jobs/{}/report", "/reviews/{}"):
        answers = [mine.get(path.format(one)) for one in (theirs, nowhere)]
        said = [a.text.replace(theirs, "ID").replace(nowhere, "ID") for a in answers]
        assert [a.status_code for a in answers] == [404, 404]
        assert said[0] == said[1]
    for guess in ("latest", "swordfish", theirs[:8]):
        assert mine.get(f"/jobs/{guess}").status_code == 404
    form = {"csrf": mine.token("/jobs"), "decide-0-0": "blocked"}
    assert mine.post(f"/reviews/{theirs}", form).status_code == 404
    assert len(store.reviews(theirs).pending) == 2
    assert mine.get(f"/jobs/now?id={theirs}&newest=").json()["jobs"] == []
    assert mine.get(f"/rollouts/{rollout}").status_code == 404
    for path in ("/jobs", "/jobs/now?newest=", "/rollouts", "/tenants", "/reviews"):
        assert theirs not in mine.get(path).text
        assert "swordfish" not in mine.get(path).text
        assert "other" not in mine.get(path).text, path
    theirs_too = Visitor(made.service)
    theirs_too.sign_in("other")
    assert theirs_too.get(f"/jobs/{theirs}").status_code == 200


def test_a_rollout_for_all_shows_figures_and_no_words_of_the_operator(
    store: Any, visitor: Visitor
) -> None:
    done_job(store, job_id(1), name="known")
    for scope in (
        DeployScope(),
        DeployScope(job_name="known"),
        DeployScope(job_name="swordfish"),
        DeployScope(tag="swordfish"),
    ):
        rollout_of(store, scope, "because of swordfish")
    shown = visitor.page("/rollouts")
    assert [link for link in shown.links if "/rollouts/" in link] == ["/rollouts/2", "/rollouts/1"]
    for number in (1, 2):
        page = visitor.page(f"/rollouts/{number}")
        assert "tokens per device second" in page.text
        assert "Of 4 groups" not in page.text
        assert "swordfish" not in page.text
        assert store.rollouts()[0].started_by not in page.text
    assert visitor.get("/rollouts/3").status_code == 404


# --- texts ----------------------------------------------------------------------------------------
def test_no_text_becomes_markup(store: Any, made: Made) -> None:
    tenant = "t<b>&\"'"
    texts: dict[str, Any] = {"text": EVIL, "row_id": EVIL, "tag": EVIL}
    records = [completion(row, **texts) for row in range(4)]
    names: dict[str, Any] = {"tenant": tenant, "name": EVIL, "verifier": EVIL, "proposer": EVIL}
    done_job(store, job_id(1), records, JobState.FAILED, error=EVIL, **names)
    held_job(store, job_id(2), why=EVIL, **names)
    started_job(store, job_id(3), **names)
    store.request_cancel(job_id(3), EVIL)
    number = rollout_of(store, DeployScope(tenant, EVIL), EVIL, EVIL)
    store.stop_rollout(DeployScope(tenant, EVIL), EVIL)
    visitor = Visitor(made.service)
    visitor.sign_in(tenant, name=EVIL)
    paths = ["/jobs", "/tenants", "/rollouts", f"/rollouts/{number}", "/reviews"]
    paths += [f"/jobs/{job_id(n)}" for n in (1, 2, 3)] + [f"/reviews/{job_id(2)}"]
    for path in paths:
        page = visitor.page(path)
        assert "alert(1)" in page.text
        assert "{{7*7}}" in page.text
        assert "<script>alert" not in page.html
        assert "<img" not in page.html
        assert "\u202e" not in page.html
    report = visitor.get(f"/jobs/{job_id(1)}/report").text
    assert "alert(1)" in check(report).text
    assert "<script>alert" not in report
    evil = quote(EVIL.replace("/", ""))
    for path in (f"/jobs/{evil}", f"/reviews/{evil}", f"/jobs?state={evil}", f"/rollouts/{evil}"):
        answer = visitor.get(path)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "<script>alert" not in answer.text
    told = visitor.get(f"/jobs/now?id={job_id(3)}")
    assert told.headers["content-type"] == "application/json"


def test_nothing_that_is_held_back_or_blocked_is_shown_elsewhere(
    store: Any, visitor: Visitor
) -> None:
    """The store has no such texts; the page must not read them from other places."""
    held_job(store, job_id(1))
    bare = {"text": "", "token_ids": (-1,) * 3, "top_logprobs": None}
    blocked = completion(0, finish_reason=FinishReason.BLOCKED, error="blocked by p", **bare)
    done_job(store, job_id(2), [blocked])
    for number in (1, 2):
        page = visitor.page(f"/jobs/{job_id(number)}").text
        report = visitor.get(f"/jobs/{job_id(number)}/report")
        assert report.status_code == 200
        assert "a b" not in page
    assert "Review 2 completions" in visitor.page(f"/jobs/{job_id(1)}").text


@pytest.mark.parametrize("now", ["redacted", "hash-only"])
def test_a_tenant_that_has_become_private_sees_no_text_any_more(tmp_path: Path, now: str) -> None:
    folder = tmp_path / "serve-dir"
    private = {"tenant_privacy": {"default": now}, "encryption_key": KEY}
    with made_service(folder, MODELS, more_settings=private) as made:
        visitor = Visitor(made.service)
        visitor.sign_in()
        records = [completion(row, text=SECRET) for row in range(4)]
        said = {"state": JobState.FAILED, "error": HIDDEN}
        done_job(made.service.store, job_id(1), records, **said)
        held_job(made.service.store, job_id(2))
        for path in (f"/jobs/{job_id(1)}", f"/jobs/{job_id(1)}/report", f"/reviews/{job_id(2)}"):
            page = visitor.get(path).text
            assert "no texts are shown" in page
            assert "swordfish" not in page
        assert now in visitor.page("/tenants").text


def test_a_purged_job_has_figures_and_no_texts(store: Any, visitor: Visitor) -> None:
    done_job(store, job_id(1), [completion(row, text=SECRET) for row in range(4)])
    assert "swordfish" in visitor.get(f"/jobs/{job_id(1)}/report").text
    list(store.purge(job_id(1), "asked for"))
    for path in (f"/jobs/{job_id(1)}", f"/jobs/{job_id(1)}/report"):
        page = visitor.get(path).text
        assert "This job was purged: its texts are deleted, its figures are kept." in page
        assert "swordfish" not in page


# --- reviews --------------------------------------------------------------------------------------
def test_what_waits_is_listed_and_blocked_for_good(store: Any, visitor: Visitor) -> None:
    held_job(store, job_id(1), "held back for review by policy `odd` (code)")
    done_job(store, job_id(2))
    queue = visitor.page("/reviews")
    assert "1 job with completions that wait" in queue.text
    assert f"/reviews/{job_id(1)}" in queue.links
    page = visitor.page(f"/reviews/{job_id(1)}")
    for said in ("2 completions wait", "Row 0", "Row 1", "policy `odd` (code)",
                 "Its text cannot be read here. It can be blocked, not released."):  # fmt: skip
        assert said in page.text
    form = {"csrf": visitor.token(f"/reviews/{job_id(1)}")}
    decided = {"decide-0-0": "blocked", "decide-1-0": ""}
    done = visitor.post(f"/reviews/{job_id(1)}", {**form, **decided})
    assert (done.status_code, done.headers["location"]) == (303, f"/reviews/{job_id(1)}")
    assert "0 released, 1 blocked." in visitor.page(f"/reviews/{job_id(1)}").text
    assert "1 blocked" not in visitor.page(f"/reviews/{job_id(1)}").text, "said once"
    assert store.reviews(job_id(1)).decided == {(0, 0): Decided.BLOCKED}
    (entry,) = [e for e in store.log(job_id(1)) if e.kind == EntryKind.REVIEWED]
    key_id = visitor.page("/tenants").text.split(" id ")[1].split()[0]
    assert entry.actor == f"api-key:{key_id}"
    assert orjson.loads(entry.payload)["decided"] == [[0, 0, "blocked"]]
    again = visitor.post(f"/reviews/{job_id(1)}", {**form, "decide-0-0": "blocked"})
    assert again.status_code == 409
    assert store.reviews(job_id(1)).pending == [(1, 0)]


@pytest.mark.parametrize(
    ("decision", "status", "said"),
    [
        ({"decide-0-0": "released"}, 409, "its text cannot be read here"),
        ({"decide-3-0": "blocked"}, 409, "is not held back for review"),
        ({"decide-0-7": "released"}, 409, "is not held back for review"),
        ({"decide-0-0": "published"}, 400, "&#39;published&#39; is no decision"),
        ({"decide-x-0": "blocked"}, 303, ""),
        ({}, 303, ""),
    ],
)
def test_a_decision_that_cannot_be_changes_nothing(
    store: Any, visitor: Visitor, decision: dict[str, str], status: int, said: str
) -> None:
    held_job(store, job_id(1))
    form = {"csrf": visitor.token("/jobs"), "decide-1-0": "blocked" if decision else ""}
    if status == 303:
        form.pop("decide-1-0")
    answer = visitor.post(f"/reviews/{job_id(1)}", {**form, **decision})
    assert answer.status_code == status
    assert said in answer.text
    assert len(store.reviews(job_id(1)).pending) == 2
    if status == 303:
        assert "Nothing was decided" in visitor.page(f"/reviews/{job_id(1)}").text


def test_a_key_that_may_only_read_decides_nothing(store: Any, made: Made) -> None:
    held_job(store, job_id(1))
    reader = Visitor(made.service)
    reader.sign_in("default", Scope.READ)
    page = reader.page(f"/reviews/{job_id(1)}")
    assert "has no scope write" in page.text
    assert 'type="radio"' not in page.html
    form = {"csrf": reader.token("/jobs"), "decide-0-0": "blocked"}
    refused = reader.post(f"/reviews/{job_id(1)}", form)
    assert refused.status_code == 403
    assert "has no scope `write`" in refused.text
    assert len(store.reviews(job_id(1)).pending) == 2


# --- where it is ----------------------------------------------------------------------------------
def test_without_the_page_only_the_api_is_there(made: Made) -> None:
    visitor = Visitor(replace(made.service, page=None))
    for path in ("/", "/jobs", "/sign-in", "/static/page.css"):
        answer = visitor.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
    assert visitor.get("/v1/models").status_code == 401


def test_the_api_takes_no_session_for_a_key(visitor: Visitor) -> None:
    assert visitor.get("/v1/files").status_code == 401
    assert visitor.get("/v1/files").json()["error"]["code"] == "missing_api_key"


def test_what_pages_load_is_there_and_kept(visitor: Visitor) -> None:
    page = visitor.get("/sign-in").text + visitor.get("/jobs").text
    named = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page))
    assert {name.partition("?")[0] for name in named} == {
        f"/static/{name}" for name in ("page.css", "page.js", "icon.svg")
    }
    for name in named:
        answer = visitor.get(name)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    for name in ("../page.py", "..%2fpage.py", "base.html", "%00"):
        assert visitor.get(f"/static/{name}").status_code == 404


def test_a_store_that_is_away_is_told_without_its_address_and_the_log_has_why(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specbatch.schemas.errors import StoreError

    def away(*_: Any, **__: Any) -> Any:
        raise StoreError("the store postgresql://secret@db cannot be reached")

    monkeypatch.setattr(type(visitor.service.store), "tenant_jobs", away)
    answer = visitor.get("/jobs")
    assert answer.status_code == 503
    assert checked(answer.text).headings == [(1, "specbatch Not available now")]
    assert "secret" not in answer.text
    assert "cannot be reached" in caplog.text
