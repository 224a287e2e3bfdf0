"""Hooks that mkdocs calls while it builds the site (`hooks` in mkdocs.yml).

Reference pages are made from the code, pages of contents from the pages that exist. A line
`<!-- diagram NAME: caption -->` becomes `docs/diagrams/NAME.svg`, drawn in the page itself so that
it takes the page's colours; `<!-- charts NAME -->` becomes the charts of that benchmark's result,
and `<!-- table NAME -->` a table that is computed from results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from specbatch.tools.site.architectures_page import architectures_page
from specbatch.tools.site.cli_page import cli_page
from specbatch.tools.site.contents import contents
from specbatch.tools.site.errors_page import errors_page
from specbatch.tools.site.exports_page import exports_page
from specbatch.tools.site.figures import depth_charts, figures_page
from specbatch.tools.site.metrics_page import metrics_page
from specbatch.tools.site.navigation import loose, nav_of
from specbatch.tools.site.scaling import TABLES
from specbatch.tools.site.spec_page import settings_page, spec_page
from specbatch.tools.site.tables_page import tables_page

MADE: Mapping[str, Callable[[], str]] = {
    "reference/spec.md": spec_page,
    "reference/cli.md": cli_page,
    "reference/settings.md": settings_page,
    "reference/exports.md": exports_page,
    "reference/tables.md": tables_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
    "reference/architectures.md": architectures_page,
    "explanation/figures.md": figures_page,
}

_DRAWN = re.compile(r"^<!-- (diagram|charts|table) ([a-z0-9-]+)(?:: (.+?))? -->$", re.MULTILINE)


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the made pages, then order all pages in the navigation."""
    for path, make in MADE.items():
        files.append(File.generated(config, path, content=make()))
    written = {file.src_uri: file.content_string for file in files if file.src_uri.endswith(".md")}
    for path, content in contents(written).items():
        files.append(File.generated(config, path, content=content))
    paths = [file.src_uri for file in files]
    if homeless := loose(paths):
        raise ValueError(f"no section has {', '.join(homeless)}: see tools/site/navigation.py")
    config.nav = nav_of(paths)
    return files


def on_page_markdown(markdown: str, /, *, config: MkDocsConfig, **_: object) -> str:
    """Replace marks by their diagrams, charts and tables."""
    diagrams = Path(config.docs_dir) / "diagrams"

    def drawn(mark: re.Match[str]) -> str:
        kind, name, caption = mark.groups()
        if kind == "charts":
            return depth_charts(name)
        if kind == "table":
            return TABLES[name]()
        svg = (diagrams / f"{name}.svg").read_text().strip()
        flat = "".join(line.strip() + "\n" for line in svg.splitlines() if line.strip())
        return (
            f'<figure class="diagram">{flat}<figcaption>{escape(caption or "")}</figcaption>'
            "</figure>"
        )

    return _DRAWN.sub(drawn, markdown)
