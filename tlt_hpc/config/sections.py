"""All sections of a run's configuration, in the order of docs/configuration.md, the last defined here.

The text below a key is its meaning in ``tlt keys`` and in docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from tlt_hpc.config.data_sections import EMBEDDED_TASK, DataSection, ModelSection, RewardSection, RunSection
from tlt_hpc.config.fields import (
    MAX_ITEMS,
    Count,
    Section,
    Share,
    SomePath,
    StepCount,
    Temperature,
    TokenCount,
    Unit,
)
from tlt_hpc.config.rollout_sections import DrafterSection, RolloutSection, SpeculationSection, WarmupSection
from tlt_hpc.config.update_sections import AlgorithmSection, CheckpointSection, LoraSection, OptimizerSection


class EvaluationSection(Section):
    """``tlt evaluate``, and evaluations between the steps of ``tlt train``."""

    sources: Annotated[tuple[SomePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Data sets as in ``data.source``, read with the other keys of ``data``; of a folder the split ``test``. Each is
    called after its file. Empty: the held-out part of the embedded task, if that is trained on."""
    limit: Annotated[Count, Unit("prompts")] = 0
    """Prompts drawn from each data set. 0: all; 256 of the embedded task."""
    samples: Annotated[int, Field(ge=0, le=10**6)] = 8
    """Sampled answers to each prompt, beside a greedy one, for mean@N, maj@N and pass@k (k = 2, 4, 8, ... and N)."""
    temperature: Temperature = 0.6
    """Temperature of the sampled answers."""
    top_p: Share = 0.95
    """Nucleus of the sampled answers."""
    max_new_tokens: TokenCount = 0
    """Longest answer. 0: ``rollout.max_new_tokens``."""
    every_steps: StepCount = 0
    """Evaluate every this many training steps and at the end. 0: never."""

    seed: ClassVar[int] = 0
    """Seed of the sampled answers and of ``limit``: the same for all runs, so that their figures can be compared."""

    @property
    def pass_at_ks(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        powers = {2**i for i in range(1, self.samples.bit_length())}
        return tuple(sorted(powers | ({self.samples} if self.samples > 1 else set())))

    def data_set_sources(self, data: DataSection) -> tuple[str, ...]:
        """The data sets; by default the embedded task's, if the run trains on it."""
        return self.sources or ((EMBEDDED_TASK,) if data.source == EMBEDDED_TASK else ())

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        if self.samples and self.temperature == 0:
            yield (
                f"evaluation.temperature = 0 repeats the greedy answer evaluation.samples = {self.samples} times; use "
                "evaluation.samples = 0"
            )


class Config(Section):
    """The whole of a run's configuration."""

    run: RunSection
    model: ModelSection
    data: DataSection
    reward: RewardSection = RewardSection()
    rollout: RolloutSection
    speculation: SpeculationSection = SpeculationSection()
    drafter: DrafterSection = DrafterSection()
    warmup: WarmupSection = WarmupSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def samples_per_step(self) -> int:
        """Responses of one step, over all ranks."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.num_steps * self.algorithm.updates_per_step

    @property
    def is_exact(self) -> bool:
        """True if the text of a response does not depend on speculation."""
        return self.model.dtype == "float32" or self.model.batch_invariant or self.model.device == "cpu"

    @property
    def folder(self) -> Path:
        """Folder of the run: ``run.folder/run.name``."""
        return Path(self.run.folder) / self.run.name


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
}
"""The sections by their names."""
