"""The page in a real browser: for eyes, hands and screen readers, on a telephone and at a desk,
light and dark; and its script, which follows a job while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from specbatch.pipeline.ledger.contract import Store
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


@dataclass(frozen=True)
class Desk:
    """A browser that has signed in at a service, and the service's store."""

    browser: Browser
    store: Store
    address: str

    def open(self, path: str) -> None:
        self.browser.open(f"{self.address}{path}")

    def sign_in(self) -> None:
        _, key = make_key(self.store, "laptop", "default", tuple(Scope), None)
        self.open("/sign-in")
        self.send(key)
        assert self.browser.evaluate("location.pathname") == "/jobs"
        assert self.browser.evaluate("document.cookie") == "", "no script sees the session"

    def send(self, key: str) -> None:
        self.browser.evaluate(f"document.getElementById('api-key').value = '{key}'")
        self.browser.leave_by("document.querySelector('button').click()")

    def pictures(self, name: str, folder: Path) -> None:
        """The page fits, and axe finds nothing, on each screen in light and dark."""
        for width, height in SCREENS:
            self.browser.size(width, height)
            for scheme in ("light", "dark"):
                self.browser.prefer(scheme)
                picture = self.browser.screenshot()
                (folder / f"{name}-{width}-{scheme}.png").write_bytes(picture)
                assert_no_barrier(self.browser, f"{name}, {width}, {scheme}")
            assert self.browser.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.fixture
def desk(tmp_path: Path, browser: Browser) -> Iterator[Desk]:
    with made_service(tmp_path / "serve-dir", MODELS) as made, listening(made.service) as port:
        found = Desk(browser, made.service.store, f"http://127.0.0.1:{port}")
        fill(found.store)
        found.sign_in()
        yield found


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


def assert_no_barrier(browser: Browser, where: str) -> None:
    """axe finds nothing serious."""
    browser.evaluate(f"{AXE.read_text()}; 0")
    serious = browser.evaluate(
        "axe.run({resultTypes: ['violations']}).then(done => done.violations"
        ".filter(v => ['serious', 'critical', 'moderate'].includes(v.impact))"
        ".map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120)).slice(0, 3)]))"
    )
    assert serious == [], where


def test_every_page_is_for_everybody(desk: Desk, tmp_path: Path) -> None:
    for name, path in PAGES.items():
        desk.open(path)
        if name != "error":
            assert desk.browser.complaints() == [], name
        desk.pictures(name, tmp_path)


def test_who_is_refused_is_told_so(desk: Desk, tmp_path: Path) -> None:
    desk.open("/sign-in")
    desk.send("sb-wrong")
    said = "document.querySelector('[role=alert]').innerText"
    assert desk.browser.evaluate(said) == "This API key is wrong: ask the operator for another."
    assert desk.browser.evaluate("document.activeElement.id") == "api-key"
    desk.pictures("sign-in", tmp_path)


def test_a_running_job_is_followed_to_its_end(desk: Desk) -> None:
    browser, store = desk.browser, desk.store
    desk.open("/jobs")
    row = f"[data-job='{RUNNING}']"
    link = f'document.querySelector("{row} a")'
    browser.evaluate(f"{link}.focus()")
    state = f'document.querySelector("{row} [data-cell=state]")'
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
        f'(() => {{ const row = document.querySelector("{row}");'
        "return [row.querySelector('progress').value, row.querySelector('.chip').className,"
        " row.querySelector('[data-cell=rows]').textContent,"
        " document.getElementById('said').textContent] })()"
    )
    assert told == [1, "chip good", "400 of 400", "evening: done"]
    assert browser.evaluate(f"document.activeElement === {link}"), "focus stays where it was"
    assert browser.complaints() == []


def test_hands_on_the_keyboard_get_everywhere(desk: Desk) -> None:
    browser = desk.browser
    desk.open(f"/reviews/{HELD}")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    shown = "getComputedStyle(document.activeElement).outlineStyle"
    for _ in range(8):
        browser.press("Tab")
        where = browser.evaluate("document.activeElement.outerHTML")
        assert browser.evaluate(shown) != "none", where


def test_the_report_runs_its_own_script_as_a_stranger(desk: Desk) -> None:
    browser = desk.browser
    desk.open(f"/jobs/{DONE}")
    browser.leave_by("document.querySelector('.actions a').click()")
    assert browser.complaints() == []
    assert browser.evaluate("self.origin") == "null"
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("Home")
    assert browser.evaluate("document.getElementById('tip').textContent").startswith("token 1: ")
