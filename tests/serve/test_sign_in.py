"""Signing in to the page: whose session it is, how long it lasts, what another site could do."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serve.conftest import Made, made_service
from serve.visitor import Visitor, checked, done_job, held_job

from specbatch.jobs.serve.guard import HEADERS
from specbatch.jobs.serve.keys import make_key
from specbatch.jobs.serve.models import ServedModel
from specbatch.jobs.serve.page import COOKIE, FORM_COOKIE
from specbatch.jobs.serve.rates import MOST_COUNTS, Rate, Rates
from specbatch.jobs.serve.rendering import POLICY
from specbatch.jobs.serve.sessions import LIFE_SEC, MOST_OF_KEY, Sessions
from specbatch.schemas.serving import Scope

MODELS = {"small": ServedModel("small", {"verifier": "models/small"}, Path())}
JOB, HELD = "job00000000000001", "job00000000000002"
PAGES = (
    *("/jobs", f"/jobs/{JOB}", f"/jobs/{JOB}/report", "/jobs/now", "/rollouts", "/rollouts/1"),
    *("/tenants", "/reviews", f"/reviews/{HELD}"),
)


class Clock:
    """Seconds that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with made_service(tmp_path / "serve-dir", MODELS) as found:
        done_job(found.service.store, JOB)
        held_job(found.service.store, HELD)
        yield found


@pytest.fixture
def visitor(made: Made) -> Visitor:
    return Visitor(made.service)


# --- who is let in --------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_shown_without_a_key(visitor: Visitor, path: str) -> None:
    answer = visitor.get(path)
    assert answer.status_code == 401
    assert checked(answer.text).headings == [(1, "specbatch Sign in")]
    assert "nightly" not in answer.text


def test_the_root_leads_to_the_sign_in_and_then_to_the_jobs(visitor: Visitor) -> None:
    assert visitor.get("/").headers["location"] == "/sign-in"
    visitor.sign_in()
    assert visitor.get("/").headers["location"] == "/jobs"
    assert "nightly" in visitor.page("/jobs").text


@pytest.mark.parametrize(
    "key", ["", "nobodys", "sb-0123456789ab-" + "x" * 43, "sk-äö\0", "x" * 5000]
)
def test_a_wrong_key_lets_nobody_in(visitor: Visitor, key: str) -> None:
    answer = visitor.send_key(key)
    assert answer.status_code == 401
    assert "This API key is wrong: ask the operator for another." in answer.text
    assert COOKIE not in answer.cookies
    assert not key or key not in answer.text
    assert visitor.get("/jobs").status_code == 401


def test_a_key_must_be_allowed_to_read(visitor: Visitor) -> None:
    _, key = make_key(visitor.service.store, "writer", "default", (Scope.WRITE,), None)
    answer = visitor.send_key(key)
    assert answer.status_code == 403
    assert "has no scope `read`" in answer.text
    assert visitor.get("/jobs").status_code == 401


def test_an_expired_key_lets_nobody_in_and_ends_its_session(made: Made, visitor: Visitor) -> None:
    store = made.service.store
    _, old = make_key(store, "old", "default", tuple(Scope), time.time() - 1)
    assert "This API key is expired" in visitor.send_key(old).text
    row, key = make_key(store, "short", "default", tuple(Scope), time.time() + 1000)
    assert visitor.send_key(key).status_code == 303
    assert visitor.get("/jobs").status_code == 200
    with sqlite3.connect(Path(made.settings.workspace) / "specbatch.db") as db:
        db.execute("UPDATE api_keys SET expires_at = 1 WHERE key_id = ?", (row.key_id,))
    ended = visitor.get("/jobs")
    assert ended.status_code == 401
    assert "This API key is expired" in ended.text
    with sqlite3.connect(Path(made.settings.workspace) / "specbatch.db") as db:
        db.execute("UPDATE api_keys SET expires_at = NULL WHERE key_id = ?", (row.key_id,))
    assert visitor.get("/jobs").status_code == 401, "the session is over, not only asleep"


def test_a_revoked_key_ends_all_its_sessions_at_once(made: Made, visitor: Visitor) -> None:
    key = visitor.sign_in()
    made.service.store.revoke_api_key(key.split("-")[1])
    for path in PAGES:
        assert visitor.get(path).status_code == 401, path
    assert visitor.get("/").headers["location"] == "/sign-in"


def test_signing_out_ends_the_session_for_whoever_has_its_cookie(visitor: Visitor) -> None:
    visitor.sign_in()
    cookie = visitor.http.cookies[COOKIE]
    answer = visitor.post("/sign-out", {"csrf": visitor.token("/jobs")})
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    visitor.http.cookies.set(COOKIE, cookie)
    assert visitor.get("/jobs").status_code == 401


