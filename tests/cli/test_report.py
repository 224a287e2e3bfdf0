"""`specbatch report` of the demo job, seen by a real browser: light, dark, three screens, paper.

With WRITE_DOCS_IMAGES=1 the pictures in docs/images are made anew, of the whole demo job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_core_python
import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.observe.report.page import page
from specbatch.pipeline.operations.report import gather
from specbatch.schemas.settings import Settings
from support import demo
from support.big_job import make_big_job
from support.browser import Browser, BrowserError
from support.html_page import Page, check
from support.tree import ROOT

IMAGES = ROOT / "docs" / "images"
WRITES = os.environ.get("WRITE_DOCS_IMAGES") == "1"
OPENS_MS = 2000
SCREENS = ((390, 844), (768, 1024), (1440, 900))  # a telephone, a tablet, a desk
AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        opened = Browser().__enter__()
    except BrowserError as error:
        pytest.fail(str(error), pytrace=False)
    yield opened
    opened.__exit__(None, None, None)


@pytest.fixture
def reported(cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of the demo job, which was done here, a few sequences at a time."""
    monkeypatch.setenv("SPECBATCH_MAX_CONCURRENT_SEQUENCES", "8")
    tokens = () if WRITES else ("--max-tokens", 6)
    job = ("--output", folder / "out", "--group-size", 8, *tokens, "--json")
    done = cli("submit-job", demo.ROOT / "spec.yaml", "--local", *job)
    assert done.code == 0, done.err
    if WRITES:
        cli("audit", done.json["job"])
    told = cli("report", done.json["job"][:12], "--output", "report.html", "--samples", 3, "--json")
    assert told.json["bytes"] == (folder / "report.html").stat().st_size < 400_000
    return folder / "report.html"


def test_the_demo_job_looks_right_in_light_dark_and_on_paper(
    reported: Path, browser: Browser, tmp_path: Path
) -> None:
    page = check(reported.read_text())
    assert {"Money", "Sampled outputs", "Versions"} <= {said for _, said in page.headings}
    assert "_osx_support" in page.html  # ids and tags of the demo's rows
    timing = browser.open(reported)
    assert 0 < timing["loadEventEnd"] < OPENS_MS
    assert browser.requested() == [reported.as_uri()]
    assert browser.complaints() == []
    images = IMAGES if WRITES else tmp_path
    images.mkdir(exist_ok=True)
    pictures = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for width, height in SCREENS:
            browser.size(width, height)
            browser.evaluate("scrollTo({top: 0, behavior: 'instant'})")
            pictures[scheme, width] = browser.screenshot(whole=False)
            (images / f"report-{width}-{scheme}.png").write_bytes(pictures[scheme, width])
            assert_fits(browser, width)
            assert_no_barrier(browser)
        browser.size(1180, 1480)
        _show_token(browser)
        (images / f"report-tokens-{scheme}.png").write_bytes(browser.screenshot(whole=False))
    assert all(len(picture) > 30_000 for picture in pictures.values())
    assert len(set(pictures.values())) == len(pictures)
    colours = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours == "rgb(15, 20, 26)"
    assert_reads_by_hand(browser)
    assert_prints(browser)


def _show_token(browser: Browser) -> None:
    browser.evaluate(
        "document.getElementById('samples').scrollIntoView({behavior: 'instant'});"
        "document.querySelector('.tokens').focus({preventScroll: true})"
    )
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.press(key)


def assert_reads_by_hand(browser: Browser) -> None:
    """Keyboard and pointer both tell a token's origin and log-probability."""
    tip = "document.getElementById('tip')"
    _show_token(browser)
    said = browser.evaluate(f"{tip}.textContent")
    assert said.startswith("token 3: ")
    assert "log-probability" in said
    browser.press("ArrowLeft")
    assert browser.evaluate(f"{tip}.textContent").startswith("token 2: ")
    browser.press("Escape")
    assert browser.evaluate(f"{tip}.hidden") is True
    place, x, y = browser.evaluate(  # a token that has some width
        "(() => {const tokens = [...document.querySelector('.tokens').children];"
        "const place = tokens.findIndex(token => token.getClientRects()[0].width > 5);"
        "const box = tokens[place].getClientRects()[0];"
        "return [place + 1, box.x + box.width / 2, box.y + box.height / 2]})()"
    )
    browser.move_to(x, y)
    assert browser.evaluate(f"{tip}.hidden") is False
    assert browser.evaluate(f"{tip}.textContent").startswith(f"token {place}: ")
    inside = browser.evaluate(
        f"(() => {{const box = {tip}.getBoundingClientRect();"
        "return box.left >= 0 && box.right <= innerWidth && box.top >= 0})()"
    )
    assert inside


