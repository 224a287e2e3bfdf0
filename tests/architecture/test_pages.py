"""What the pages about the inside name exists, and the pages are short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.tree import ROOT

INSIDE = ("inside-the-engine", "inside-the-store", "inside-operations", "what-measuring-changed")
PAGES = ("ARCHITECTURE.md", *(f"docs/explanation/{name}.md" for name in INSIDE))
PLACES = ("", "kernels", "pipeline", "pipeline/engines/exact", "pipeline/engines")  # paths begin at


def walk() -> list[Path]:
    """The files that the way of one prompt leads through."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.split("## How a prompt travels")[1].split("\n## ")[0]
    return [ROOT / path for path in re.findall(r"\]\(([^)]+\.py)\)", section)]


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(
        r"`([\w/]+/[\w.]+\.(?:py|h|c))`|`([a-z_]+(?:/[a-z_]+)+/)`", (ROOT / page).read_text()
    )
    lost = [
        path
        for path in map("".join, named)
        if not any((ROOT / place / path).exists() for place in PLACES)
    ]
    assert not lost


def test_the_way_of_one_prompt_is_read_in_an_hour() -> None:
    files = walk()
    assert len(set(files)) == len(files) <= 15
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2500


@pytest.mark.parametrize(("page", "most"), [("README.md", 100), ("ARCHITECTURE.md", 200)])
def test_pages_that_everybody_reads_are_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most
