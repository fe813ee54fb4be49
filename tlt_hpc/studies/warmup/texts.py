"""What a warm-up learns from: prompts to answer, or responses that runs have logged; and the prompts kept to judge by.

The same on every rank, whatever their number.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Prompt, Request, Rollout, SampleKey, Stream
from tlt_hpc.config import Config, ConfigError, UserError
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step

_SHARE = 5


def hold_out(prompts: Sequence[Hashable], most: int) -> frozenset[Hashable]:
    """The first distinct prompts: ``most`` of them, but a fifth of all at most, and one at least.

    Raises:
        ConfigError: there are not two distinct ones.
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        raise ConfigError(
            f"no prompt is left for validation: {len(prompts)} responses have {len(distinct)} distinct prompts; "
            "give data with more prompts"
        )
    return frozenset(distinct[: max(1, min(most, len(distinct) // _SHARE))])


def split_draws(draws: Iterable[Prompt], num_training: int, num_held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts, in the order of their draws, and held-out ones, each once; none is among both.

    ``draws`` has no end; a prompt that is drawn again counts again.

    Raises:
        ConfigError: as ``hold_out``.
    """
    endless: Iterator[Prompt] = iter(draws)
    first = list(islice(endless, num_training + num_held_out))
    kept = hold_out([_key(prompt) for prompt in first], num_held_out)
    apart = {_key(prompt): prompt for prompt in first if _key(prompt) in kept}
    rest = (prompt for prompt in chain(first, endless) if _key(prompt) not in kept)
    return list(islice(rest, num_training)), list(apart.values())


def _key(prompt: Prompt) -> bytes:
    return prompt.tokens.tobytes()


Tokens = NDArray[np.int32]

_FIRST_STEP = 1_000_000
"""Of the draws: behind those of any run, so that a warm-up sees other prompts where there is no end of them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """A prompt to answer, with the response where it is there already."""

    prompt: Tokens
    response: Tokens | None = None

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and of the response where there is one."""
        return len(self.prompt) + (0 if self.response is None else len(self.response))


@dataclass(frozen=True)
class Texts:
    """What to learn from, and the prompts to judge by, none of which is among the former's."""

    training: tuple[Text, ...]
    held_out: tuple[Tokens, ...]

    @property
    def are_logged(self) -> bool:
        """Whether the responses are there already."""
        return self.training[0].response is not None

    def validation_requests(self, seed: int) -> list[Request]:
        """The same at every validation, so that the responses, and what two drafters are judged by, are the same."""
        keys = (SampleKey(seed, Stream.EVALUATION, 0, draw, 0) for draw in range(len(self.held_out)))
        return [Request(key, prompt) for key, prompt in zip(keys, self.held_out, strict=True)]


def from_prompts(config: Config, prompts: PromptSource) -> Texts:
    """Prompts of the job's data.

    Raises:
        ConfigError: too few distinct ones to hold any out.
    """
    draws = (prompt for step in count(_FIRST_STEP) for prompt in prompts.batch(step))
    training, held_out = split_draws(draws, config.warmup.responses, config.warmup.validation_prompts)
    return Texts(tuple(Text(prompt.tokens) for prompt in training), _tokens_of(held_out))


def _tokens_of(prompts: list[Prompt]) -> tuple[Tokens, ...]:
    return tuple(prompt.tokens for prompt in prompts)


def from_logs(config: Config, max_positions: int, num_tokens: int) -> Texts:
    """The newest logged responses of the sources, ``warmup.responses`` at most.

    Raises:
        UserError: there are none, or they are of another vocabulary or too long for the model.
    """
    rollouts: list[Rollout] = []
    for path in newest_first([RunFolder(Path(source)) for source in config.warmup.sources]):
        rollouts += [rollout for rollout in _read(path) if len(rollout.response_tokens) > 1]
        if len(rollouts) >= config.warmup.responses:
            break
    if not rollouts:
        raise UserError(f"--from {' '.join(config.warmup.sources)}: no readable response there; give other runs")
    rollouts = rollouts[: config.warmup.responses]
    for rollout in rollouts:
        _check(rollout, num_tokens, max_positions)
    kept = hold_out([rollout.prompt_tokens.tobytes() for rollout in rollouts], config.warmup.validation_prompts)
    training = [Text(r.prompt_tokens, r.response_tokens) for r in rollouts if r.prompt_tokens.tobytes() not in kept]
    held_out = {r.prompt_tokens.tobytes(): r.prompt_tokens for r in rollouts if r.prompt_tokens.tobytes() in kept}
    return Texts(tuple(training), tuple(held_out.values()))


def newest_first(folders: list[RunFolder]) -> Iterator[Path]:
    """The runs' logs, the last step of each first, then the last but one of each."""
    steps = [list(reversed(folder.rollout_steps())) for folder in folders]
    for age in range(max(map(len, steps), default=0)):
        for folder, own in zip(folders, steps, strict=True):
            yield from folder.rollout_logs(own[age]) if age < len(own) else ()


def _read(path: Path) -> tuple[Rollout, ...]:
    try:
        return read_step(path).rollouts
    except DamagedFile as error:
        logger.warning("left out of the warm-up: %s", error)
        return ()


def _check(rollout: Rollout, num_tokens: int, max_positions: int) -> None:
    tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
    if tokens.min() < 0 or tokens.max() >= num_tokens:
        raise UserError(
            f"--from: a logged response has token {int(tokens.max())}, but this model's vocabulary has ids 0 to "
            f"{num_tokens - 1}; give runs of the model in model.path"
        )
    if len(tokens) > max_positions:
        raise UserError(
            f"--from: a logged response ends at position {len(tokens)}, but this model has {max_positions}; "
            "give runs of the model in model.path"
        )
