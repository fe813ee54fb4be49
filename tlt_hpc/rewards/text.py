"""Rewards that are plain functions of a response's text.

All of them take time linear in the response at most, so they need no limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tlt_hpc.rewards.answer import Failure, Verdict
from tlt_hpc.rewards.final_answer import (
    TAIL_CHARACTERS,
    FoundAnswer,
    extract_mathematics,
    final_box_content,
    find_answer,
    text_after_reasoning,
)
from tlt_hpc.rewards.mathematics.exact import exact_value
from tlt_hpc.rewards.mathematics.expression import parse_expression
from tlt_hpc.rewards.mathematics.node import Node, UnreadableError
from tlt_hpc.rewards.mathematics.notation import normalise_notation

_NUMERAL = re.compile(
    r"(?<![A-Za-z0-9_.^])(?:[-+] ?)?(?:\\frac\{-?\d+\}\{-?\d+\}|(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+)?)"
    r"(?: ?(?:\\times|\\cdot|\*) ?10\^(?:\{-?\d+\}|\d))?"
)
_OTHER_MATHS = re.compile(r"\\(?!text|%|,|;| )|[\^_<>*/|]")
_LETTER = re.compile(
    r"[\s(\[]*+(?:(?:option|choice|answer|(?:so|thus|hence|therefore)(?=[\s,:]))[\s:,]*+)?"
    r"[(\[]*+([A-Za-z])(?:[\s)\].:,]*|(?:[).:]| -)\s(?!(?:or|and)\b).*)",
    re.DOTALL | re.IGNORECASE,
)
_MARKUP = re.compile(r"\\(?:text|math)?(?:bf|rm|it|sf|tt)?(?![A-Za-z])|[{}$*_`]")
_SPACE = re.compile(r"~|\\[,;:! ]")
_CHOSEN = re.compile(  # also "the answer I would choose is C"
    r"(?:(?:(?:answer|option|choice|letter|\bans\b\.?)(?: I(?: (?!is\b)[a-z]{2,12}){1,3}"
    r"|(?: (?!(?:is|not|nor|cannot)\b)[A-Za-z]{1,12}){1,5}(?= (?:is|must|should)\b))?+"
    r"|\b(?:I|we)(?: would| will|['\u2019](?:d|ll))? (?:choose|pick|select|go with)\b)"
    r"[^A-Za-z]{0,20}(?:(?:is|be|should|must|would|will|has to|thus|therefore|clearly|indeed|likely|probably)\b"
    r"[^A-Za-z]{0,20}){0,4}(?:(?:option|choice)\b[^A-Za-z]{0,5})?"
    r"|(?<!\u4e0d)(?:\u7b54\u6848|\u9009\u9879\s*[:\uff1a\u662f\u4e3a]|\u9009\u62e9?)[\s:\uff1a(\uff08\u662f\u4e3a\u5e94\u8be5\u9009\u9879\u62e9]{0,8})"
    r"([A-Za-z])(?!['\u2019]?[A-Za-z]|[+#]|\s*[\u4e0d\u9519]|\)?,?\s*(?:and|or|&|,)\s*\(?[A-Z]\b)"
    r"(?! (?!because|since|as\b|which|not\b|rather|but\b)[a-z]{2,})"
    r"|(?<![A-Za-z'])(?-i:([A-Z]))\)? is (?:the )?(?:correct|right|answer|true)",
    re.IGNORECASE,
)
_HINTS = (
    "answer", "option", "choice", "letter", "ans", "choose", "pick", "select", "go with", "\u7b54", "\u9009", "correct",
    "right", "true",
)  # fmt: skip
"""Each choice has one of these in it: the long expression is tried from the first of them on."""
_BEFORE_HINT = 24


def boxed_verdict(text: str, truth: str) -> Verdict:
    """1.0 if the response ends with ``\\boxed{...}`` whose stripped content equals the answer as text.

    Closing tags may follow the box.
    """
    given = final_box_content(text)
    if given is None:
        return Verdict(0.0, detail="the response does not end with a box")
    is_same = given == truth.strip()
    return Verdict(float(is_same), detail="" if is_same else f"not {truth[:80]!r}", read=given)


def are_near(given: Fraction, wanted: Fraction) -> bool:
    """True if a number is within a millionth of the wanted one: relative to it, absolute below 1."""
    return abs(given - wanted) <= Fraction(1e-6) * max(Fraction(1), abs(wanted))


def numeric_verdict(text: str, truth: str, is_finished: bool = True) -> Verdict:
    """1.0 if the number that the response gives is near the answer's.

    Decimals and fractions are compared exactly, so the verdict is the same everywhere.
    """
    wanted = number_in_answer(FoundAnswer(truth))
    if wanted is None:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} has no number")
    found = find_answer(text, is_finished)
    given = number_in_answer(found) if found else None
    if found is None or given is None:
        return Verdict(0.0, detail="the response gives no number")
    pairs = [(given, wanted)]
    if _is_percentage(extract_mathematics(found)) != _is_percentage(truth):  # its number, or a hundredth of it
        pairs.append((given / 100, wanted) if _is_percentage(extract_mathematics(found)) else (given, wanted / 100))
    is_near = any(are_near(one, other) for one, other in pairs)
    return Verdict(float(is_near), detail="" if is_near else f"not {truth[:80]!r}", read=format_number(given))


def _is_percentage(answer: str) -> bool:
    return normalise_notation(answer[-TAIL_CHARACTERS:]).endswith("%")


def format_number(number: Fraction) -> str:
    """A number for a person to read: an integer or fraction of few digits as it is."""
    is_short = number.numerator.bit_length() + number.denominator.bit_length() < 1000
    return str(number) if is_short else "a number of more than 300 digits"


def choice_verdict(text: str, truth: str, is_finished: bool = True) -> Verdict:
    """1.0 if the response gives the answer's letter."""
    wanted = _parse_letter(truth)
    if wanted is None:
        return Verdict(0.0, Failure.UNREADABLE, f"answer {truth[:80]!r} is no letter of a choice")
    given = letter_of_response(text, is_finished)
    if given is None:
        return Verdict(0.0, detail="the response gives no letter")
    return Verdict(float(given == wanted), detail="" if given == wanted else f"not {wanted}", read=given)


