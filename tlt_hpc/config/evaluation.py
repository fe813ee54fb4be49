"""What a policy is judged by, and how: [evaluation]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tlt_hpc.config.base import (
    MAX_ITEMS,
    ConfigError,
    Count,
    PositiveInt,
    Section,
    Seed,
    Share,
    SomeLabel,
    SomePath,
    Temperature,
)
from tlt_hpc.config.data import EMBEDDED_TASK, DataSection


class EvaluationSection(Section):
    """``tlt evaluate``, and the same between the steps of ``tlt train`` where ``every_steps`` says so."""

    sources: Annotated[tuple[SomePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Data sets: files, patterns, folders or tasks, each as ``data.source`` has them, read by the other keys of
    ``data``. Empty: the held-out split of the embedded task, where that is trained on."""
    names: Annotated[tuple[SomeLabel, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """What to call them, one each; empty: after their files."""
    split: SomeLabel = "test"
    """Which split of folders that have several."""
    limit: Count = 0
    """Prompts of each set, drawn by ``seed``; 0: all (of the embedded task, which has no end, 256)."""
    greedy: bool = True
    """Answer each prompt once at temperature 0."""
    samples: Annotated[int, Field(ge=0, le=10**6)] = 8
    """Answers to each prompt by sampling: mean@N, pass@k and maj@N are over these."""
    temperature: Temperature = 0.6
    top_p: Share = 0.95
    max_new_tokens: Count = 0
    """0: as many as ``rollout.max_new_tokens``."""
    pass_k: Annotated[tuple[PositiveInt, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """The k of pass@k, each up to ``samples``; empty: 2, 4, 8 and so on, and ``samples``."""
    seed: Seed = 0
    """Of the sampling and of ``limit``; not the run's, so that runs of other seeds are judged alike."""
    every_steps: Count = 0
    """Evaluate in training after every so many steps, and at the end; 0: never."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        powers = (2**i for i in range(1, self.samples.bit_length()))
        return tuple(sorted({*(self.pass_k or powers), *([] if self.pass_k or self.samples < 2 else [self.samples])}))

    def set_sources(self, data: DataSection) -> tuple[str, ...]:
        """The data sets, by default the embedded task's where that is trained on."""
        return self.sources or ((EMBEDDED_TASK,) if data.source == EMBEDDED_TASK else ())


def check_evaluation(evaluation: EvaluationSection, data: DataSection, rollout_tokens: int) -> None:
    _check_answers(evaluation)
    if evaluation.names and len(evaluation.names) != len(evaluation.sources):
        raise ConfigError(
            f"evaluation.names has {len(evaluation.names)} names for {len(evaluation.sources)} sources; give one each"
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


def _check_answers(evaluation: EvaluationSection) -> None:
    if not evaluation.samples and not evaluation.greedy:
        raise ConfigError("evaluation.samples = 0 and evaluation.greedy = false ask for no answer; set one of them")
    if evaluation.samples and evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.temperature = 0 with evaluation.samples = {evaluation.samples} gives one answer so many "
            "times; use evaluation.greedy with evaluation.samples = 0"
        )
    if evaluation.pass_k and max(evaluation.pass_k) > evaluation.samples:
        raise ConfigError(
            f"evaluation.pass_k has {max(evaluation.pass_k)}, more than evaluation.samples = {evaluation.samples}; "
            f"raise evaluation.samples to {max(evaluation.pass_k)} or leave it out"
        )
