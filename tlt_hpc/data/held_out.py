"""Which prompts are kept apart to judge by: a pure function of the draws, whatever the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import ConfigError

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
