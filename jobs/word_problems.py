"""Write the data of jobs/smollm2.toml: word problems, word_problems.jsonl to train on and word_problems_test.jsonl.

    python jobs/word_problems.py [--folder data]

A problem adds, subtracts or multiplies two numbers, so its answer is known. Each prompt begins with a solved problem,
because the model seldom writes an equation by itself. Problems with the same operation and the same numbers are all in
the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

TEXTS = {
    "+": (
        "A shelf holds {a} {things} and gets {b} more. How many are there?",
        "{name} has {a} {things} and buys {b} more. How many does {name} have now?",
        "There are {a} {things} in one bag and {b} in another. How many are there together?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many are left?",
        "Of {a} {things}, {b} are sold. How many are left?",
        "A box had {a} {things}. {name} took out {b}. How many are still in it?",
    ),
    "x": (
        "There are {a} boxes with {b} {things} in each. How many {things} are there?",
        "{name} buys {a} bags of {b} {things}. How many {things} are there?",
        "Each of {a} children has {b} {things}. How many do they have together?",
    ),
}
THINGS = ("books", "apples", "pens", "coins", "shells", "stamps", "cards", "eggs")
NAMES = ("Anna", "Ben", "Carla", "Dan", "Ella", "Hugo", "Iris", "Leo")
EXAMPLE = "Question: Tom has 3 cats and gets 2 more. How many are there?\nAnswer: 3 + 2 = 5\n"
TEST_SHARE = 10  # one of so many


def numbers(operation: str) -> Iterator[tuple[int, int, int]]:
    """Yield the two numbers and the answer of every problem with an operation."""
    for a in range(2, 20):
        for b in range(2, 20):
            if operation == "+" and a + b <= 20:
                yield a, b, a + b
            elif operation == "-" and b < a:
                yield a, b, a - b
            elif operation == "x" and max(a, b) < 10:
                yield a, b, a * b


def is_test(operation: str, a: int, b: int) -> bool:
    """Whether problems with these numbers are held out."""
    return int(hashlib.sha256(f"{a} {operation} {b}".encode()).hexdigest(), 16) % TEST_SHARE == 0


def rows(is_held_out: bool) -> list[dict[str, str]]:
    draw = random.Random(0)
    found = []
    for operation, texts in TEXTS.items():
        for a, b, answer in numbers(operation):
            for text in texts:
                words = {"things": draw.choice(THINGS), "name": draw.choice(NAMES)}
                if is_test(operation, a, b) == is_held_out:
                    prompt = f"{EXAMPLE}Question: {text.format(a=a, b=b, **words)}\nAnswer:"
                    found.append({"prompt": prompt, "answer": str(answer)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("data"))
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, is_held_out in (("word_problems", False), ("word_problems_test", True)):
        path = folder / f"{name}.jsonl"
        lines = [json.dumps(row) + "\n" for row in rows(is_held_out)]
        path.write_text("".join(lines))
        print(f"{path}: {len(lines)} problems")


if __name__ == "__main__":
    main()
