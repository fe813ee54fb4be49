"""The texts of a warm-up: prompts to answer, or responses that runs have logged; and the held-out prompts.

All of it is the same on every rank, whatever their number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Request, Rollout, SampleKey, Stream
from tlt_hpc.config import ConfigError, UserError, WarmupSection
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step

logger = logging.getLogger(__name__)

Tokens = NDArray[np.int32]

_SHARE = 5
"""At most one in so many distinct prompts is held out."""
_FIRST_STEP = 1_000_000
"""First step whose prompts are drawn: behind those of any run, so that a warm-up sees other prompts if it can."""


@dataclass(frozen=True)
class Text:
    """A prompt to answer, with the response where it is there already."""

    prompt: Tokens
    response: Tokens | None = None

    @property
    def tokens(self) -> Tokens:
        """The tokens [n] int32 that the engine reads: the prompt, or of a text with a response all but the last."""
        return self.prompt if self.response is None else np.concatenate([self.prompt, self.response[:-1]])


@dataclass(frozen=True)
class Texts:
    """The texts to learn from, and the prompts to validate with, none of which is among the former's."""

    training: tuple[Text, ...]
    held_out: tuple[Tokens, ...]

    @property
    def are_logged(self) -> bool:
        """The responses are there already."""
        return self.training[0].response is not None

    def validation_requests(self, seed: int) -> list[Request]:
        """Return the same requests at every validation, so that drafters are compared on the same responses."""
        keys = (SampleKey(seed, Stream.EVALUATION, 0, draw, 0) for draw in range(len(self.held_out)))
        return [Request(key, prompt) for key, prompt in zip(keys, self.held_out, strict=True)]


def hold_out(prompts: Sequence[Tokens], most: int) -> dict[bytes, Tokens]:
    """Return the first distinct prompts by their bytes: ``most``, but a fifth of all at most, and one at least.

    Raises:
        ConfigError: there are not two distinct ones.
    """
    distinct = {prompt.tobytes(): prompt for prompt in prompts}
    if len(distinct) < 2:
        raise ConfigError(
            f"no prompt is left for validation: {len(prompts)} responses have {len(distinct)} distinct prompts; "
            "give data with more prompts"
        )
    return dict(islice(distinct.items(), max(1, min(most, len(distinct) // _SHARE))))


def from_prompts(warmup: WarmupSection, prompts: PromptSource) -> Texts:
    """Draw prompts of the job's data to answer; one that is drawn again counts again.

    Raises:
        ConfigError: too few distinct ones to hold any out.
    """
    num_training, num_held_out = warmup.responses, warmup.validation_prompts
    draws = (prompt.tokens for step in count(_FIRST_STEP) for prompt in prompts.draw_step_prompts(step))
    first = list(islice(draws, num_training + num_held_out))
    held_out = hold_out(first, num_held_out)
    rest = (Text(tokens) for tokens in chain(first, draws) if tokens.tobytes() not in held_out)
    return Texts(tuple(islice(rest, num_training)), tuple(held_out.values()))


def from_logs(warmup: WarmupSection, max_positions: int, num_tokens: int) -> Texts:
    """Read the newest logged responses of the sources, ``warmup.responses`` at most.

    Raises:
        UserError: there are none, or they are not of a model with so many positions and tokens.
    """
    rollouts: list[Rollout] = []
    for path in newest_logs_first([RunFolder(Path(source)) for source in warmup.sources]):
        rollouts += [rollout for rollout in _read_rollouts(path) if len(rollout.response_tokens) > 1]
        if len(rollouts) >= warmup.responses:
            break
    if not rollouts:
        raise UserError(f"--from {' '.join(warmup.sources)}: no readable response there; give other runs")
    rollouts = rollouts[: warmup.responses]
    largest = max(int(tokens.max()) for r in rollouts for tokens in (r.prompt_tokens, r.response_tokens))
    longest = max(len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts)
    if largest >= num_tokens or longest > max_positions:
        raise UserError(
            f"--from: logged responses have token {largest} and {longest} positions, but this model's vocabulary has "
            f"ids 0 to {num_tokens - 1} and it has {max_positions} positions; give runs of the model in model.path"
        )
    held_out = hold_out([r.prompt_tokens for r in rollouts], warmup.validation_prompts)
    training = (Text(r.prompt_tokens, r.response_tokens) for r in rollouts if r.prompt_tokens.tobytes() not in held_out)
    return Texts(tuple(training), tuple(held_out.values()))


def newest_logs_first(folders: list[RunFolder]) -> Iterator[Path]:
    """Yield the runs' logs, the last step of each first, then the last but one of each."""
    aged = [(age, i, step) for i in range(len(folders)) for age, step in enumerate(folders[i].rollout_steps()[::-1])]
    for _, i, step in sorted(aged):
        yield from folders[i].rollout_logs(step)


def _read_rollouts(path: Path) -> tuple[Rollout, ...]:
    try:
        return read_step(path).rollouts
    except DamagedFile as error:
        logger.warning("left out of the warm-up: %s", error)
        return ()
