"""Which prompts a step draws: a pure function of (seed, step), whatever the ranks. Knows no model and no reward."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError
from tlt_hpc.data.gcd import MAX_NUMBER, Split, draw_from_split
from tlt_hpc.records import Prompt


class PromptSource(Protocol):
    """Where the prompts of a step come from."""

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order."""
        ...


def open_prompts(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The prompt source that the configuration names.

    Raises:
        ValueError: no such file, or a row without ``prompt`` and ``answer``, or a prompt over the limit.
    """
    if config.data.source == EMBEDDED_TASK:
        longest = len(make_prompt(tokenizer, f"gcd({MAX_NUMBER},{MAX_NUMBER})=", "", "gcd").tokens)
        if longest > config.data.max_prompt_tokens:
            raise ConfigError(
                f"data.max_prompt_tokens = {config.data.max_prompt_tokens}, but prompts of {EMBEDDED_TASK!r} "
                f"have up to {longest} tokens; use data.max_prompt_tokens = {longest} or more"
            )
        return GcdPrompts(tokenizer, config.run.seed, config.rollout.prompts_per_step)
    rows = read_jsonl(Path(config.data.source), tokenizer, config.data.max_prompt_tokens)
    return ShuffledPrompts(rows, config.run.seed, config.rollout.prompts_per_step)


class GcdPrompts:
    """Fresh problems of the embedded task at every step, from one of its splits."""

    def __init__(self, tokenizer: Tokenizer, seed: int, prompts_per_step: int, split: Split = "train") -> None:
        self._tokenizer, self._seed, self._count, self._split = tokenizer, seed, prompts_per_step, split

    def batch(self, step: int) -> list[Prompt]:
        source = random.Random(f"gcd/{self._split}/{self._seed}/{step}")
        problems = [draw_from_split(source, self._split) for _ in range(self._count)]
        return [make_prompt(self._tokenizer, p.prompt, p.answer, "gcd") for p in problems]


class ShuffledPrompts:
    """A fixed list, shuffled anew every epoch; a step may span two epochs."""

    def __init__(self, prompts: list[Prompt], seed: int, prompts_per_step: int) -> None:
        self._prompts, self._seed, self._count = prompts, seed, prompts_per_step

    def batch(self, step: int) -> list[Prompt]:
        drawn = range(step * self._count, (step + 1) * self._count)
        orders = {epoch: self._order(epoch) for epoch in {i // len(self._prompts) for i in drawn}}
        return [self._prompts[orders[i // len(self._prompts)][i % len(self._prompts)]] for i in drawn]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"epoch/{self._seed}/{epoch}").shuffle(order)
        return order


def read_jsonl(path: Path, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Prompts of a .jsonl file whose rows have ``prompt`` and ``answer``.

    Raises:
        ValueError: naming file and line.
    """
    if not path.is_file():
        raise ValueError(f"data.source = {str(path)!r} does not exist; give a .jsonl file or 'embedded:gcd'")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            prompts.append(_parse_row(line, f"{path}:{number}", tokenizer, max_prompt_tokens))
    if not prompts:
        raise ValueError(f"data.source = {str(path)!r} has no rows; each line needs a 'prompt' and an 'answer'")
    return prompts


def make_prompt(tokenizer: Tokenizer, text: str, answer: str, source: str) -> Prompt:
    """A prompt tokenized as it stands: marks such as a chat template's are in the text or nowhere."""
    return Prompt(np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32), text, answer, source)


def _parse_row(line: str, where: str, tokenizer: Tokenizer, max_prompt_tokens: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); each line must be one JSON object") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or row.get("answer") is None:
        raise ValueError(f"{where}: needs a text 'prompt' and an 'answer'; mend or remove the row")
    prompt = make_prompt(tokenizer, row["prompt"], str(row["answer"]), str(row.get("data_source", "jsonl")))
    if not 0 < len(prompt.tokens) <= max_prompt_tokens:
        raise ValueError(
            f"{where}: prompt of {len(prompt.tokens)} tokens, data.max_prompt_tokens = {max_prompt_tokens}; "
            "raise the limit or remove the row"
        )
    return prompt
