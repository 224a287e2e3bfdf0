"""What is printed through our console is text: no markup, nothing that a terminal obeys."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specbatch.pipeline.observe.metrics import metric_names as names
from specbatch.pipeline.observe.metrics.registry import Metrics
from specbatch.pipeline.observe.terminal.plain_console import PlainConsole
from specbatch.schemas.visible import visible
from support.scraping import reading

EVIL = "\x1b]0;owned\x9b\u202e[link=https://evil.example]x[/link]:smile:"


def tabled() -> Table:
    table = Table(title=EVIL)
    table.add_column(EVIL, no_wrap=True)
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    return table


@pytest.mark.parametrize("terminal", [False, True])
def test_data_is_shown_whatever_it_is_put_in(terminal: bool) -> None:
    file = StringIO()
    console = PlainConsole(file=file, width=200, force_terminal=terminal, color_system=None)
    for shown in (EVIL, Text(EVIL), Panel(EVIL, title=Text(EVIL)), tabled()):
        console.print(shown)
    said = file.getvalue()
    assert visible(said) == said
    assert said.count(visible(EVIL)) == 8


def test_labels_of_metrics_are_spelled_out() -> None:
    metrics = Metrics()
    metrics.count(names.COST, EVIL)
    assert set(reading(metrics).series(names.COST)) == {(visible(EVIL),)}
