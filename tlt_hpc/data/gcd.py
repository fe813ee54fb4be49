"""The embedded task: greatest common divisors by written-out subtraction.

A problem is ``gcd(196,364)=``; a full answer is ``<think>196,364;196,168;28,168;...;28,28</think>\\boxed{28}``.
The number of written subtractions varies with the quotients of Euclid's algorithm, which gives response lengths a
natural long tail. Problems are split by a hash of their text, so that no split ever sees another's.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["supervised", "train", "evaluation"]

MAX_NUMBER = 399
MAX_DIVISOR = 24
LONG_TAIL_SHARE = 0.3
MAX_WORKING_TOKENS = 480


@dataclass(frozen=True)
class GcdProblem:
    """A pair of positive integers whose greatest common divisor is asked for."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"gcd({self.a},{self.b})="

    @property
    def answer(self) -> str:
        return str(math.gcd(self.a, self.b))

    @property
    def split(self) -> Split:
        """The split this problem belongs to: 60 % supervised, 30 % train, 10 % evaluation, by hash of its text."""
        bucket = int.from_bytes(hashlib.sha256(self.prompt.encode()).digest()[:4], "little") % 10
        if bucket < 6:
            return "supervised"
        return "train" if bucket < 9 else "evaluation"

    def subtractions(self) -> list[tuple[int, int]]:
        """Pairs from the problem down to (g, g), one subtraction of the smaller from the larger at a time."""
        a, b = self.a, self.b
        pairs = [(a, b)]
        while a != b:
            a, b = (a - b, b) if a > b else (a, b - a)
            pairs.append((a, b))
        return pairs


def num_working_tokens(pairs: list[tuple[int, int]]) -> int:
    """Tokens of a written working: digits, one comma a pair, one semicolon between pairs."""
    return sum(len(str(a)) + len(str(b)) + 2 for a, b in pairs) - 1


def draw_problem(random_source: random.Random) -> GcdProblem:
    """One problem: a coprime pair scaled by a divisor in 1..24; 30 % have one log-uniform number."""
    while True:
        divisor = random_source.randint(1, MAX_DIVISOR)
        limit = MAX_NUMBER // divisor
        first = random_source.randint(1, limit)
        if random_source.random() < LONG_TAIL_SHARE:
            second = max(1, round(math.exp(random_source.uniform(0.0, math.log(limit)))))
        else:
            second = random_source.randint(1, limit)
        if math.gcd(first, second) != 1 or first == second:
            continue
        if random_source.random() < 0.5:
            first, second = second, first
        problem = GcdProblem(first * divisor, second * divisor)
        if num_working_tokens(problem.subtractions()) <= MAX_WORKING_TOKENS:
            return problem


def draw_from_split(random_source: random.Random, split: Split) -> GcdProblem:
    """One problem of the given split."""
    while True:
        problem = draw_problem(random_source)
        if problem.split == split:
            return problem
