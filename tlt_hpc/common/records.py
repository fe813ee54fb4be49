"""Plain records that pass between the layers: arrays inside frozen dataclasses, no behaviour, no heavy library."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """The independent random streams of a run, one of which a sample belongs to."""

    TRAIN = 0
    EVALUATION = 1
    REFILL = 2
    CALIBRATION = 3
    WARMUP = 4


@dataclass(frozen=True, order=True)
class SampleKey:
    """Names one response of one run; with the policy's weights it determines the response's every token.

    ``draw`` is the index of the prompt's draw within the step, ``sample`` the index within the prompt's group.
    """

    seed: int
    stream: int
    step: int
    draw: int
    sample: int


class FinishReason(IntEnum):
    """Reasons for the end of a response."""

    EOS = 0
    LENGTH = 1
    STOP = 2
    """A stop string appeared; the token that completed it is the response's last."""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt [P] int32 with the answer its responses are judged by."""

    tokens: NDArray[np.int32]
    text: str
    answer: str
    source: str
    """The row's ``data_source``: which data it is of, by which its reward is chosen."""
    extra: str = ""
    """Further parts of the row for a reward, as JSON: ``extra_info``, ``reward_model``, ``ability``; empty: nothing."""


@dataclass(frozen=True)
class ChatFormat:
    """Format of a model's chats: its template in Jinja (empty: it has none) and its special tokens by name."""

    template: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()
    end_token_ids: tuple[int, ...] = ()
    """Those that end a response; empty: not known."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the sampling of one response, and of its end.

    Temperature 0 is argmax; ``top_k`` 0 and ``top_p`` 1 are off. End tokens are the engine's.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to generate; without ``params`` it takes the engine's."""

    key: SampleKey
    prompt_tokens: NDArray[np.int32]
    params: SamplingParams | None = None


@dataclass(frozen=True)
class Rollout:
    """One finished response.

    ``response_tokens`` [R] int32 include the end-of-sequence token, if any. ``log_probs`` [R] float32 are
    of the sampled tokens under the temperature-scaled policy before top-k and top-p. ``num_target_passes``
    counts the decoding passes that emitted the response, so accept length is R / num_target_passes.
    """

    key: SampleKey
    prompt_tokens: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_version: int
    num_target_passes: int
    finished_seconds: float
    """Wall-clock time (seconds since the epoch) of the last token."""
    pass_lengths: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """[num_target_passes] how many of the tokens each of those passes emitted; empty where nobody has counted."""


@dataclass(frozen=True)
class MicroStepRecord:
    """One drafter update: when it ran (seconds since the epoch), on how many tokens, and the loss it saw."""

    start_seconds: float
    end_seconds: float
    num_tokens: int
    """Pairs that the loss counts: a prompt's are read and add nothing to it. They are its weight in the merge."""
    loss: float


AHEAD = "ahead"
"""The phase in which a rank that waits generates the next step's responses."""
PREFILL = -1
"""In place of a strategy's index: a pass that reads prompts."""


@dataclass(frozen=True)
class EngineSpans:
    """Rounds and prefill passes of a rank's engine in time, [K] in the order of their ends.

    ``strategy_index`` int16 counts in the strategies' names, or is ``PREFILL``; ``num_live`` int32 are the sequences
    that took part and ``num_tokens`` int32 what they were given, or read; ``start_seconds`` float64 is since the epoch,
    ``seconds`` float32 what it took. On a device a prefill pass is as long as it took to hand it over, and the round
    after it is the longer.
    """

    strategy_index: NDArray[np.int16]
    num_live: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    start_seconds: NDArray[np.float64]
    seconds: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.seconds)


NO_SPANS = EngineSpans(
    np.empty(0, np.int16), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0), np.empty(0, np.float32)
)


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a step, in seconds since the epoch; those between two steps belong to the later one."""

    name: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class RolloutTiming:
    """One rank's rollout of one step, in seconds since the epoch.

    Idle time runs from ``last_token_seconds`` to ``release_seconds``.
    """

    start_seconds: float
    last_token_seconds: float
    release_seconds: float

    @property
    def rollout_seconds(self) -> float:
        """Seconds from the start of the rollout to its release."""
        return self.release_seconds - self.start_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds that the rank waited for others."""
        return self.release_seconds - self.last_token_seconds


def answer_text(value: Any) -> str:
    """A text as it is, a list of texts and numbers as JSON of texts, each of which is accepted; else JSON."""
    if isinstance(value, list) and not any(isinstance(each, list | dict) or each is None for each in value):
        return json.dumps([answer_text(each) for each in value])
    if isinstance(value, float) and value.is_integer():  # pandas makes floats of whole numbers if one is missing
        value = int(value)
    return str(value) if isinstance(value, str | Decimal) else json.dumps(value, default=str)