def test_each_sign_in_has_a_new_cookie_and_ends_the_browsers_old_session(visitor: Visitor) -> None:
    visitor.sign_in()
    first = visitor.http.cookies[COOKIE]
    visitor.sign_in("other")
    assert visitor.http.cookies[COOKIE] != first
    visitor.http.cookies.clear()
    visitor.http.cookies.set(COOKIE, first)
    assert visitor.get("/jobs").status_code == 401


@pytest.mark.parametrize(
    ("then", "there"),
    [
        (f"/jobs/{JOB}", f"/jobs/{JOB}"),
        (f"/jobs/{JOB}/report", f"/jobs/{JOB}/report"),
        ("/reviews", "/reviews"),
        *((evil, "/jobs") for evil in ("//evil.example", "https://evil.example", "/\\evil", "")),
        *((odd, "/jobs") for odd in ("/v1/files", "/sign-out", "/jobs\r\nX: y", "/jobs/now")),
    ],
)
def test_the_sign_in_leads_to_a_page_of_ours_alone(visitor: Visitor, then: str, there: str) -> None:
    _, key = make_key(visitor.service.store, "k", "default", tuple(Scope), None)
    assert visitor.send_key(key, then).headers["location"] == there


def test_who_is_asked_for_a_key_comes_to_the_page_that_was_asked_for(visitor: Visitor) -> None:
    assert f'name="next" value="/jobs/{JOB}"' in visitor.get(f"/jobs/{JOB}").text


# --- cookies --------------------------------------------------------------------------------------
def test_cookies_are_for_this_site_and_no_script(visitor: Visitor) -> None:
    _, key = make_key(visitor.service.store, "k", "default", tuple(Scope), None)
    asked, let_in = visitor.get("/sign-in"), visitor.send_key(key)
    for answer, name in ((asked, FORM_COOKIE), (let_in, COOKIE)):
        said = answer.headers["set-cookie"]
        first, *flags = said.split(", ")[0].split("; ")
        assert first.startswith(f"{name}=")
        assert {"HttpOnly", "Path=/", "SameSite=strict"} == set(flags)
    assert key not in let_in.headers["set-cookie"]


def test_behind_tls_cookies_never_go_without_it(made: Made) -> None:
    plain = Visitor(made.service)
    told = plain.get("/sign-in", headers={"X-Forwarded-Proto": "https"})
    assert "; Secure" in told.headers["set-cookie"]
    direct = Visitor(made.service, "https://testserver")
    direct.sign_in()
    cookie = next(one for one in direct.http.cookies.jar if one.name == COOKIE)
    assert cookie.secure


def test_a_planted_cookie_is_not_made_a_session(visitor: Visitor) -> None:
    """Whoever could set a cookie in a browser before the sign-in does not know the later one."""
    planted = "p" * 43
    visitor.http.cookies.set(FORM_COOKIE, planted)
    visitor.http.cookies.set(COOKIE, planted)
    visitor.sign_in()
    assert planted not in [one.value for one in visitor.http.cookies.jar if one.name == COOKIE][-1:]
    visitor.http.cookies.clear()
    visitor.http.cookies.set(COOKIE, planted)
    assert visitor.get("/jobs").status_code == 401


# --- forms of other sites -------------------------------------------------------------------------
@pytest.mark.parametrize("token", [None, "", "0" * 64, "ä"])
def test_a_form_without_the_sessions_token_does_nothing(
    made: Made, visitor: Visitor, token: str | None
) -> None:
    form = {"other": "x"} if token is None else {"csrf": token}
    _, key = make_key(made.service.store, "k", "default", tuple(Scope), None)
    visitor.get("/sign-in")
    assert visitor.post("/sign-in", {**form, "key": key}).status_code == 403
    visitor.sign_in()
    asked = {**form, "decide-0-0": "blocked"}
    refused = visitor.post(f"/reviews/{HELD}", asked)
    assert refused.status_code == 403
    assert "This form is not of your session" in refused.text
    assert len(made.service.store.reviews(HELD).pending) == 2
    assert visitor.post("/sign-out", form).status_code == 403
    assert visitor.get("/jobs").status_code == 200, "still signed in"


def test_another_sessions_token_is_as_good_as_none(made: Made, visitor: Visitor) -> None:
    other = Visitor(made.service, app=visitor.app)
    other.sign_in()
    visitor.sign_in()
    form = {"csrf": other.token("/jobs"), "decide-0-0": "blocked"}
    assert visitor.post(f"/reviews/{HELD}", form).status_code == 403
    assert other.post(f"/reviews/{HELD}", form).status_code == 303


