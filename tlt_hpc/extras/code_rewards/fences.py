"""Finds the program in a response: the fenced blocks of Markdown, as models write them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import deque
from itertools import islice

_OPENING = re.compile(r"(?:[ \t>]|[-*+] |\d{1,9}[.)] )*+(`{3,}+|~{3,}+)[ \t]*+[{.]*+([\w+-]*+)[^`\n]*+")
_PYTHON = re.compile(r"(i?python|py|pypy)[\d.]*")
_MARKDOWN = ("markdown", "md")
_MOST_ENDS = 20
"""Fences that are looked at as the end of one block."""
_MOST_OPENINGS = 20
"""Fences marked as Python that are looked at, the last ones."""
_MOST_PARSED = 200_000
"""Characters of one response that are parsed; after them whatever would have to be parsed is taken to be no Python."""
_PARSE_CHARACTERS = 1000
"""What a parse costs by itself, in characters."""


def extract_program(text: str) -> str:
    """The last fenced block that is marked as Python, else the last one, else the whole response."""
    lines = text.splitlines(keepends=True)
    openings = deque((at for at, line in enumerate(lines) if _opens_program(line)), _MOST_OPENINGS)
    start = openings[0] if len(openings) == _MOST_OPENINGS else 0
    blocks = _blocks(lines[start:], _Parser())
    marked = [body for language, body in blocks if _PYTHON.fullmatch(language)]
    chosen = marked or [body for _, body in blocks]
    return chosen[-1] if chosen else text


class _Parser:
    """Tells what is Python, in time that does not depend on what a response has."""

    def __init__(self) -> None:
        self._left = _MOST_PARSED

    @property
    def is_spent(self) -> bool:
        return self._left < 0

    def is_python(self, text: str) -> bool:
        self._left -= len(text) + _PARSE_CHARACTERS
        if self.is_spent:
            return False
        try:
            ast.parse(textwrap.dedent(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True


def _blocks(lines: list[str], parser: _Parser, is_markdown: bool = False) -> list[tuple[str, str]]:
    """Language and content of all blocks; of a block of Markdown those in it."""
    blocks, at = list[tuple[str, str]](), 0
    while at < len(lines):
        opening = _OPENING.fullmatch(lines[at].rstrip())
        at += 1
        if opening is None:
            continue
        end = _block_end(lines, at, opening[1], parser)
        again = next((line for line in range(at, end) if _opens_program(lines[line])), end)
        if again < end and not parser.is_python("".join(lines[at:end])):
            end = again - 1  # a draft was left without a closing fence
        body, language = _block_content(lines[at:end], opening, end < len(lines), parser), opening[2].lower()
        if language in _MARKDOWN and not is_markdown:
            blocks += _blocks(body.splitlines(keepends=True), parser, is_markdown=True)
        else:
            blocks.append((language, body))
        at = end + 1
    return blocks


def _opens_program(line: str) -> bool:
    opening = _OPENING.fullmatch(line.rstrip())
    return opening is not None and _PYTHON.fullmatch(opening[2].lower()) is not None


def _block_end(lines: list[str], start: int, fence: str, parser: _Parser) -> int:
    """The line that closes a block: the first fence, unless only a later one leaves Python, as after a docstring's."""
    closing = re.compile(rf"[ \t>]*{fence[0]}{{{len(fence)},}}[ \t]*")
    ends, first = (at for at in range(start, len(lines)) if closing.fullmatch(lines[at].rstrip())), len(lines)
    for at in islice(ends, _MOST_ENDS):
        body, first = "".join(lines[start:at]), min(first, at)
        if parser.is_spent or not re.search(r"'''|\"\"\"", body) or parser.is_python(body):
            return first if parser.is_spent else at
    return first


def _block_content(lines: list[str], opening: re.Match[str], is_closed: bool, parser: _Parser) -> str:
    """The lines of a block without the marks and the indentation of the list or the quotation that it stands in."""
    if ">" in opening[0][: opening.start(1)]:
        lines = [re.sub(r"^[ \t]*> ?", "", line) for line in lines]
    body = textwrap.dedent("".join(lines))
    if not is_closed and opening[1] in body and not parser.is_python(body):
        # closed at the end of a line of the program
        body = body.partition(opening[1])[0]
    return body
