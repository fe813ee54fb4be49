"""Where rich is asked to draw: supplied text is never its markup, and control characters in it are shown escaped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tlt_hpc.common.printable import discard_output_or_exit, escape_control_characters, raw_stream

_SHOWN_BROKEN = 20


class TextConsole(Console):
    """A console that draws strings as they are; styles come from ``rich.text.Text`` and from arguments."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, force_terminal: bool | None = None) -> None:
        stream = raw_stream(sys.stderr if stderr else sys.stdout)
        super().__init__(
            file=stream, width=width, force_terminal=force_terminal, markup=False, emoji=False, highlight=False
        )

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """As rich does, of what is printable: escaped before it is measured."""
        return super().render_str(escape_control_characters(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, with the last word on all text: no other way leads from a ``Text`` to the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_control_characters(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """As for plain text."""
        self.quiet = True
        discard_output_or_exit(self.file)  # type: ignore[arg-type]


def make_console(width: int = 120) -> TextConsole:
    """A console for standard output, as wide as the terminal, elsewhere of ``width`` columns."""
    return TextConsole(width=None if sys.stdout.isatty() else width)


def print_row_errors(console: Console, errors: Sequence[ValueError]) -> None:
    """Print what is wrong with the first of some rows, and how many more there are."""
    for error in errors[:_SHOWN_BROKEN]:
        console.print(str(error), style="red", soft_wrap=True)
    if len(errors) > _SHOWN_BROKEN:
        console.print(f"... and {len(errors) - _SHOWN_BROKEN:,} more broken rows")
