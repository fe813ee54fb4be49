"""What a policy is judged by, and how: [evaluation]."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tlt_hpc.config.base import (
    MAX_ITEMS,
    ConfigError,
    Count,
    Section,
    Share,
    SomeLabel,
    SomePath,
    StepCount,
    Temperature,
    TokenCount,
    Unit,
)
from tlt_hpc.config.data import EMBEDDED_TASK, DataSection


class EvaluationSection(Section):
    """``tlt evaluate``, and evaluations between the steps of ``tlt train``."""

    sources: Annotated[tuple[SomePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Data sets: files, patterns, folders or tasks as in ``data.source``, read with the other keys of ``data``. Each is
    called after its file. Empty: the held-out split of the embedded task, if the run trains on that."""
    split: SomeLabel = "test"
    """Split to read from folders that have several."""
    limit: Annotated[Count, Unit("prompts")] = 0
    """Prompts drawn from each data set. 0: all; 256 of the embedded task."""
    samples: Annotated[int, Field(ge=0, le=10**6)] = 8
    """Sampled answers to each prompt, beside a greedy one, from which mean@N, maj@N and pass@k (k = 2, 4, 8, ... and N)
    are computed."""
    temperature: Temperature = 0.6
    """Temperature of the sampled answers."""
    top_p: Share = 0.95
    """Nucleus of the sampled answers."""
    max_new_tokens: TokenCount = 0
    """Longest answer. 0: ``rollout.max_new_tokens``."""
    every_steps: StepCount = 0
    """Evaluate every this many training steps and at the end. 0: never."""

    seed: ClassVar[int] = 0
    """Of the sampled answers and of ``limit``: the same for all runs, so that their figures can be compared."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        powers = {2**i for i in range(1, self.samples.bit_length())}
        return tuple(sorted(powers | ({self.samples} if self.samples > 1 else set())))

    def set_sources(self, data: DataSection) -> tuple[str, ...]:
        """The data sets, by default the embedded task's where that is trained on."""
        return self.sources or ((EMBEDDED_TASK,) if data.source == EMBEDDED_TASK else ())


def check_evaluation(evaluation: EvaluationSection, data: DataSection, rollout_tokens: int) -> None:
    if evaluation.samples and evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.temperature = 0 with evaluation.samples = {evaluation.samples} gives the greedy answer "
            "so many times; use evaluation.samples = 0, since every prompt is answered greedily once"
        )
    if not evaluation.every_steps:
        return
    if not evaluation.set_sources(data):
        raise ConfigError(
            f"evaluation.every_steps = {evaluation.every_steps}, but there is nothing to evaluate on; name files in "
            "evaluation.sources"
        )
    if evaluation.max_new_tokens > rollout_tokens:
        raise ConfigError(
            f"evaluation.max_new_tokens = {evaluation.max_new_tokens} with evaluation.every_steps = "
            f"{evaluation.every_steps}: in training the engine has room for rollout.max_new_tokens = {rollout_tokens}; "
            "lower it, or set every_steps = 0 and give checkpoints to tlt evaluate"
        )
