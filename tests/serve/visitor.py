"""Somebody with a browser at the service's page, and jobs for the page to show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

from contracts.shorthand import claim_job, found
from ledger.builders import LEASE_SEC, NO_TIME, RESULTS, completion, new_group, new_job, position
from starlette.testclient import TestClient

from specbatch.jobs.serve.app import make_app
from specbatch.jobs.serve.keys import make_key
from specbatch.jobs.serve.service import Service
from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.policies import HELD_BACK
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, FinishReason, JobState, Stage
from specbatch.schemas.serving import Scope
from support.html_page import Page

SPEC = {
    "input": {"uri": "file:///in.parquet"},
    "output": {"uri": "file:///out"},
    "verifier": "/nowhere/big",
    "sampling": {"max_tokens": 16},
}
_TOKEN = re.compile(r'name="csrf" value="([0-9a-f]{64})"')


class Visitor:
    """A browser with its cookies. It follows no redirect by itself."""

    def __init__(
        self, service: Service, base_url: str = "http://testserver", app: Any = None
    ) -> None:
        """`app`: of another visitor, who is at the same service."""
        self.service = service
        self.app = app or make_app(service)
        self.http = TestClient(self.app, base_url, follow_redirects=False)

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(path, **options)

    def post(self, path: str, form: Mapping[str, str], **options: Any) -> Any:
        return self.http.post(path, data=dict(form), **options)

    def token(self, path: str) -> str:
        """The token of the forms of a page."""
        match = _TOKEN.search(self.get(path).text)
        assert match is not None, f"{path} has no form"
        return match[1]

    def sign_in(self, tenant: str = "default", *scopes: Scope, name: str = "test") -> str:
        """With a new key; the key."""
        _, key = make_key(self.service.store, name, tenant, scopes or tuple(Scope), None)
        answer = self.send_key(key)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
        return key

    def send_key(self, key: str, then: str = "/jobs", **options: Any) -> Any:
        form = {"csrf": self.token("/sign-in"), "key": key, "next": then}
        return self.post("/sign-in", form, **options)

    def page(self, path: str) -> Page:
        """A page that is there, well nested, with one first heading and no level left out."""
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return checked(answer.text)


def checked(html: str) -> Page:
    page = Page(html)
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.ids) == len(set(page.ids)), "an id occurs twice"
    for table in page.tables:
        assert table == {"caption": 1, "unscoped": 0}
    assert "".join(page.scripts).strip() == "", "no script within the page"
    _Attributes().feed(html)
    return page


class _Attributes(HTMLParser):
    """Fails where an element has a style or a handler of its own."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "style"
        for name, _ in attrs:
            assert name != "style", tag
            assert not name.startswith("on"), tag


def done_job(
    store: Store,
    job_id: str,
    records: Sequence[CompletionRecord] | None = None,
    state: JobState = JobState.DONE,
    error: str | None = None,
    report: Mapping[str, float] | None = None,
    **job: Any,
) -> str:
    """A job of one group that has ended; its id."""
    records = [completion(row) for row in range(4)] if records is None else records
    started_job(store, job_id, len(records), **job)
    work = found(store.claim_group(job_id, 0, Stage.VERIFY, "w1", LEASE_SEC))
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    work = found(store.claim_group(job_id, 0, Stage.RECORD, "w1", LEASE_SEC))
    store.commit_group(work.lease, records, NO_TIME, report or {})
    store.finish_job(claim_job(store, Stage.PUBLISH, job_id=job_id).lease, state, error)
    return job_id


def started_job(store: Store, job_id: str, rows: int = 4, **job: Any) -> str:
    """A job of one group whose input is read; its id."""
    store.create_job(new_job(job_id, **{"spec": SPEC, **job}))
    lease = claim_job(store, Stage.INGEST, job_id=job_id).lease
    store.add_groups(lease, [new_group(0, rows)], [], rows, position(rows))
    store.finish_ingest(lease, rows, {})
    return job_id


def held_job(store: Store, job_id: str, why: str = "held back for review", **job: Any) -> str:
    """A job whose rows 0 and 1 wait for a review, and whose texts cannot be read anywhere."""
    waits: dict[str, Any] = {"finish_reason": FinishReason.REVIEW, "error": why}
    waits |= {"text": "", "token_ids": (NOT_KEPT,) * 3, "top_logprobs": None}
    records = [completion(row, **(waits if row < 2 else {})) for row in range(4)]
    return done_job(store, job_id, records, report={HELD_BACK: 2.0}, **job)
