"""What the policy is trained on and how: [algorithm] and [optimizer]. Knows recipes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tlt_hpc.config.base import (
    MAX_WEIGHT,
    Count,
    LearningRate,
    NumRanks,
    NumTokens,
    PositiveInt,
    Section,
    StepCount,
    TokenCount,
    Weight,
    zero_or_from,
)
from tlt_hpc.config.recipes import (
    CORRECTION_BOUNDS,
    AdvantageName,
    AggregationName,
    AlgorithmName,
    Correction,
    CorrectionName,
    KLName,
    LossName,
    Recipe,
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
    """The objective of the policy. A part that is ``auto`` follows from the algorithm's name; the configuration saved
    with a run has every ``auto`` replaced."""

    name: AlgorithmName = "grpo"
    """The algorithm, a named combination of ``advantage``, ``loss``, ``aggregation``, ``clip_low`` and
    ``clip_high``."""
    advantage: Literal["auto", AdvantageName] = "auto"
    """How a response's advantage is computed. ``group``: reward minus the mean of its group, divided by the group's
    standard deviation; ``group-mean``: the same without the division; ``leave-one-out``: reward minus the mean of the
    other responses of the group; ``batch``: reward normalised over all tokens of the step; ``group-mean-batch``: reward
    minus the group's mean, then normalised over all tokens."""
    loss: Literal["auto", LossName] = "auto"
    """How the loss uses the probability ratio of new to old policy. ``clip``: PPO's clipped ratio of each token;
    ``sequence-clip``: the clipped ratio of the whole response (GSPO); ``weight-clip``: the clipped ratio is a constant
    weight, and every token keeps its gradient (CISPO)."""
    aggregation: Literal["auto", AggregationName] = "auto"
    """How token losses are combined into the step's loss; the suffix ``-norm`` divides by
    ``rollout.max_new_tokens``."""
    clip_low: Bound = "auto"
    """The ratio is clipped below 1 minus this value."""
    clip_high: Bound = "auto"
    """The ratio is clipped above 1 plus this value."""
    kl_coefficient: Weight = 0.0
    """Weight of the KL divergence from the reference model. 0: no reference model is kept."""
    kl_estimator: KLName = "k3"
    """Estimator of the KL divergence, and where it is applied. ``k1`` is summed over a response and subtracted from its
    reward; ``k2`` and ``k3`` are added to each token's loss."""
    reference_every_steps: StepCount = 0
    """The reference model is replaced by the current policy every this many steps. 0: it remains the initial model."""
    entropy_coefficient: Weight = 0.0
    """Weight of the entropy bonus, which is subtracted from each token's loss."""
    overlong_buffer: TokenCount = 0
    """Soft length penalty (DAPO): over the last this many of ``rollout.max_new_tokens`` the reward falls linearly by up
    to 1. 0: no penalty."""
    rollout_correction: CorrectionName = "none"
    """Correction for the difference between the probabilities of rollout engine and trainer, by their ratio. ``tis``
    multiplies a token's loss by the ratio, truncated at 2; ``mis`` leaves out tokens whose ratio is above 2; ``icepop``
    those whose ratio is below 0.5 or above 5; the prefix ``sequence-`` uses the ratio of the whole response. With a
    correction the policy depends on the last bits of the rollout's probabilities, which differ slightly between
    decoding with and without speculation."""
    max_refills: Count = 0
    """Dynamic sampling (DAPO): groups whose scores are all equal have no gradient, and are replaced by groups of
    further prompts in at most this many additional rollouts of a step. Groups that are still missing are filled with
    those without a gradient. 0: off."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per step; each uses an equal part of the step's responses."""

    @property
    def recipe(self) -> Recipe:
        """All parts."""
        return recipe_with(self.name, self.advantage, self.loss, self.aggregation, self.clip_low, self.clip_high)

    @property
    def kl_in(self) -> Literal["loss", "reward"]:
        """Where the divergence is applied: k1 has the right gradient only in the reward, k2 and k3 only in the loss."""
        return "reward" if self.kl_estimator == "k1" else "loss"

    @property
    def correction(self) -> Correction:
        """What is done about the rollout's probabilities, with its bounds."""
        return Correction(self.rollout_correction, *CORRECTION_BOUNDS[self.rollout_correction])

    def resolved(self) -> AlgorithmSection:
        """The same with every ``auto`` replaced, which a later version's recipes cannot change."""
        return self.model_copy(update=vars(self.recipe))


class OptimizerSection(Section):
    """AdamW of the policy, with betas of 0.9 and 0.999, and how its work is spread over ranks and memory."""

    learning_rate: LearningRate = 1e-6
    """Learning rate, constant after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e9), zero_or_from(1e-6, 1e9)] = 1.0
    """Gradients are scaled down to this norm. 0: no clipping."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What DeepSpeed ZeRO shards over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload: bool = False
    """Keep the optimizer state in host memory; needs ``zero_stage`` 1 or higher."""
    offload_parameters: bool = False
    """Also keep each rank's shard of the parameters in host memory; needs ``zero_stage = 3``, ``offload = true`` and
    CUDA."""
    micro_batch_tokens: NumTokens = 8192
    """Tokens of one forward and backward pass, on one rank or on the ranks that share a sequence. A single longer
    sequence exceeds it."""
    sequence_parallel: NumRanks = 1
    """Consecutive ranks that share each micro-batch (DeepSpeed-Ulysses): each holds a slice of the tokens and, in
    attention, a part of the heads. For responses whose activations do not fit one GPU."""
    gradient_checkpointing: Switch = "auto"
    """Keep one hidden state per layer and token, and recompute the rest in the backward pass: a third more time for a
    fraction of the memory. ``auto``: on for CUDA."""

    def repeats_layers(self, device: str) -> bool:
        """Whether the backward pass computes each layer again, on a device of type ``cpu`` or ``cuda``."""
        if self.gradient_checkpointing == "auto":
            return device == "cuda"
        return self.gradient_checkpointing
