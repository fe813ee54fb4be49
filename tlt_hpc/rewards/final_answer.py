"""Finds the part of a response that is its answer: one rule for every kind that reads answers (docs/rewards.md).

All of it takes time linear in the response.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

TAIL_CHARACTERS = 4096
"""Characters at the end of a response in which an answer without a box is looked for."""
_MARK = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*(?:\{|(-?\d[\d.,/]*\d|-?\d|[A-Za-z])(?=[\s$.,;)]|\Z))|\\.|[{}]", re.DOTALL
)
_BETWEEN = re.compile(r"\\(?:[()\[\],;:! ]|q?quad(?![a-zA-Z])|text\s*\{(\s*and\s*)\})|[$*]")
_JOINED = re.compile(r"\s*(?:,|and|,\s*and|&)\s*")
_TO_FILL_IN = re.compile(
    r"(?:[.?~\s]|\\[lc]?dots|\\ |\\text\{\s*\}|(?:\\text\{)?\b(?:your |the |final )*+answer\}?)*+", re.IGNORECASE
)
"""The content of a box that repeats the instruction."""
_MAX_INSTRUCTION = 100
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(
    r"(?:\banswer\b[^\n.:=]{0,60}?(?:\b(?:is|are|equals)\b|[:=\uff1a])"
    r"|\u7b54\u6848\s*[:=\uff1a\u662f\u4e3a]+)[\s:*_\uff1a]*",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\b(?:is|are|cannot be|can't be) not\b|\b(?:cannot|can't) be\b|\b(?:isn't|aren't)\b")
_SENTENCE_END = re.compile(r"(?:(?<![.!?])[.!?]++[*_)\"']*(?=\s)|\u3002)\s*|\n+")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}|[\u4e00-\u9fff]")
_AND = re.compile(r"\s*(?:,|;|,?\s*(?:and|or)\b)\s*")
_MATHS = re.compile(r"(?<!\\)\$\$?([^$]+?)(?<!\\)\$\$?(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DISPLAYED = re.compile(r"\\\[.{0,1000}?\\\]|\$\$[^$]{0,1000}\$\$", re.DOTALL)
"""Mathematics whose lines are one sentence."""
_BARE_NUMBER = re.compile(r"[-+\u2212$*\s\\]*+\d[\d.,/]*+[%*\s\\]*+(?<!\.)")
_VERB = re.compile(r"\b(?:is|are|equals)\b")
_NUMBER = re.compile(
    r"(?:(?<![\w)}])[-+\u2212]\s?)?(?:\\[dt]?frac\{-?\d+\}\{\d+\}|\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?:\.\d+)?"
    r"|(?<![A-Za-z0-9_^])(?<!\^\{)\d*\.?\d+|(?=[\u03c0\u221a]))"
    r"(?:\s?(?:\\times|\\cdot|\u00d7)\s?10\^(?:\{-?\d+\}|\d)|[eE][-+]?\d+)?(?:\s?(?:\u221a\s?\(?\d+\)?|\u03c0))*"
    r"(?:/\d+)?(?:\s?\\?%)?"
)
_CLOSING = re.compile(r"(?:\s|</[A-Za-z][\w-]*>)*+")
"""Text that may follow the box that a response ends with."""


@dataclass(frozen=True)
class FoundAnswer:
    """A response's answer as it stands there."""

    text: str
    place: str = "all"
    """The mathematics of the text that is the answer: ``all``; the ``first`` or ``last`` where words surround it."""


def find_answer(text: str, is_finished: bool = True) -> FoundAnswer | None:
    """The answer that a response gives, None if there is none.

    It is the last complete ``<answer>`` if it follows the last box, else the content of the last complete box, with the
    boxes that only commas or "and" join to it; a box of the reasoning is none if what follows ``</think>`` says what
    the answer is. A response whose last box is cut off gives none. In one without box and
    tag that ended by itself it is the line after the last ``####``, else what follows the last "answer is" or "answer:"
    in its sentence, else the last sentence.
    """
    boxes, is_cut_off = _find_boxes(text)
    if is_cut_off:
        return None
    tag = _last_answer_tag_content(text[boxes[-1].end if boxes else 0 :], is_finished)
    if tag is not None:
        sentence = find_answer(tag) if _VERB.search(tag) else None
        return sentence or FoundAnswer(tag)
    is_draft = (
        bool(boxes) and is_finished and "</think>" in text[boxes[-1].end :] and _SAID.search(text_after_reasoning(text))
    )
    if boxes and not is_draft:
        return FoundAnswer(", ".join(box.content for box in _last_joined_boxes(text, boxes)))
    if not is_finished:
        return None
    tail = _DISPLAYED.sub(lambda match: " ".join(match[0].split()), text_after_reasoning(text))
    if "####" in tail:
        line, _, rest = tail.rpartition("####")[2].strip().partition("\n")
        if not rest.strip() or _BARE_NUMBER.fullmatch(line):  # else the heading of a step
            return FoundAnswer(line)
    said = [match.end() for match in _SAID.finditer(tail) if not tail.startswith("not ", match.end())]
    if said and (rest := _SENTENCE_END.split(tail[said[-1] :], maxsplit=1)[0].strip()):
        return FoundAnswer(rest, "first")
    sentences = [part for part in _SENTENCE_END.split(tail) if part.strip()]
    return FoundAnswer(sentences[-1].strip(), "last") if sentences else None


