"""The built site: strict, whole, without a broken link or anything of another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs.conftest import Site
from docs.pages import DOCS, written_pages

from specbatch.tools.site.hooks import MADE
from support.tree import ROOT

pytestmark = pytest.mark.pipeline  # builds the whole site

# Where pages may link to. Nothing is fetched in a test: their form is checked.
HOSTS = ("squidfunk.github.io",)  # the theme names its maker
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


@dataclass
class Page:
    """What a built page has in it."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.page.anchors.add(given["id"])
        if tag == "a":
            self.page.anchors.add(given.get("name", ""))
            if "href" in given:
                self.page.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.page.loaded.append(given["href"])
        elif tag in LOADING and LOADING[tag] in given:
            self.page.loaded.append(given[LOADING[tag]])


@cache
def read(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.page


def pages(site: Site) -> list[Path]:
    return sorted(site.folder.rglob("*.html"))


def broken(site: Site) -> Iterator[str]:
    """Every link to what is not there."""
    for path in pages(site):
        where = path.relative_to(site.folder)
        for link in (*read(path).links, *read(path).loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme != "https" or parts.netloc not in HOSTS:
                    yield f"{where}: {link} leads to a host that no list has"
                continue
            base = site.folder if parts.path.startswith("/") else path.parent
            target = path
            if parts.path:
                target = (base / unquote(parts.path).lstrip("/")).resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{where}: {link}"
            elif parts.fragment and unquote(parts.fragment) not in read(target).anchors:
                yield f"{where}: {link} (no such anchor)"


def test_it_builds_without_a_warning(site: Site) -> None:
    assert site.warnings == []
    assert (site.folder / "index.html").is_file()


def test_no_link_is_broken(site: Site) -> None:
    found = list(broken(site))
    links = sum(len(read(path).links) for path in pages(site))
    print(f"\nbuilt pages: {len(pages(site))}, links: {links}, broken links: {len(found)}")
    assert found == []
    assert links > 500


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="none.html">x</a><a href="#none">x</a><script src="https://cdn.io/x.js"></script>'
    )
    assert len(list(broken(Site(tmp_path, [])))) == 3


def test_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    """Neither by the pages, nor by the scripts and styles that are theirs."""
    for path in pages(site):
        assert [link for link in read(path).loaded if "//" in link] == []
    for style in site.folder.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?:", style.read_text()) == [], style


def test_search_finds_pages_without_a_server(site: Site) -> None:
    index = (site.folder / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    for page in (*written_pages(), *MADE):
        built = page.removesuffix(".md").removesuffix("README") + ".html"
        assert f'"{built.replace("/.html", "/index.html")}"' in index, page
    assert "iframe-worker.js" in (site.folder / "index.html").read_text()
    assert (site.folder / "assets" / "iframe-worker.js").is_file()


def test_every_page_is_in_the_navigation(site: Site) -> None:
    linked = {link.partition("#")[0] for link in read(site.folder / "index.html").links}
    left_out = [
        str(path.relative_to(site.folder))
        for path in pages(site)
        if str(path.relative_to(site.folder)) not in linked | {"404.html", "index.html"}
    ]
    assert left_out == []


@pytest.mark.parametrize("name", ["README", "CONTRIBUTING", "ARCHITECTURE", "CHANGELOG"])
def test_links_of_the_root_s_files_lead_somewhere(name: str) -> None:
    text = (ROOT / f"{name}.md").read_text()
    headings = {_anchor(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            assert urlsplit(target).scheme == "https", target
            assert urlsplit(target).netloc, target
            continue
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / path).exists(), target
        assert path or anchor in headings, target


def test_diagrams_are_used_and_named(site: Site) -> None:
    written = "".join((DOCS / page).read_text() for page in written_pages())
    for diagram in (DOCS / "diagrams").glob("*.svg"):
        assert f"<!-- diagram {diagram.stem}: " in written, diagram
        assert 'role="img" aria-label="' in diagram.read_text(), diagram
    for path in pages(site):
        assert "<!-- diagram" not in path.read_text()


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
