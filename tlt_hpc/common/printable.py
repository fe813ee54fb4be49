"""Text made safe for terminals and pages, and the standard streams, through which all plain text goes.

One rule: supplied text may come from anywhere (paths, configuration, data, model text, messages of exceptions), so it
is escaped where it leaves the process, not where it enters. Plain text leaves through ``sys.stdout`` and ``sys.stderr``
(prints, log lines, warnings, tracebacks), which ``escape_streams`` wraps; rich's own sequences must pass, so
``console.TextConsole`` escapes what it is given to draw; pages use ``escape_control_characters`` as their
template's ``finalize``.
"""

from __future__ import annotations

import atexit
import codecs
import io
import os
import re
import sys
from contextlib import suppress
from typing import TextIO, cast

READER_GONE = 141
"""Exit status if the reader of the output has closed it: 128 + SIGPIPE, as a shell shows for other commands."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but newline and tab, DEL, C1, separators of lines, marks of direction, lone surrogates."""


def escape_control_characters(text: str) -> str:
    """The same with control characters as Python's escapes, such as \\x1b, which no terminal obeys and XML may have."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(message: object) -> str:
    """An error's message as a single line, whatever names it quotes."""
    return escape_control_characters(str(message)).replace("\n", "\\n")


class PrintableStream(io.TextIOBase):
    """A standard stream that writes printable text only; if its reader has closed it, the process ends silently.

    Raises (by ``write`` and ``flush``):
        SystemExit: the reader has gone, and nothing is lost with what was not printed.
    """

    outlives_reader = False
    """True if the process has work to do that does not end with its output; for all streams."""
    has_reader = True
    """True while the output can be read; for all streams."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return self.stream.encoding

    def write(self, text: str, /) -> int:
        """Write a text with its control characters escaped; returns its length."""
        try:
            self.stream.write(escape_control_characters(text))
        except BrokenPipeError:
            discard_output_or_exit(self.stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self.stream.flush()
        except BrokenPipeError:
            discard_output_or_exit(self.stream)

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Descriptor of the stream."""
        return self.stream.fileno()


def discard_output_or_exit(stream: TextIO) -> None:
    """Discard what is still to be written to a stream, and end the process if its output was all that it was for.

    Raises:
        SystemExit: nothing more is to be done.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    PrintableStream.has_reader = False
    if not PrintableStream.outlives_reader:
        raise SystemExit(READER_GONE)


def escape_streams() -> None:
    """Escape all that this process prints from here on, tracebacks included; every entry point begins with it.

    So is what the encoding lacks, as in a locale without UTF-8: no run ends by an arrow or a name in its log.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, PrintableStream):
        sys.stdout = cast(TextIO, PrintableStream(sys.stdout))
        atexit.unregister(_flush_at_exit)
        atexit.register(_flush_at_exit)
    if not isinstance(sys.stderr, PrintableStream):
        sys.stderr = cast(TextIO, PrintableStream(sys.stderr))


def raw_stream(stream: TextIO) -> TextIO:
    """The stream below, for code that writes terminal sequences and escapes the text between them."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def _flush_at_exit() -> None:
    """Flush before the interpreter does, which would report the failure and another exit status."""
    with suppress(SystemExit):
        sys.stdout.flush()
    if not PrintableStream.has_reader and not PrintableStream.outlives_reader:
        os._exit(READER_GONE)


def escape_spreadsheet_cell(cell: str) -> str:
    """A cell of a table that a spreadsheet would take for a formula, with a quote before it."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
