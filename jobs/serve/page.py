"""The page: a tenant's jobs, reports, rollouts, use and reviews in a browser, for its keys.

Its routes are plain ones beside the API's. Each goes through `Pages.endpoint`, which reads the
form, has errors shown, and sets the policy. The rest runs in a pool of threads, as the store's
calls block.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from specbatch.jobs.serve.errors import ApiError, logged, unknown, without_places
from specbatch.jobs.serve.keys import Caller, caller_by_id, caller_of
from specbatch.jobs.serve.rates import Rate, Rates
from specbatch.jobs.serve.rendering import POLICY, html, static_answer, statics
from specbatch.jobs.serve.service import Service
from specbatch.jobs.serve.sessions import Sessions, is_cookie, new_cookie
from specbatch.jobs.serve.uploads import in_time, limited
from specbatch.jobs.serve.views import CANNOT_BE_READ, Views
from specbatch.pipeline.observe.report.page import policy
from specbatch.schemas.errors import SpecbatchError, UsageError
from specbatch.schemas.policies import Decided, Place
from specbatch.schemas.records import JobState
from specbatch.schemas.serving import ApiKey, Page, Scope
from specbatch.schemas.settings import Settings

log = logging.getLogger(__name__)

COOKIE, FORM_COOKIE = "specbatch_session", "specbatch_form"
TOKEN, KEY, NEXT = "csrf", "key", "next"  # fields of forms
SIGN_INS = Rate(10, 60.0)  # tries of an address
MOST_FORM_BYTES = 64 << 10
MOST_FIELDS = 200
MOST_JOBS = 25  # of a page: each costs two statements
LIVE_MS, STILL_MS = 2000, 15_000  # until the script asks again
REPORT_POLICY = f"{policy()}; frame-ancestors 'none'; sandbox allow-scripts"
SECTIONS = (
    ("jobs", "Jobs"),
    ("reviews", "Reviews"),
    ("rollouts", "Rollouts"),
    ("tenants", "Tenant"),
)
_FORM_TYPE = "application/x-www-form-urlencoded"
_PAGES = re.compile(rf"/({'|'.join(name for name, _ in SECTIONS)})(/[\w.-]{{1,64}})?(/report)?")
_DECISION = re.compile(r"decide-(\d{1,18})-(\d{1,9})")
_OLD_FORM = "this form is not of your session: load the page again, and send it once more"

Form = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and its sender."""

    request: Request
    form: Form
    cookie: str
    caller: Caller
    key: ApiKey

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    def path(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])


Work = Callable[[Asked], Response]
Route = Callable[[Request], Awaitable[Response]]


def add_page(app: FastAPI, service: Service, settings: Settings) -> None:
    """Add the page's routes. `settings`: with which the jobs' files and texts are read."""
    views = Views(service.store, service.client, settings, service.privacy)
    pages = Pages(service, views)
    for path, work in {
        "/jobs": pages.jobs,
        "/jobs/now": pages.now,
        "/jobs/{job_id}": pages.job,
        "/jobs/{job_id}/report": pages.report,
        "/rollouts": pages.rollouts,
        "/rollouts/{number}": pages.rollout,
        "/tenants": pages.tenants,
        "/reviews": pages.reviews,
        "/reviews/{job_id}": pages.review,
    }.items():
        app.add_route(path, pages.endpoint(pages.signed_in(work)), methods=["GET"])
    decide = pages.signed_in(pages.decide, Scope.WRITE)
    app.add_route("/reviews/{job_id}", pages.endpoint(decide), methods=["POST"])
    app.add_route("/", pages.endpoint(pages.root), methods=["GET"])
    app.add_route("/sign-in", pages.endpoint(pages.ask_for_key), methods=["GET"])
    app.add_route("/sign-in", pages.endpoint(pages.sign_in), methods=["POST"])
    app.add_route("/sign-out", pages.endpoint(pages.sign_out), methods=["POST"])
    app.add_route("/static/{name}", pages.endpoint(_static), methods=["GET"])