def text_after_reasoning(text: str) -> str:
    """The end of a response, without its reasoning if that has a tag of its own and something follows it."""
    tail = text[-TAIL_CHARACTERS:].strip().removesuffix("```").rstrip()
    return tail.rpartition("</think>")[2].strip() or tail


def extract_mathematics(found: FoundAnswer) -> str:
    """The mathematics of an answer that words may surround."""
    if found.place == "all":
        return found.text
    if found.place == "last" and _DENIAL.search(found.text):
        return ""
    parts = [match for match in _MATHS.finditer(found.text) if match[match.lastindex or 0][0] not in "^_"]
    if not parts and _WORD.search(found.text) is None:
        return found.text
    parts = parts or list(_NUMBER.finditer(found.text))
    if not parts:
        return found.text if found.place == "first" else ""
    first, end = (0, 1) if found.place == "first" else (len(parts) - 1, len(parts))
    while end < len(parts) and found.place == "first" and _are_joined(found.text, parts[end - 1], parts[end]):
        end += 1
    while first > 0 and found.place == "last" and _are_joined(found.text, parts[first - 1], parts[first]):
        first -= 1
    return ", ".join(part[part.lastindex or 0] for part in parts[first:end])


def _are_joined(text: str, before: re.Match[str], after: re.Match[str]) -> bool:
    """True if only a comma, "and" or "or" stands between two parts of an answer."""
    return _AND.fullmatch(text, before.end(), after.start()) is not None


def final_box_content(text: str) -> str | None:
    """The content of the box that the response ends with, closing tags and punctuation aside; None if there is none."""
    boxes, is_cut_off = _find_boxes(text)
    if is_cut_off or not boxes or not _CLOSING.fullmatch(text, boxes[-1].end):
        return None
    return boxes[-1].content


@dataclass(frozen=True)
class _Box:
    start: int
    end: int
    content: str


def _find_boxes(text: str) -> tuple[list[_Box], bool]:
    """The complete boxes in the order of their ends, and whether the last one that was opened is cut off.

    Of boxes within each other the innermost counts; those that repeat the instruction are left out.
    """
    starts = [start for name in ("\\boxed", "\\fbox", "\\framebox") if (start := text.find(name)) >= 0]
    if not starts:
        return [], False
    found, opened = list[_Box](), list[tuple[int, int]]()  # places of braces, and -1 or the start of their box
    last_opened, last_closed = -1, -1
    for mark in _MARK.finditer(text, min(starts)):
        if mark[0] == "{":
            opened.append((mark.end(), -1))
        elif mark[0] == "}":
            if opened and (place := opened.pop())[1] >= 0:
                _add_box_unless_placeholder(found, _Box(place[1], mark.end(), text[place[0] : mark.start()].strip()))
                last_closed = max(last_closed, place[1])
        elif mark[0].endswith("{") and len(mark[0]) > 2:
            opened.append((mark.end(), mark.start()))
            last_opened = mark.start()
        elif mark[1]:
            _add_box_unless_placeholder(found, _Box(mark.start(), mark.end(), mark[1]))
    return found, last_opened > last_closed


def _add_box_unless_placeholder(found: list[_Box], box: _Box) -> None:
    is_empty = len(box.content) < _MAX_INSTRUCTION and _TO_FILL_IN.fullmatch(box.content)
    if not is_empty and not (found and found[-1].start > box.start):
        found.append(box)


def _last_joined_boxes(text: str, boxes: list[_Box]) -> list[_Box]:
    """The last box with those before it that only commas or "and" join to it."""
    first = len(boxes) - 1
    for before, after in reversed(list(pairwise(boxes))):
        between = text[before.end : after.start]
        if len(between) > 80 or not _JOINED.fullmatch(_BETWEEN.sub(r"\1", between)):
            break
        first -= 1
    return boxes[first:]


def _last_answer_tag_content(text: str, is_finished: bool) -> str | None:
    """The content of the last ``<answer>``, without the end tag only where the response ended by itself."""
    start = text.rfind("<answer>")
    match = _ANSWER_TAG.match(text, start) if start >= 0 else None
    if match is None or not (is_finished or match[0].endswith("</answer>")):
        return None
    return match[1].strip()
