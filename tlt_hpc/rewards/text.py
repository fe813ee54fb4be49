"""Rewards that are plain functions of a response's text.

All of them take time linear in the response at most, so they need no limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tlt_hpc.rewards.answer import Failure, Verdict

BOX = "\\boxed{"
TAIL_CHARACTERS = 4096
"""Characters at the end of a response in which ``numeric`` and ``choice`` look for the answer."""
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?(?:/\d+)?"
    r"|(?:(?<![\w)])[-+])?\.\d+"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_MIXED = re.compile(r"(?<![\d.,}])(\d{1,9})\s*\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}")
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\^(?:\{([-+]?\d+)\}|(\d))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""What opens or closes a group of LaTeX, or a command: ``\\{`` and ``\\}`` are characters to it."""
# possessive: blanks that both of the first two parts could have would otherwise be shared out in every way
_LETTER = re.compile(
    r"[\s(\[{*]*+(?:\\(?:text|math)(?:bf|rm)?\{)?[\s(]*+([A-Za-z])(?:[\s)\]}*.:,]*|[).:]\}?\\?\s.*)", re.DOTALL
)
_SAID_LETTER = re.compile(
    r"(?i:answer|option|choice)(?: I(?: (?!is\b)[a-z]{2,12}){1,3})?+"  # "the answer I would choose is C"
    r"[^A-Za-z]{0,20}(?:(?i:is)\b[^A-Za-z]{0,20})?([A-Z])(?![A-Za-z'])"
)


def boxed(text: str, truth: str) -> Verdict:
    """1.0 if the response ends with ``\\boxed{...}`` whose stripped content equals the answer as text."""
    return Verdict(float(boxed_answer(text) == truth.strip()))


def boxed_answer(text: str) -> str | None:
    """The content of the box that the response ends with; None if it ends otherwise."""
    text = text.rstrip()
    content, end = _find_box(text)
    return content if end == len(text) else None


def numeric(text: str, truth: str, tolerance: float) -> Verdict:
    """1.0 if the response's last number equals the answer's, within ``tolerance`` x max(1, answer).

    The response's is the one in its last box, else after its last ``####`` (GSM8K), else the last of all. Decimals and
    fractions are compared exactly, so the verdict is the same everywhere.
    """
    wanted = number_of(truth)
    if wanted is None:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} has no number")
    given = number_of(text)
    if given is None:
        return Verdict(0.0)
    return Verdict(float(abs(given - wanted) <= Fraction(tolerance) * max(Fraction(1), abs(wanted))))


def choice(text: str, truth: str) -> Verdict:
    """1.0 if the response gives the answer's letter.

    The response's is the one in its last box, else the last that follows "answer", "option" or "choice", else the one
    that its last line consists of.
    """
    wanted = _LETTER.fullmatch(truth.strip())
    if wanted is None:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} is no letter of a choice")
    return Verdict(float(letter_of(text) == wanted[1].upper()))


def tags(text: str, names: Sequence[str]) -> float:
    """1.0 if the response is ``<a>...</a><b>...</b>`` for these names in this order, each tag once."""
    text, position = text.strip(), 0
    for name in names:
        start, end = f"<{name}>", f"</{name}>"
        close = text.find(end, position)
        if not text.startswith(start, position) or close < 0 or text.count(start) != 1 or text.count(end) != 1:
            return 0.0
        position = close + len(end)
        while position < len(text) and text[position].isspace():
            position += 1
    return float(position == len(text))


def number_of(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None if there is none."""
    tail = text[-TAIL_CHARACTERS:]
    marked = last_box(tail)
    if marked is None and "####" in tail:
        marked = tail.rpartition("####")[2]
    if marked is None:
        found = _NUMBER.findall(_plain(tail))
        return _value(found[-1]) if found else None
    match = _NUMBER.search(_plain(marked.rpartition("=")[2]))
    return _value(match[0]) if match else None


def last_box(text: str) -> str | None:
    """The content of the last box that is closed before the text ends; None if there is none."""
    return _find_box(text)[0]


def _find_box(text: str) -> tuple[str | None, int]:
    """The content of the last box, if it is closed, and the index behind it; otherwise -1."""
    start, depth = text.rfind(BOX), 1
    for mark in _BRACE.finditer(text, start + len(BOX)) if start >= 0 else ():
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth == 0:
            return text[start + len(BOX) : mark.start()].strip(), mark.end()
    return None, -1


def letter_of(text: str) -> str | None:
    """The letter that a response chooses, in upper case; None if there is none."""
    tail = text[-TAIL_CHARACTERS:].rstrip()
    box = last_box(tail)
    if box is not None:
        match = _LETTER.fullmatch(box)
        return match[1].upper() if match else None
    if said := _SAID_LETTER.findall(tail):
        return str(said[-1])
    match = _LETTER.fullmatch(tail.rpartition("\n")[2])
    return match[1].upper() if match else None


def _plain(text: str) -> str:
    """The text without LaTeX's decoration of numbers."""
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text.replace("\u2212", "-"))
    text = _FRACTION.sub(r"\1\2/\3\4", text.replace("{,}", ","))
    return re.sub(r"\\[,!;$% ]|[$%]", "", _POWER_OF_TEN.sub(r"e\1\2", text))


def _value(number: str) -> Fraction | None:
    whole, _, divisor = number.replace(",", "").partition("/")
    if not divisor:
        return Fraction(whole)
    return Fraction(whole) / int(divisor) if int(divisor) else None
