"""The prompts and lengths that a bench runs: requests of known keys, drawn from a seed. Knows no engine."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.data.prompts import GcdPrompts

Lengths = Literal["own", "long-tail"]
Tokens = NDArray[np.int32]

# Ordinary requests, for models that come without a prompt file; fed as they stand.
BUILT_IN = (
    "Explain in a few sentences why the sky is blue.",
    "List the planets of the solar system with one fact about each.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Summarise the causes of the First World War.",
    "Give me a recipe for a vegetable soup that takes less than half an hour.",
    "Solve for x: 3x + 7 = 31. Show every step.",
    "Describe how a bicycle stays upright while it moves.",
    "Write an email that asks a colleague to move a meeting from Tuesday to Thursday.",
    "What are the main steps of photosynthesis?",
    "Tell me three arguments for and three against working from home.",
    "How many ways are there to arrange the letters of the word LEVEL? Explain.",
    "Write a poem of eight lines about the sea in winter.",
    "Explain what a hash table is to somebody who has never programmed.",
)
_MEDIAN_SHARE, _SIGMA = 1 / 6, 0.9
"""Of the long tail: log-normal around a sixth of the cap, so that one response in forty reaches it."""


@dataclass(frozen=True)
class Workload:
    """Where prompts come from and how long the responses are."""

    prompts: tuple[Tokens, ...] | None
    """None: fresh problems of the embedded task for every draw."""
    tokenizer: Tokenizer
    lengths: Lengths
    max_new_tokens: int
    temperature: float
    seed: int

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt there may be."""
        longest = self.prompts or (self.tokenizer.encode("gcd(399,399)=").ids,)
        return max(map(len, longest))

    def requests(self, count: int, part: int, stream: Stream = Stream.EVALUATION) -> list[Request]:
        """``count`` requests, one response each; another ``part`` has other keys, and other problems where fresh."""
        keys = [SampleKey(self.seed, stream, part, draw, 0) for draw in range(count)]
        prompts = self._prompts(count, part)
        params = self._params(count, part)
        return [Request(*each) for each in zip(keys, prompts, params, strict=True)]

    def _prompts(self, count: int, part: int) -> list[Tokens]:
        if self.prompts is None:
            return [p.tokens for p in GcdPrompts(self.tokenizer, self.seed, count).batch(part)]
        # parts of different parity share no prompt: what an n-gram table saw in one tells it nothing of the other
        mine = self.prompts[part % 2 :: 2] or self.prompts
        return [mine[draw % len(mine)] for draw in range(count)]

    def _params(self, count: int, part: int) -> Sequence[SamplingParams | None]:
        if self.lengths == "own":
            return [None] * count
        source = random.Random(f"lengths/{self.seed}/{part}")
        drawn = [source.lognormvariate(math.log(self.max_new_tokens * _MEDIAN_SHARE), _SIGMA) for _ in range(count)]
        return [self._forced(max(1, min(self.max_new_tokens, round(length)))) for length in drawn]

    def _forced(self, length: int) -> SamplingParams:
        return SamplingParams(max_tokens=length, temperature=self.temperature, min_tokens=length)


def read_prompts(path: Path, tokenizer: Tokenizer) -> tuple[Tokens, ...]:
    """The ``prompt`` of every row of a .jsonl file, tokenized as it stands; other keys are not read.

    Raises:
        ValueError: no such file, or a row without one, naming the line.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path} does not exist; give a .jsonl file whose rows have a 'prompt'")
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    prompts = tuple(_tokens_of(line, f"{path}:{number}", tokenizer) for number, line in lines if line.strip())
    if not prompts:
        raise ValueError(f"--prompts {path} has no rows; each line needs a 'prompt'")
    return prompts


def built_in_prompts(tokenizer: Tokenizer) -> tuple[Tokens, ...]:
    """The ordinary requests, tokenized."""
    return tuple(_encode(text, tokenizer) for text in BUILT_IN)


def _tokens_of(line: str, where: str, tokenizer: Tokenizer) -> Tokens:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); each line must be one JSON object") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise ValueError(f"{where}: needs a text 'prompt'; mend or remove the row")
    return _encode(row["prompt"], tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> Tokens:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
