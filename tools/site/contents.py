"""Pages of contents: every page of a folder with its first sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from posixpath import relpath

from specbatch.tools.site.markdown import page
from specbatch.tools.site.navigation import SECTIONS, flat, nav_of

_INTROS = {
    "howto": "Each page is one task. A test runs its commands as they are written here.",
    "explanation": "Why it works the way it does, and what you can rely on.",
    "reference": "Made from the code whenever the site is built, so the two cannot differ.",
    "runbooks": "One page for each alert: what it looks like, where to look first, what to do.",
}


def contents(written: Mapping[str, str]) -> dict[str, str]:
    """Path: page of contents, of every folder that has pages and none yet."""
    nav = nav_of(written)
    made = {}
    for folder, title, _ in SECTIONS:
        here = flat([entry for entry in nav if isinstance(entry, dict) and title in entry])
        index = f"{folder}/index.md"
        if here and not {index, f"{folder}/README.md"} & set(here):
            lines = [
                f"- [{title_of(written[path])}]({relpath(path, folder)}){_said(written[path])}"
                for path in here
            ]
            made[index] = page(title, _INTROS[folder], "\n".join(lines))
    return made


def title_of(markdown: str) -> str:
    """The text of the first heading."""
    found = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    return found[1].strip() if found else "?"


def _said(markdown: str) -> str:
    """The first sentence under the heading, without its links."""
    after = markdown.split("\n# ", 1)[-1] if not markdown.startswith("# ") else markdown
    for block in re.split(r"\n\s*\n", after)[1:]:
        text = " ".join(block.split())
        if (text and text[0].isalpha()) or text.startswith(("`", "**", "[")):
            text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
            sentence = re.split(r"(?<=\.) ", text)[0].rstrip(".:")
            return (
                f": {sentence[0].lower() if sentence[:2].istitle() else sentence[0]}{sentence[1:]}."
            )
    return ""
