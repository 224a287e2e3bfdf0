"""The README's chart of the demo's two runs."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from specbatch.tools.site.demo_chart import Bar, Part, svg
from support.tree import ROOT

BARS = [
    Bar("run 1", "drafts <here>", "2.0 s", (Part(0.0, 1.5, "k1"), Part(1.5, 2.0, "k3"))),
    Bar("run 1 at depth 0", "by control steps", "4.0 s", (Part(0.0, 4.0, "hollow"),), (3.0, 5.0)),
]


def test_lengths_are_in_proportion_and_nothing_leaves_the_picture() -> None:
    chart = ElementTree.fromstring(svg(BARS))
    bars = [r for r in chart.iter() if r.get("height") == "30"]
    widths = [float(r.get("width", 0)) for r in bars]
    assert widths[0] / widths[2] == pytest.approx(1.5 / 4.0, rel=0.01)
    assert widths[1] / widths[2] == pytest.approx(0.5 / 4.0, rel=0.01)
    whole = float(chart.get("viewBox", "").split()[2])
    assert all(
        float(text.get("x", 0)) < whole for text in chart.iter() if text.tag.endswith("text")
    )
    assert chart.get("aria-label") == "run 1: 2.0 s; run 1 at depth 0: 4.0 s"


def test_the_readme_shows_the_runs_of_its_table() -> None:
    readme = (ROOT / "README.md").read_text()
    chart = (ROOT / "docs/images/two-runs.svg").read_text()
    rates = re.search(r"acceptance rate\D+([\d.]+)%\D+([\d.]+)%", readme)
    assert rates is not None
    for rate in rates.groups():
        assert f"{float(rate):.0f}% of drafts kept" in chart
    speed_up = re.search(r"measured speed-up over depth 0 .* ([\d.]+)× │\n", readme)
    assert speed_up is not None
    assert f"{speed_up[1]} times run 2" in chart
