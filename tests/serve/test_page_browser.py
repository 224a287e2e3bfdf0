"""The page in a real browser: for eyes, hands and screen readers, on a telephone and at a desk, light
and dark; and its script, which follows a job while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_core_python
import pytest
from contracts.shorthand import claim_job, found
from ledger.builders import LEASE_SEC, NO_TIME, RESULTS, completion
from serve.conftest import listening, made_service
from serve.test_page import job_id, rollout_of
from serve.test_sign_in import MODELS
from serve.visitor import done_job, held_job, started_job

from specbatch.jobs.serve.keys import make_key
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.serving import Scope
from support.browser import Browser, BrowserError

pytestmark = pytest.mark.integration

AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
SCREENS = ((390, 844), (1280, 860))  # a telephone, a desk
LONG = "a-name-that-somebody-has-made-of-" + "many-" * 12 + "words"
DONE, HELD, RUNNING = job_id(1), job_id(2), job_id(9)
PAGES = {
    "jobs": "/jobs",
    "no-jobs": "/jobs?state=queued",
    "job": f"/jobs/{DONE}",
    "running": f"/jobs/{RUNNING}",
    "rollouts": "/rollouts",
    "rollout": "/rollouts/1",
    "tenants": "/tenants",
    "reviews": "/reviews",
    "review": f"/reviews/{HELD}",
    "error": "/jobs/nothing",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        opened = Browser(loopback=True).__enter__()
    except BrowserError as error:
        pytest.fail(str(error), pytrace=False)
    yield opened
    opened.__exit__(None, None, None)


@pytest.fixture
def store(tmp_path: Path, browser: Browser) -> Iterator[Any]:
    """Of a service at which the browser has signed in. `browser.at`: its address."""
    with made_service(tmp_path / "serve-dir", MODELS) as made:
        store = made.service.store
        fill(store)
        with listening(made.service) as port:
            browser.at = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]  # this test's
            sign_in(browser, store)
            yield store


def fill(store: Any) -> None:
    done_job(store, DONE)
    held_job(store, HELD, "held back for review by policy `judge` (judged)", name="letters")
    failed = [completion(row, error="the prompt is too long") for row in range(4)]
    done_job(store, job_id(3), failed, JobState.PARTIAL, name=LONG)
    done_job(store, job_id(4), None, JobState.FAILED, "the input has no column `prompt`")
    started_job(store, RUNNING, 400, name="evening", budget_usd=40.0)
    found(store.claim_group(RUNNING, 0, Stage.VERIFY, "w1", LEASE_SEC))
    rollout_of(store, DeployScope("default"), "trained last night")
    rollout_of(store, DeployScope("default", "letters"), "trained on letters")
    store.stop_rollout(DeployScope("default", "letters"), "enough seen")


def sign_in(browser: Browser, store: Any) -> None:
    _, key = make_key(store, "laptop", "default", tuple(Scope), None)
    browser.open(at(browser, "/sign-in"))
    browser.evaluate(f"document.getElementById('api-key').value = '{key}'")
    browser.leave_by("document.querySelector('button').click()")
    assert browser.evaluate("location.pathname") == "/jobs"
    assert browser.evaluate("document.cookie") == "", "no script sees the session"


def at(browser: Browser, path: str) -> str:
    return f"{browser.at}{path}"  # type: ignore[attr-defined]  # set by the fixture


def assert_no_barrier(browser: Browser, where: str) -> None:
    """axe finds nothing serious."""
    browser.evaluate(f"{AXE.read_text()}; 0")
    serious = browser.evaluate(
        "axe.run({resultTypes: ['violations']}).then(done => done.violations"
        ".filter(v => ['serious', 'critical', 'moderate'].includes(v.impact))"
        ".map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120)).slice(0, 3)]))"
    )
    assert serious == [], where


def assert_fits(browser: Browser, width: int, where: str) -> None:
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, where


@pytest.mark.usefixtures("store")
def test_every_page_is_for_everybody(browser: Browser, tmp_path: Path) -> None:
    for name, path in PAGES.items():
        browser.open(at(browser, path))
        if name != "error":
            assert browser.complaints() == [], name
        for width, height in SCREENS:
            browser.size(width, height)
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                picture = browser.screenshot()
                (tmp_path / f"{name}-{width}-{scheme}.png").write_bytes(picture)
                assert_no_barrier(browser, f"{name}, {width}, {scheme}")
            assert_fits(browser, width, f"{name}, {width}")
    browser.leave_by("document.querySelector('.who button')?.click() ?? history.back()")
    browser.prefer("light")


def test_who_is_refused_is_told_so(browser: Browser, store: Any, tmp_path: Path) -> None:
    browser.open(at(browser, "/sign-in"))
    browser.evaluate("document.getElementById('api-key').value = 'sb-wrong'")
    browser.leave_by("document.querySelector('button').click()")
    assert browser.evaluate("document.querySelector('[role=alert]').innerText") == (
        "This API key is wrong: ask the operator for another."
    )
    assert browser.evaluate("document.activeElement.id") == "api-key"
    for width, height in SCREENS:
        browser.size(width, height)
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            (tmp_path / f"sign-in-{width}-{scheme}.png").write_bytes(browser.screenshot())
            assert_no_barrier(browser, f"sign-in, {width}, {scheme}")
        assert_fits(browser, width, f"sign-in, {width}")
    browser.prefer("light")
    sign_in(browser, store)


def test_a_running_job_is_followed_to_its_end(browser: Browser, store: Any) -> None:
    browser.size(1280, 860)
    browser.open(at(browser, "/jobs"))
    row = f"[data-job='{RUNNING}']"
    link = f"document.querySelector(\"{row} a\")"
    browser.evaluate(f"{link}.focus()")
    state = f"document.querySelector(\"{row} [data-cell=state]\")"
    assert browser.evaluate(f"{state}.textContent") == "verifying"
    follow = (  # resolves when the script has put this text there
        f"new Promise(done => {{ const cell = {state};"
        "const look = () => cell.textContent === 'done' && done(true);"
        "new MutationObserver(look).observe(cell, {childList: true, characterData: true,"
        " subtree: true}); look(); })"
    )
    store.expire_leases(RUNNING, "w1")
    work = found(store.claim_group(RUNNING, 0, Stage.VERIFY, "w2", LEASE_SEC))
    store.advance(work.lease, Stage.RECORD, RESULTS, NO_TIME)
    work = found(store.claim_group(RUNNING, 0, Stage.RECORD, "w2", LEASE_SEC))
    store.commit_group(work.lease, [completion(row) for row in range(400)], NO_TIME, {})
    store.finish_job(claim_job(store, Stage.PUBLISH, job_id=RUNNING).lease, JobState.DONE)
    assert browser.evaluate(follow) is True
    told = browser.evaluate(
        f"(() => {{ const row = document.querySelector(\"{row}\");"
        "return [row.querySelector('progress').value, row.querySelector('.chip').className,"
        " row.querySelector('[data-cell=rows]').textContent,"
        " document.getElementById('said').textContent] })()"
    )
    assert told == [1, "chip good", "400 of 400", "evening: done"]
    assert browser.evaluate(f"document.activeElement === {link}"), "focus stays where it was"
    assert browser.complaints() == []


@pytest.mark.usefixtures("store")
def test_hands_on_the_keyboard_get_everywhere(browser: Browser) -> None:
    browser.open(at(browser, f"/reviews/{HELD}"))
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    shown = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(8):
        browser.press("Tab")
        assert browser.evaluate(shown) != "none", browser.evaluate("document.activeElement.outerHTML")


@pytest.mark.usefixtures("store")
def test_the_report_runs_its_own_script_as_a_stranger(browser: Browser) -> None:
    browser.open(at(browser, f"/jobs/{DONE}"))
    browser.leave_by("document.querySelector('.actions a').click()")
    assert browser.complaints() == []
    assert browser.evaluate("self.origin") == "null"
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("Home")
    assert browser.evaluate("document.getElementById('tip').textContent").startswith("token 1: ")
