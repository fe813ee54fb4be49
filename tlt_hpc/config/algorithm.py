"""What the policy is trained on and how: [algorithm] and [optimizer]. Knows recipes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tlt_hpc.config.base import (
    MAX_WEIGHT,
    Count,
    Decay,
    LearningRate,
    NumRanks,
    PositiveInt,
    Section,
    Weight,
    zero_or_from,
)
from tlt_hpc.config.recipes import (
    AdvantageName,
    AggregationName,
    AlgorithmName,
    Correction,
    CorrectionName,
    KLName,
    LossName,
    Recipe,
    correction_with,
    recipe_with,
)


def _bound(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and 0 <= value <= MAX_WEIGHT and not isinstance(value, bool)):
        return value
    raise ValueError(f"use a number from 0 to {MAX_WEIGHT:g}, or 'auto'")


def _switch(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError("use true, false or 'auto'")


Switch = Annotated[bool | Literal["auto"], BeforeValidator(_switch)]
Bound = Annotated[Weight | Literal["auto"], BeforeValidator(_bound)]


class AlgorithmSection(Section):
    """Parts that are ``auto`` take what the name stands for (``recipes.py``); what is saved with a run is resolved."""

    name: AlgorithmName = "grpo"
    advantage: Literal["auto", AdvantageName] = "auto"
    """``group``: reward less its group's mean, over its standard deviation; ``group-mean``: not divided;
    ``leave-one-out``: less the mean of the others in the group; ``batch``: normalised over all tokens of the step;
    ``group-mean-batch``: less the group's mean, then normalised so."""
    loss: Literal["auto", LossName] = "auto"
    """``clip``: PPO's, each token by its ratio; ``sequence-clip``: by its response's (GSPO); ``weight-clip``: the ratio
    is a bounded weight, and no token loses its gradient (CISPO)."""
    aggregation: Literal["auto", AggregationName] = "auto"
    """How the losses of a step's tokens are added up; ``-norm`` divides by ``rollout.max_new_tokens``."""
    clip_low: Bound = "auto"
    """The ratio is kept above 1 less this."""
    clip_high: Bound = "auto"
    """The ratio is kept below 1 plus this."""
    kl_coefficient: Weight = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: added to each token's; ``reward``: each response's sum over its tokens is taken from its reward."""
    kl_estimator: Literal["auto", KLName] = "auto"
    """``k1``, of which only the reward's gradient is the distance's; ``k2`` or ``k3`` in the loss. ``auto``: k3 in the
    loss, k1 in the reward."""
    reference_every_steps: Count = 0
    """The reference becomes the policy after every so many steps, so that the distance is from a policy of late; 0: it
    stays the model that the run began with."""
    entropy_coefficient: Weight = 0.0
    """Times the policy's entropy is taken from each token's loss."""
    overlong_buffer: Count = 0
    """The last so many of ``rollout.max_new_tokens`` cost reward, evenly up to ``overlong_penalty`` (DAPO); 0: none."""
    overlong_penalty: Weight = 1.0
    rollout_correction: CorrectionName = "none"
    """What is done where the rollout's probabilities are not the trainer's, by their ratio w: ``tis`` multiplies each
    token's loss by w, truncated; ``mis`` leaves out tokens whose w is too large; ``icepop`` those too small as well;
    ``sequence-`` by the ratio of the whole response. It reads the rollout's own probabilities, whose last bits depend
    on how it was decoded: the policy is then equal with and without speculation but for these."""
    rollout_correction_low: Bound = "auto"
    """Least w; what is below is left out, or set to it."""
    rollout_correction_high: Bound = "auto"
    """Largest w."""
    max_refills: Count = 0
    """Dynamic sampling (DAPO): groups whose scores are all equal teach nothing, and are replaced by groups of further
    prompts, in at most so many further rollouts of a step; what is missing then is filled up with them. 0: off."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps that one step's rollouts are cut into."""

    @property
    def recipe(self) -> Recipe:
        """All parts."""
        return recipe_with(self.name, self.advantage, self.loss, self.aggregation, self.clip_low, self.clip_high)

    @property
    def kl(self) -> KLName:
        """How the distance from the reference is estimated."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k3" if self.kl_in == "loss" else "k1"

    @property
    def correction(self) -> Correction:
        """What is done about the rollout's probabilities, with its bounds."""
        return correction_with(self.rollout_correction, self.rollout_correction_low, self.rollout_correction_high)

    def resolved(self) -> AlgorithmSection:
        """The same with every ``auto`` replaced, which a later version's recipes cannot change."""
        bounds = {
            "rollout_correction_low": self.correction.low,
            "rollout_correction_high": self.correction.high,
        }
        return self.model_copy(update={**vars(self.recipe), "kl_estimator": self.kl, **bounds})


class OptimizerSection(Section):
    learning_rate: LearningRate = 1e-6
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    epsilon: Annotated[float, Field(ge=1e-30, le=1.0)] = 1e-8
    """Far smaller ones are 0 in float32, by which a weight without gradient would be divided."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e9), zero_or_from(1e-6, 1e9)] = 1.0
    """0 switches clipping off."""
    warmup_steps: Count = 0
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    offload_parameters: bool = False
    """Keep each rank's share of the policy's parameters in host memory too, at ZeRO stage 3; on CUDA."""
    offload: bool = False
    """Keep optimiser state in host memory."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens of one forward and backward pass on one rank, or on those that share it; one sequence may exceed it."""
    sequence_parallel: NumRanks = 1
    """Neighbouring ranks that share each micro-batch: a slice of its tokens each, and in attention a part of the heads
    (DeepSpeed-Ulysses). For responses whose activations no GPU holds."""
    gradient_checkpointing: Switch = "auto"
    """Keep one state a layer and token for the backward pass, which computes the rest of the layer again: a third more
    time for a small part of the memory. ``auto``: on a GPU, whose memory long responses would not fit."""

    def repeats_layers(self, device: str) -> bool:
        """Whether the backward pass computes each layer again, on a device of type ``cpu`` or ``cuda``."""
        if self.gradient_checkpointing == "auto":
            return device == "cuda"
        return self.gradient_checkpointing