def assert_fits(browser: Browser, width: int) -> None:
    """Nothing is cut off: neither the page nor a table scrolls sideways, and no column is so narrow
    that its words break into pieces."""
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    cut = "filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 40))"
    assert browser.evaluate(f"[...document.querySelectorAll('.scroll')].{cut}") == []
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    cells = "[...document.querySelectorAll('.words td:nth-child(4), .cards dd.value')]"
    narrow = "filter(e => e.offsetWidth && e.offsetWidth < 90 && e.innerText.length > 9)"
    assert browser.evaluate(f"{cells}.{narrow}.map(e => e.innerText)") == []


def assert_no_barrier(browser: Browser) -> None:
    """axe finds nothing serious."""
    browser.evaluate(f"{AXE.read_text()}; 0")
    found = browser.evaluate(
        "axe.run({resultTypes: ['violations']}).then(done => done.violations"
        ".filter(v => ['serious', 'critical'].includes(v.impact))"
        ".map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120)).slice(0, 3)]))"
    )
    assert found == []


def assert_prints(browser: Browser) -> None:
    """On paper there is no dark and no menu, and all sections are there."""
    browser.prefer("dark", media="print")
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.prefer("light", media="print")
    paper = browser.pdf()
    assert paper.startswith(b"%PDF")
    assert len(paper) > 30_000
    browser.prefer("light")


def big_report(tmp_path: Path, rows: int) -> tuple[Path, Page]:
    job = make_big_job(tmp_path / "big.db", rows)
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'big.db'}", workspace=str(tmp_path))
    store = make_store(settings)
    try:
        html = page(gather(store, settings, job, samples=6, made_at=1.0))
    finally:
        store.close()
    path = tmp_path / "big.html"
    path.write_text(html)
    return path, check(html)


@pytest.mark.parametrize("rows", [4_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_large_job_opens_quickly_and_weighs_little(
    tmp_path: Path, browser: Browser, rows: int
) -> None:
    path, page = big_report(tmp_path, rows)
    assert path.stat().st_size < 200_000 < MOST_BYTES  # whatever the number of rows
    assert f"{rows:,} completions with {rows * 48:,} tokens" in page.text
    assert "empty_prompt 200" in page.text
    assert "The first and last 20 are shown." in page.text
    timing = browser.open(path)
    assert timing["loadEventEnd"] < OPENS_MS
    assert browser.requested() == [path.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.title") == "nightly: specbatch job big0000000000000001"


def test_a_page_may_run_no_script_but_its_own(tmp_path: Path, browser: Browser) -> None:
    """If a text became markup after all, the page's policy would still hold it."""
    path, _ = big_report(tmp_path, 500)
    evil = "<script>document.title = 'taken'</script><img src='http://203.0.113.1/x'>"
    path.write_text(path.read_text().replace("</h1>", f"</h1>{evil}", 1))
    browser.open(path)
    assert browser.evaluate("document.title").startswith("nightly")
    assert any("Content Security Policy" in said for said in browser.complaints())


def test_neither_torch_nor_arrow_is_needed(tmp_path: Path) -> None:
    job = make_big_job(tmp_path / "big.db", 500)
    script = (
        "import sys\n"
        "from specbatch.jobs.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "report", job, "--output", "made.html"],
        cwd=tmp_path,
        env={**os.environ, "SPECBATCH_DATABASE_URL": f"sqlite:///{tmp_path / 'big.db'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert "made.html" in done.stdout


def test_a_place_that_cannot_be_written_is_named(
    cli: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    job = make_big_job(tmp_path / "big.db", 500)
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", f"sqlite:///{tmp_path / 'big.db'}")
    refused = cli("report", job, "--output", tmp_path / "nowhere" / "report.html")
    assert "the report cannot be written to" in refused.complaint
    (tmp_path / "file").write_text("x")
    refused = cli("report", job, "--output", tmp_path / "file" / "report.html")
    assert "the report cannot be written to" in refused.complaint
    for folder in (".", "/", tmp_path):
        refused = cli("report", job, "--output", folder)
        assert "is a folder: name a file in it" in refused.complaint
    assert "no job 'nobody'" in cli("report", "nobody").complaint
    told = cli("report", job, "--no-texts")
    assert f"report-{job}.html" in told.out
    assert "text of row" not in (tmp_path / f"report-{job}.html").read_text()
