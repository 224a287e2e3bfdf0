"""rich's console, which prints data as text: no markup in it, and nothing that a terminal obeys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from specbatch.schemas.visible import visible


class PlainConsole(Console):
    """Only our own styles set colours and move the cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """`head`, or a pager, has read enough: that is no failure."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(0) from None

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape cells and sentences before their width is measured."""
        return super().render_str(visible(text), **options | {"markup": False, "emoji": False})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape everything else."""
        for segment in super().render(renderable, options):
            if segment.control or visible(segment.text) == segment.text:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
