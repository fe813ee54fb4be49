"""Which responses to a prompt give the same answer, by the notion of equality that their kind of reward has.

Right responses are one answer whatever their words. Wrong ones are told apart by what they say: boxes to the letter,
numbers within the tolerance, letters, and mathematics by math-verify. For code, forms and functions nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from tlt_hpc.config import RewardSection
from tlt_hpc.evaluate.figures import RIGHT
from tlt_hpc.rewards.text import BOX, TAIL_CHARACTERS, boxed_answer, last_box, letter_of, number_of

VOTING_KINDS = ("boxed", "math", "numeric", "choice")
Pair = tuple[str, str]
SameMath = Callable[[Sequence[Pair]], Sequence[bool | None]]
"""For every pair whether both answer alike as mathematics; None where the first gives no answer that can be read."""


class Ballot:
    """The responses to one prompt."""

    def __init__(self, kind: str, texts: Sequence[str], rights: Sequence[bool], settings: RewardSection) -> None:
        wrong = {text for text, is_right in zip(texts, rights, strict=True) if not is_right}
        self._answers = {text: answer_of(kind, text) for text in sorted(wrong)}
        self._texts, self._rights, self._settings, self._kind = texts, rights, settings, kind
        self._votes: dict[str, int] = {}
        self._left = sorted({answer for answer in self._answers.values() if answer is not None})
        self._number = RIGHT
        if kind != "math":
            self._count_plain()

    @property
    def questions(self) -> list[Pair]:
        """What is to be compared next: every answer that has no place yet with the first of them."""
        return [(answer, self._left[0]) for answer in self._left]

    def take(self, verdicts: Sequence[bool | None]) -> None:
        """What came of the questions; an answer that cannot be read is none."""
        first, self._number = self._left[0], self._number + 1
        same = {answer for answer, verdict in zip(self._left, verdicts, strict=True) if verdict}
        if verdicts[0] is not None:
            same.add(first)  # even one that does not equal itself is an answer
        self._votes |= dict.fromkeys(same, self._number)
        unread = {answer for answer, verdict in zip(self._left, verdicts, strict=True) if verdict is None}
        self._left = [answer for answer in self._left if answer not in same | unread]

    @property
    def votes(self) -> list[int | None]:
        """Each response's answer by number, when all questions have been answered."""
        assert not self._left, "answer the questions first"
        return [
            RIGHT if is_right else self._vote(text) for text, is_right in zip(self._texts, self._rights, strict=True)
        ]

    def _vote(self, text: str) -> int | None:
        answer = self._answers[text]
        return None if answer is None else self._votes.get(answer)

    def _count_plain(self) -> None:
        while self._left:
            first = self._left[0]
            self.take([self._is_same(answer, first) for answer in self._left])

    def _is_same(self, answer: str, other: str) -> bool:
        if self._kind != "numeric":
            return answer == other
        given, wanted = Fraction(answer), Fraction(other)
        return abs(given - wanted) <= Fraction(self._settings.tolerance) * max(Fraction(1), abs(wanted))


def answer_of(kind: str, text: str) -> str | None:
    """What a response says, of all that it is; None where it gives no answer. Mathematics is left to be parsed."""
    match kind:
        case "boxed":
            return boxed_answer(text)
        case "numeric":
            number = number_of(text)
            return None if number is None else str(number)
        case "choice":
            return letter_of(text)
        case "math":
            box = last_box(text)
            return text[-TAIL_CHARACTERS:] if box is None else f"{BOX}{box}}}"
    raise AssertionError(f"no answers of {kind!r} can be told apart")


def count_votes(ballots: Sequence[Ballot], same_math: SameMath) -> None:
    """Ask what is left to ask, all ballots' questions together, until there are none."""
    while open_ballots := [ballot for ballot in ballots if ballot.questions]:
        questions = [ballot.questions for ballot in open_ballots]
        verdicts = iter(same_math([pair for asked in questions for pair in asked]))
        for ballot, asked in zip(open_ballots, questions, strict=True):
            ballot.take([next(verdicts) for _ in asked])
