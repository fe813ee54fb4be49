"""Finds the program in a response: the fenced blocks of Markdown, as models write them."""

from __future__ import annotations

import ast
import re
import textwrap
from itertools import islice

_OPENING = re.compile(r"(?:[ \t>]|[-*+] |\d{1,9}[.)] )*(`{3,}|~{3,})[ \t]*[{.]*([\w+-]*)[^`\n]*")
_PYTHON = re.compile(r"(i?python|py|pypy)[\d.]*")
_MARKDOWN = ("markdown", "md")
_MOST_ENDS = 20
"""Fences that are looked at as the end of one block."""


def extract_program(text: str) -> str:
    """The last fenced block that is marked as Python, else the last one, else the whole response."""
    blocks = _blocks(text)
    marked = [body for language, body in blocks if _PYTHON.fullmatch(language)]
    chosen = marked or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of all blocks; of a block of Markdown those in it."""
    lines, blocks, at = text.splitlines(keepends=True), list[tuple[str, str]](), 0
    while at < len(lines):
        opening = _OPENING.fullmatch(lines[at].rstrip())
        at += 1
        if opening is None:
            continue
        end = _end_of(lines, at, opening[1])
        again = next((line for line in range(at, end) if _opens_program(lines[line])), end)
        if again < end and not _is_python("".join(lines[at:end])):
            end = again - 1  # a draft was left without a closing fence
        body, language = _content(lines[at:end], opening, is_closed=end < len(lines)), opening[2].lower()
        blocks += _blocks(body) if language in _MARKDOWN else [(language, body)]
        at = end + 1
    return blocks


def _opens_program(line: str) -> bool:
    opening = _OPENING.fullmatch(line.rstrip())
    return opening is not None and _PYTHON.fullmatch(opening[2].lower()) is not None


def _end_of(lines: list[str], start: int, fence: str) -> int:
    """The line that closes a block: the first fence, unless only a later one leaves Python, as after a docstring's."""
    closing = re.compile(rf"[ \t>]*{fence[0]}{{{len(fence)},}}[ \t]*")
    ends, first = (at for at in range(start, len(lines)) if closing.fullmatch(lines[at].rstrip())), len(lines)
    for at in islice(ends, _MOST_ENDS):
        body, first = "".join(lines[start:at]), min(first, at)
        if not re.search(r"'''|\"\"\"", body) or _is_python(body):
            return at
    return first


def _content(lines: list[str], opening: re.Match[str], is_closed: bool) -> str:
    """The lines of a block without the marks and the indentation of the list or the quotation that it stands in."""
    if ">" in opening[0][: opening.start(1)]:
        lines = [re.sub(r"^[ \t]*> ?", "", line) for line in lines]
    body = textwrap.dedent("".join(lines))
    if not is_closed and opening[1] in body and not _is_python(body):  # closed at the end of a line of the program
        body = body.partition(opening[1])[0]
    return body


def _is_python(text: str) -> bool:
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
