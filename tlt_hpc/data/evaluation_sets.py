"""The data sets of an evaluation: their prompts, the same on every rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError, EvaluationSection
from tlt_hpc.data.chat import TEMPLATE_DATE
from tlt_hpc.data.files import EVALUATED
from tlt_hpc.data.prompts import draw_from_split, kept_rows, make_prompt, never_right_warning, shuffled_row_order
from tlt_hpc.data.reader import PromptCheck, PromptReader

_EMBEDDED_PROMPTS = 256
"""Number of problems of the embedded task, which has no end, without ``evaluation.limit``."""
_MAX_EMBEDDED = 2048
"""Largest number of distinct problems that are found without a long search."""


@dataclass(frozen=True)
class EvaluationSet:
    """One data set; ``rows`` [N] are the indices of its prompts, by which responses are named whatever the limit."""

    name: str
    rows: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    digest: str
    """Digest of all that the prompts are made from."""
    warning: str = ""
    """A line as ``PromptSource.warning``; empty: none."""

    @property
    def name_hash(self) -> int:
        """A hash of its name, for the keys of responses: they do not depend on which other sets there are."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:6], "little")

    def prompts_digest(self) -> str:
        """Digest of what the set is made from, and of the prompts drawn with their answers."""
        mark = hashlib.sha256(f"{self.digest} {self.rows}".encode())
        for prompt in self.prompts:
            mark.update(prompt.tokens.tobytes() + prompt.answer.encode() + b"\0")
        return mark.hexdigest()


def open_sets(
    config: Config, tokenizer: Tokenizer, chat: ChatFormat, check: PromptCheck = lambda _: ""
) -> tuple[EvaluationSet, ...]:
    """The data sets that the configuration names; all rows drawn are checked.

    Raises:
        ValueError: none is named, two of one name, no such file, or a row that cannot be used.
    """
    sources = config.evaluation.data_set_sources(config.data)
    if not sources:
        raise ConfigError(
            f"evaluation.sources is empty, and data.source = {config.data.source_name!r} has no held-out part of its "
            "own; name files, e.g. evaluation.sources='[\"data/aime_2024.jsonl\"]'"
        )
    named = {evaluation_set_name(source): source for source in sources}
    if len(named) < len(sources):
        raise ConfigError(f"two of evaluation.sources = {list(sources)} have the same file name; rename one")
    return tuple(
        _open_gcd(config.evaluation, name, tokenizer)
        if source == EMBEDDED_TASK
        else _open_file_set(config, name, source, tokenizer, chat, check)
        for name, source in named.items()
    )


def evaluation_set_name(source: str) -> str:
    """The name of a source: ``aime_2024`` for ``data/aime_2024.jsonl``, ``gcd`` for ``embedded:gcd``."""
    if source == EMBEDDED_TASK:
        return source.partition(":")[2]
    path = Path(source)
    return path.parent.name or source if set("*?[") & set(path.name) else path.stem


def open_reader(
    config: Config, source: str, tokenizer: Tokenizer | None, chat: ChatFormat | None, check: PromptCheck
) -> PromptReader:
    """The prompts of a data set that is not the embedded task's.

    Raises:
        ConfigError: as ``PromptReader``.
    """
    return PromptReader(config.data.model_copy(update={"source": source}), tokenizer, chat, check, EVALUATED)


def _open_file_set(
    config: Config, name: str, source: str, tokenizer: Tokenizer, chat: ChatFormat, check: PromptCheck
) -> EvaluationSet:
    reader = open_reader(config, source, tokenizer, chat, check)
    is_kept, dropped = kept_rows(reader.data, reader)
    good = np.flatnonzero(is_kept)
    limit = config.evaluation.limit or len(good)
    drawn = sorted(good[shuffled_row_order(len(good), config.evaluation.seed, 0)[:limit]].tolist())
    prompts = tuple(map(reader.read, drawn))
    wrong = never_right_warning(reader.source, list(map(reader.find_row_problem, drawn, prompts)))
    written = [config.data.system_prompt, config.data.text_prompts, TEMPLATE_DATE]
    digest = hashlib.sha256("\0".join([reader.rows.digest(), reader.template_digest, *written]).encode()).hexdigest()
    warning = "; ".join(filter(None, (wrong, reader.warning, dropped)))
    return EvaluationSet(name, tuple(drawn), prompts, digest, warning)


def _open_gcd(evaluation: EvaluationSection, name: str, tokenizer: Tokenizer) -> EvaluationSet:
    """Problems of the split that neither the embedded model nor any run has trained on, each once."""
    source, wanted = random.Random(f"gcd/evaluation/{evaluation.seed}"), evaluation.limit
    wanted = wanted or _EMBEDDED_PROMPTS
    if wanted > _MAX_EMBEDDED:
        raise ConfigError(f"evaluation.limit = {wanted}: {EMBEDDED_TASK!r} holds out {_MAX_EMBEDDED} at most; lower it")
    problems: dict[str, str] = {}
    while len(problems) < wanted:
        problem = draw_from_split(source, "evaluation")
        problems.setdefault(problem.prompt, problem.answer)
    prompts = tuple(make_prompt(tokenizer, text, answer, "gcd") for text, answer in problems.items())
    return EvaluationSet(name, tuple(range(len(prompts))), prompts, f"{EMBEDDED_TASK} {evaluation.seed}")


def joined_set_warnings(sets: Sequence[EvaluationSet]) -> str:
    """The lines of all sets in one; empty: none."""
    return "; ".join(dict.fromkeys(each.warning for each in sets if each.warning))


def longest_prompt_tokens(sets: Sequence[EvaluationSet]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.tokens) for each in sets for prompt in each.prompts)


def longest_response_tokens(config: Config) -> int:
    """Largest number of tokens of a response."""
    return config.evaluation.max_new_tokens or config.rollout.max_new_tokens