def format_tags_reward(text: str, names: Sequence[str]) -> float:
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


def number_of_response(text: str, is_finished: bool = True) -> Fraction | None:
    """The number that a response gives as its answer; None if it gives none."""
    found = find_answer(text, is_finished)
    return number_in_answer(found) if found else None


def number_in_answer(found: FoundAnswer) -> Fraction | None:
    """The number that an answer is, or the one that stands in it."""
    answer = normalise_notation(extract_mathematics(found)[:TAIL_CHARACTERS])
    try:
        return _exact_final_value(parse_expression(answer))
    except UnreadableError:  # words: the number among them, if it is the only one
        numerals = [match[0] for match in _NUMERAL.finditer(answer.rpartition("=")[2])]
        is_prose = len(numerals) == 1 and not _OTHER_MATHS.search(answer.replace(numerals[0], ""))
        return _exact_final_value(parse_expression(numerals[0])) if is_prose else None


def _exact_final_value(node: Node) -> Fraction | None:
    """The exact value of an expression, of its last side if it is an equation."""
    while node.kind in ("relation", "percent", "unit", "degree", "neg") and exact_value(node) is None:
        if node.kind == "relation" and node.name != "=":
            return None
        inner = node.parts[-1]
        node = Node("neg", inner.parts) if node.kind == "neg" and inner.kind == "percent" else inner
    return exact_value(node)


def letter_of_response(text: str, is_finished: bool = True) -> str | None:
    """The letter that a response chooses, in upper case; None if there is none.

    It is the one in its last box or ``<answer>``, else the last that follows "answer", "option" or "choice" or precedes
    "is the answer", else the one that its last line consists of.
    """
    found = find_answer(text, is_finished)
    if found is None:
        return None
    if found.place == "all":
        return _parse_letter(found.text) or _find_chosen_letter(found.text)
    tail = text_after_reasoning(text)
    *before, last = tail.split("\n")
    repeats_options = len(_remove_style_marks(last).split()) > 1 and any(map(_parse_letter, before))
    return _find_chosen_letter(tail) or (None if repeats_options else _parse_letter(last))


def _find_chosen_letter(text: str) -> str | None:
    """The last letter that the words around it say is chosen."""
    plain = _remove_style_marks(text)
    small = plain.lower()
    hints = [place for hint in _HINTS if (place := small.find(hint)) >= 0]
    if not hints:
        return None
    start = min(hints) - _BEFORE_HINT if len(small) == len(plain) else 0
    said = list(_CHOSEN.finditer(plain, max(0, start)))
    return said[-1][said[-1].lastindex or 0].upper() if said else None


def _parse_letter(answer: str) -> str | None:
    match = _LETTER.fullmatch(_remove_style_marks(answer))
    return match[1].upper() if match else None


def _remove_style_marks(text: str) -> str:
    """The text without marks of style."""
    return _MARKUP.sub("", _SPACE.sub(" ", text[:TAIL_CHARACTERS])).rstrip()
