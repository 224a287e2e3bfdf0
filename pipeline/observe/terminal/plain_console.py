"""rich's console, to which what is printed is text: no markup in it, and nothing to obey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from specbatch.schemas.visible import visible


class PlainConsole(Console):
    """Colours and the cursor are moved by our own styles alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Of cells and sentences: before their width is measured."""
        return super().render_str(visible(text), **options | {"markup": False, "emoji": False})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Of whatever else there is."""
        for segment in super().render(renderable, options):
            if segment.control or visible(segment.text) == segment.text:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
