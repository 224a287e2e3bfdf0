"""An HTML page as tests look at it: well nested, accessible, and without anything to fetch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

_VOID = {"br", "hr", "link", "meta", "input", "img"}
_OF_SVG = {"rect", "line", "path", "circle"}
_FETCHED = re.compile(
    r"""https?:|//[a-z]|@import|url\(|<(script|img|iframe|object)[^>]+src""", re.I
)


@dataclass
class Page(HTMLParser):
    """What was found in a page."""

    html: str
    headings: list[tuple[int, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    tables: list[dict[str, int]] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    token_classes: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    @property
    def text(self) -> str:
        """All that is shown, in one line."""
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "a":
            self.links.append(str(given.get("href")))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag == "table":
            self.tables.append({"caption": 0, "unscoped": 0})
        if tag == "caption":
            self.tables[-1]["caption"] += 1
        if tag == "th" and "scope" not in given:
            self.tables[-1]["unscoped"] += 1
        if tag == "svg":
            assert given.get("role") == "img", "a chart is an image with a name"
            self.charts.append(str(given.get("aria-label")))
        classes = str(given.get("class", "")).split()
        if "t" in classes and "tokens" in str(self._open_class):
            self.token_classes.append(classes[1])
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "p":
            self._open_class = str(given.get("class", ""))

    _open_class = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID | _OF_SVG:
            raise AssertionError(f"<{tag}/> is no empty element")
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], f"</{tag}> within {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.texts.append(data)
            if self.headings and re.search("h[1-6]", " ".join(self._open)):
                level, said = self.headings[-1]
                self.headings[-1] = (level, said + data)


def check(html: str) -> Page:
    """The page, once it is seen to be self-contained and accessible."""
    page = Page(html)
    fetched = _FETCHED.findall(re.sub(r"<bdi>.*?</bdi>|<code>.*?</code>", "", html))
    assert not fetched, f"the page would fetch something: {fetched}"
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.ids) == len(set(page.ids)), "an id occurs twice"
    assert all(link.startswith("#") for link in page.links)
    for table in page.tables:
        assert table == {"caption": 1, "unscoped": 0}
    assert all(page.charts), "every chart has a name"
    assert len(page.scripts) == 1, "its own script, and no other"
    return page