def _static(request: Request, _form: Form) -> Response:
    name = str(request.path_params["name"])
    if name not in statics():
        raise unknown("file", name)
    return static_answer(name)


@dataclass(frozen=True, slots=True)
class Pages:
    """What the routes do."""

    service: Service
    views: Views
    sessions: Sessions = field(default_factory=Sessions)
    sign_ins: Rates = field(default_factory=lambda: Rates(SIGN_INS))

    # --- around all of them -----------------------------------------------------------------
    def endpoint(self, work: Callable[[Request, Form], Response]) -> Route:
        """A route: its form read, its errors shown, its policy set."""

        async def route(request: Request) -> Response:
            try:
                form = await self._form(request) if request.method == "POST" else {}
                answer = await run_in_threadpool(work, request, form)
            except SpecbatchError as error:
                answer = _error(logged(error))
            except Exception:
                log.exception("a page failed: %s", request.url.path[:100])
                answer = _error(ApiError(500, "the service failed: its log says why"))
            answer.headers.setdefault("Content-Security-Policy", POLICY)
            return answer

        return route

    async def _form(self, request: Request) -> dict[str, str]:
        """The fields of a form. Raises `ApiError`."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != _FORM_TYPE:
            raise ApiError(415, f"a form must be {_FORM_TYPE}")
        chunks = limited(request.stream(), MOST_FORM_BYTES, "the form")
        body = b"".join([chunk async for chunk in in_time(chunks, self.service.silence_sec)])
        try:
            fields = parse_qsl(
                body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="replace"
            )
        except ValueError:  # also of bytes that are no UTF-8
            raise ApiError(400, f"a form has at most {MOST_FIELDS} fields, in UTF-8") from None
        return dict(fields)

    def signed_in(
        self, work: Work, scope: Scope = Scope.READ
    ) -> Callable[[Request, Form], Response]:
        """Work for people who signed in with a key that still counts; others are asked for one."""

        def checked(request: Request, form: Form) -> Response:
            cookie = request.cookies.get(COOKIE, "")
            session = self.sessions.find(cookie)
            if session is None:
                return self._ask(request, "", 401)
            try:
                caller, key = caller_by_id(self.service.store, session.key_id)
            except ApiError as error:
                self.sessions.end(cookie)
                return self._ask(request, str(error), 401)
            if self.service.rates is not None:
                self.service.rates.check(caller.key_id)
            caller.must(scope)
            if request.method == "POST":
                self._check_token(cookie, form)
            return work(Asked(request, form, cookie, caller, key))

        return checked

    def _check_token(self, cookie: str, form: Form) -> None:
        if not self.sessions.is_form_token(cookie, form.get(TOKEN, "")):
            raise ApiError(403, _OLD_FORM, "wrong_form")

    def _show(self, asked: Asked, template: str, section: str, **values: object) -> Response:
        """A page for people who signed in."""
        return html(
            template,
            200,
            section=section,
            sections=SECTIONS,
            key=asked.key,
            can_write=Scope.WRITE in asked.caller.scopes,
            token=self.sessions.form_token(asked.cookie),
            said=self.sessions.take_said(asked.cookie),
            **values,
        )

    # --- sign in and out --------------------------------------------------------------------
    def root(self, request: Request, _form: Form) -> Response:
        is_known = self.sessions.find(request.cookies.get(COOKIE, "")) is not None
        return _go("/jobs" if is_known else "/sign-in")

    def ask_for_key(self, request: Request, _form: Form) -> Response:
        return self._ask(request, "", 200)

    def _ask(self, request: Request, problem: str, status: int, then: str = "") -> Response:
        """The form to sign in with. Its own cookie leaves a session's alone: a link from elsewhere
        comes without that one, though it may be there."""
        known = request.cookies.get(FORM_COOKIE, "")
        cookie = known if is_cookie(known) else new_cookie()
        if request.method == "GET" and not then:
            then = request.url.path
        token = self.sessions.form_token(cookie)
        shown = html("sign_in.html", status, problem=problem, token=token, then=_next(then))
        _set_cookie(shown, request, FORM_COOKIE, cookie)
        return shown

    def sign_in(self, request: Request, form: Form) -> Response:
        address = request.client.host if request.client else ""
        then = form.get(NEXT, "")
        try:
            self._check_token(request.cookies.get(FORM_COOKIE, ""), form)
            self.sign_ins.check(address)
            caller = caller_of(self.service.store, f"Bearer {form.get(KEY, '').strip()}")
            caller.must(Scope.READ)
        except ApiError as error:
            refused = self._ask(request, str(error), error.status, then)
            if error.retry_after is not None:
                refused.headers["Retry-After"] = str(error.retry_after)
            return refused
        self.sessions.end(request.cookies.get(COOKIE, ""))
        answer = _go(_next(then))
        _set_cookie(answer, request, COOKIE, self.sessions.begin(caller.key_id))
        _drop_cookie(answer, FORM_COOKIE)
        return answer

    def sign_out(self, request: Request, form: Form) -> Response:
        cookie = request.cookies.get(COOKIE, "")
        if self.sessions.find(cookie) is not None:
            self._check_token(cookie, form)
            self.sessions.end(cookie)
        answer = _go("/sign-in")
        _drop_cookie(answer, COOKIE)
        return answer

    # --- jobs -------------------------------------------------------------------------------
    def jobs(self, asked: Asked) -> Response:
        store, tenant = self.service.store, asked.tenant
        wanted, after = asked.request.query_params.get("state"), _after(asked.request)
        state = JobState(wanted) if wanted in list(JobState) else None
        found = store.tenant_jobs(tenant, Page(MOST_JOBS + 1, after), state)
        lines = self.views.lines(found[:MOST_JOBS])
        older = None
        if len(found) > MOST_JOBS:
            older = _query(state=state, after=found[MOST_JOBS - 1].job_id)
        newest = store.tenant_jobs(tenant, Page(1))
        ids = [line.job.job_id for line in lines if line.is_live]
        is_first = state is None and after is None
        known = newest[0].job_id if newest and is_first else None
        return self._show(
            asked,
            "jobs.html",
            "jobs",
            lines=lines,
            states=store.tenant_states(tenant),
            state=state,
            is_first=after is None,
            older=older,
            now=_now(ids, known, is_first) if ids or is_first else None,
        )

    def now(self, asked: Asked) -> Response:
        """For the page's script: how the jobs stand that it names, and whether there are newer ones
        than it knows."""
        asks = asked.request.query_params
        store, tenant = self.service.store, asked.tenant
        wanted = [one for one in asks.getlist("id")[:MOST_JOBS] if "\0" not in one]
        rows = store.jobs_of_ids(wanted)
        mine = [rows[one] for one in wanted if one in rows and rows[one].tenant == tenant]
        lines = self.views.lines(mine)
        newest = store.tenant_jobs(tenant, Page(1)) if "newest" in asks else []
        return JSONResponse(
            {
                "jobs": [line.as_json for line in lines],
                "newer": bool(newest) and newest[0].job_id != asks.get("newest"),
                "again_ms": LIVE_MS if any(line.is_live for line in lines) else STILL_MS,
            }
        )

    def job(self, asked: Asked) -> Response:
        job = self.views.job(asked.tenant, asked.path("job_id"))
        view = self.views.job_view(job)
        now = _now([job.job_id]) if view.line.is_live else None
        return self._show(asked, "job.html", "jobs", view=view, line=view.line, now=now)

    def report(self, asked: Asked) -> Response:
        """The file of `specbatch report`. Its own script and style are within it: it may run these
        alone, and as a stranger to this page."""
        job = self.views.job(asked.tenant, asked.path("job_id"))
        made = self.views.report(job)
        return HTMLResponse(made, headers={"Content-Security-Policy": REPORT_POLICY})

    # --- rollouts, tenants ------------------------------------------------------------------
    def rollouts(self, asked: Asked) -> Response:
        found = self.views.rollouts(asked.tenant)
        return self._show(asked, "rollouts.html", "rollouts", rollouts=found)

    def rollout(self, asked: Asked) -> Response:
        found = self.views.rollout(asked.tenant, asked.path("number"))
        return self._show(asked, "rollout.html", "rollouts", view=found, one=found.rollout)

    def tenants(self, asked: Asked) -> Response:
        view = self.views.tenant(asked.tenant)
        return self._show(asked, "tenants.html", "tenants", view=view)

    # --- reviews ----------------------------------------------------------------------------
    def reviews(self, asked: Asked) -> Response:
        waiting = self.views.waiting(asked.tenant)
        return self._show(asked, "reviews.html", "reviews", waiting=waiting)

    def review(self, asked: Asked) -> Response:
        job = self.views.job(asked.tenant, asked.path("job_id"))
        view = self.views.review(job)
        return self._show(asked, "review.html", "reviews", view=view, unread=CANNOT_BE_READ)

    def decide(self, asked: Asked) -> Response:
        job = self.views.job(asked.tenant, asked.path("job_id"))
        decided = _decisions(asked.form)
        if decided:
            try:
                self.views.decide(job, decided, f"api-key:{asked.key.key_id}")
            except UsageError as error:
                raise ApiError(409, without_places(str(error)), "not_decided") from None
        self.sessions.say(asked.cookie, _said_of(decided))
        return _go(f"/reviews/{job.job_id}")


def _decisions(form: Form) -> dict[Place, Decided]:
    """What a form decides, by completion. Raises `ApiError`."""
    found = {}
    for name, value in form.items():
        match = _DECISION.fullmatch(name)
        if match is None or not value:
            continue
        if value not in list(Decided):
            raise ApiError(400, f"{value[:20]!r} is no decision")
        found[int(match[1]), int(match[2])] = Decided(value)
    return found


def _said_of(decided: Mapping[Place, Decided]) -> str:
    if not decided:
        return "Nothing was decided: choose for a completion first."
    released = sum(one is Decided.RELEASED for one in decided.values())
    return (
        f"{released:,} released, {len(decided) - released:,} blocked. "
        "A worker publishes the output again."
    )


def _now(ids: list[str], newest: str | None = None, with_newest: bool = False) -> str:
    """Where the script asks how these jobs stand."""
    pairs = [("id", job_id) for job_id in ids]
    pairs += [("newest", newest or "")] if with_newest else []
    return f"/jobs/now?{urlencode(pairs)}"


def _query(**values: str | None) -> str:
    return urlencode({name: value for name, value in values.items() if value is not None})


def _after(request: Request) -> str | None:
    given = request.query_params.get("after")
    return given if given and len(given) <= 64 and "\0" not in given else None


def _next(path: str) -> str:
    """A page of ours to go to after the sign-in; nothing that leads elsewhere."""
    return path if _PAGES.fullmatch(path) and not path.startswith("/jobs/now") else "/jobs"


def _go(path: str) -> RedirectResponse:
    return RedirectResponse(path, 303)


def _set_cookie(answer: Response, request: Request, name: str, value: str) -> None:
    answer.set_cookie(
        name, value, path="/", httponly=True, samesite="strict", secure=_is_https(request)
    )


def _drop_cookie(answer: Response, name: str) -> None:
    answer.delete_cookie(name, path="/", httponly=True, samesite="strict")


def _is_https(request: Request) -> bool:
    """Of the browser's connection: a proxy before this service may end it."""
    told = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return request.url.scheme == "https" or told == "https"


def _error(error: ApiError) -> Response:
    answer = html("error.html", error.status, code=error.status, message=str(error))
    if error.retry_after is not None:
        answer.headers["Retry-After"] = str(error.retry_after)
    return answer