def test_only_small_forms_are_read(visitor: Visitor) -> None:
    visitor.sign_in()
    json = visitor.http.post("/sign-out", json={"csrf": visitor.token("/jobs")})
    assert json.status_code == 415
    large = visitor.post("/sign-out", {"csrf": "x" * 70_000})
    assert large.status_code == 413
    many = visitor.post("/sign-out", {f"f{i}": "" for i in range(300)})
    assert many.status_code == 400
    assert visitor.get("/jobs").status_code == 200


# --- rates ----------------------------------------------------------------------------------------
def test_an_address_may_try_ten_keys_a_minute(visitor: Visitor) -> None:
    for _ in range(10):
        assert visitor.send_key("wrong").status_code == 401
    _, key = make_key(visitor.service.store, "k", "default", tuple(Scope), None)
    answer = visitor.send_key(key)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= 6
    assert visitor.get("/jobs").status_code == 401


def test_pages_count_as_requests_of_their_key(made: Made) -> None:
    visitor = Visitor(replace(made.service, rates=Rates(Rate(2, 3600.0))))
    visitor.sign_in()
    assert [visitor.get("/jobs").status_code for _ in range(3)] == [200, 200, 429]
    assert int(visitor.get("/jobs").headers["retry-after"]) > 0


def test_counts_of_addresses_that_came_once_are_forgotten() -> None:
    clock = Clock()
    rates = Rates(Rate(1, 60.0), clock)
    for number in range(3 * MOST_COUNTS):
        rates.wait_sec(f"address {number}")
        clock.now += 0.01
    assert len(rates._full_at) <= 2 * MOST_COUNTS + 1
    assert rates.wait_sec(f"address {3 * MOST_COUNTS - 1}") > 0.0, "the last one still counts"


# --- sessions -------------------------------------------------------------------------------------
def test_a_session_ends_by_itself() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    cookie = sessions.begin("k")
    clock.now += LIFE_SEC - 1
    assert sessions.find(cookie) is not None
    clock.now += 1
    assert sessions.find(cookie) is None


def test_the_oldest_sessions_of_a_key_make_room_and_others_stay() -> None:
    sessions = Sessions(Clock())
    other = sessions.begin("other")
    mine = [sessions.begin("mine") for _ in range(MOST_OF_KEY + 3)]
    assert [sessions.find(cookie) is None for cookie in mine] == [True] * 3 + [False] * MOST_OF_KEY
    assert sessions.find(other) is not None


def test_what_is_said_is_shown_once() -> None:
    sessions = Sessions(Clock())
    cookie = sessions.begin("k")
    sessions.say(cookie, "done")
    assert [sessions.take_said(cookie) for _ in range(2)] == ["done", None]
    assert sessions.take_said("another") is None


def test_no_process_knows_anothers_tokens() -> None:
    cookie = "c" * 43
    first, second = Sessions(), Sessions()
    assert first.is_form_token(cookie, first.form_token(cookie))
    assert not second.is_form_token(cookie, first.form_token(cookie))
    assert not first.is_form_token("", first.form_token(""))


# --- headers --------------------------------------------------------------------------------------
def test_every_answer_says_what_a_browser_may_do_with_it(visitor: Visitor) -> None:
    paths = ("/", "/sign-in", "/static/page.css", "/static/nothing", *PAGES)
    before = [visitor.get(path) for path in paths]
    visitor.sign_in()
    after = [visitor.get(path) for path in paths]
    for answer in (*before, *after, visitor.post("/sign-out", {})):
        headers = answer.headers
        wanted = HEADERS | {"Content-Security-Policy": POLICY}
        if str(answer.request.url.path).startswith("/static/page"):
            wanted["Cache-Control"] = "public, max-age=31536000, immutable"
        if answer.request.url.path.endswith("/report") and answer.status_code == 200:
            policy = headers["content-security-policy"]
            del wanted["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'sha256-" in policy
            assert policy.endswith("frame-ancestors 'none'; sandbox allow-scripts")
        assert {name: headers[name] for name in wanted} == wanted, answer.request.url


def test_the_policy_allows_no_script_or_style_within_a_page() -> None:
    assert "unsafe" not in POLICY
    nothing = {f"{name} 'none'" for name in ("default-src", "frame-ancestors", "base-uri")}
    own = {f"{name} 'self'" for name in ("script-src", "style-src", "form-action")}
    assert nothing | own | {"img-src 'self' data:"} <= set(POLICY.split("; "))
