"""Sections of the policy's update: objective, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Annotated, Literal

from pydantic import Field

from tlt_hpc.config.fields import (
    Count,
    LearningRate,
    NumRanks,
    NumSteps,
    NumTokens,
    PositiveInt,
    Section,
    TokenCount,
    Unit,
    Weight,
    check_package,
    zero_or_range_validator,
)
from tlt_hpc.config.recipes import (
    CORRECTION_BOUNDS,
    RECIPES,
    AggregationName,
    AlgorithmName,
    Correction,
    CorrectionName,
    GivenCorrection,
    KLName,
    Recipe,
    ScheduleName,
)

Bounds = Annotated[tuple[Weight, ...], Field(strict=False, min_length=2, max_length=2)]


class AlgorithmSection(Section):
    """The objective of the policy. A part that is ``auto`` follows from the algorithm's name; the configuration saved
    with a run has every ``auto`` replaced."""

    name: AlgorithmName = "grpo"
    """The algorithm (docs/train.md): how the advantage is computed and the probability ratio of new to old policy is
    clipped. It sets ``aggregation`` and ``clip``."""
    aggregation: Literal["auto", AggregationName] = "auto"
    """How token losses are combined into the step's loss; ``-norm`` divides by ``rollout.max_new_tokens``."""
    clip: Bounds | Literal["auto"] = "auto"
    """The ratio is clipped below 1 minus the first and above 1 plus the second of these values."""
    clip_dual: Weight = 0.0
    """A ratio counts at most this much where the advantage is negative. 0: no limit (verl's default is 3). As
    ``clip``, without effect in a step's first update."""
    kl_coefficient: Weight = 0.0
    """Weight of the KL divergence from the reference model. 0: no reference model is kept."""
    kl_estimator: KLName = "k3"
    """``k1`` is subtracted from the reward, the others are added to the loss. ``k2`` and ``k3+`` have the gradient of
    KL(policy || reference), ``k3`` that of KL(reference || policy); ``low_var_kl`` is ``k3`` held at 10,
    without a gradient from a ratio of 13.6 on."""
    entropy_coefficient: Weight = 0.0
    """Weight of the entropy bonus, which is subtracted from each token's loss."""
    router_aux_coefficient: Weight = 0.0
    """Weight of the load-balancing loss of a mixture of experts (0.001 in Qwen3's configuration). 0: off."""
    overlong: Annotated[TokenCount | Literal["mask"], Unit("tokens")] = 0
    """Responses near ``rollout.max_new_tokens`` (DAPO). A number: over the last this many tokens the reward falls by up
    to 1. ``mask``: responses that were cut add nothing to the loss. 0: neither."""
    rollout_correction: CorrectionName | Annotated[dict[GivenCorrection, Bounds], Field(min_length=1, max_length=1)] = (
        "none"
    )
    """Correction for the ratio between the probabilities of rollout engine and trainer: ``tis`` multiplies a token's
    loss by it, truncated at 2; ``mis`` leaves out tokens above 2, ``icepop`` those below 0.5 or above 5. Other
    bounds: ``{icepop = [0.25, 8.0]}``."""
    max_refills: Count = 0
    """Dynamic sampling (DAPO): groups whose scores are all equal are replaced by groups of further prompts, in at most
    this many additional rollouts of a step. 0: off."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per step; each uses an equal part of the step's responses."""

    @property
    def recipe(self) -> Recipe:
        """The named algorithm's parts, with those that are set replaced."""
        recipe = RECIPES[self.name]
        if self.aggregation != "auto":
            recipe = replace(recipe, aggregation=self.aggregation)
        if self.clip != "auto":
            recipe = replace(recipe, clip_low=self.clip[0], clip_high=self.clip[1])
        return recipe

    @property
    def kl_placement(self) -> Literal["loss", "reward"]:
        """Place where the divergence is applied: the reward or the loss.

        In the reward k1 gives the gradient of KL(policy || reference), in the loss none in the mean. There k2 and k3+
        give this gradient; k3 and low_var_kl give that of KL(reference || policy), which is close only where the two
        policies are (``rl/loss.py``).
        """
        return "reward" if self.kl_estimator == "k1" else "loss"

    @property
    def correction(self) -> Correction:
        """The correction of the rollout's probabilities, with its bounds."""
        given = self.rollout_correction
        if isinstance(given, str):
            return Correction(given, *CORRECTION_BOUNDS[given])
        ((name, bounds),) = given.items()
        return Correction(name, *bounds)

    def with_resolved_defaults(self) -> AlgorithmSection:
        """The same with every ``auto`` replaced, so that a later version's recipes cannot change it."""
        recipe, (name, *bounds) = self.recipe, astuple(self.correction)
        parts = {"aggregation": recipe.aggregation, "clip": (recipe.clip_low, recipe.clip_high)}
        correction = name if name == "none" else {name: tuple(bounds)}
        return self.model_copy(update={**parts, "rollout_correction": correction})

    @property
    def overlong_buffer(self) -> int:
        """Tokens of the soft penalty; 0: there is none."""
        return 0 if self.overlong == "mask" else self.overlong

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        if self.recipe.clip_low > 1:
            low, high = self.recipe.clip_low, self.recipe.clip_high
            yield f"algorithm.clip = {[low, high]}: a ratio is never below 0; use at most 1.0 as the first value"
        yield from self._bound_problems()
        if self.kl_coefficient and self.kl_placement == "reward" and self.recipe.advantage == "group":
            yield (
                f"algorithm.kl_estimator = 'k1', a part of the reward, with algorithm.name = {self.name!r}, which "
                "divides rewards by the group's deviation: in groups of equal scores only the divergence is left; use "
                "algorithm.kl_estimator = 'k3', or another algorithm"
            )
        if self.max_refills and self.recipe.advantage == "batch":
            yield (
                f"algorithm.max_refills = {self.max_refills} with algorithm.name = {self.name!r}, which learns from "
                "groups of equal scores too; use another algorithm, or leave algorithm.max_refills out"
            )

    def _bound_problems(self) -> Iterator[str]:
        recipe, (low, high) = self.recipe, (self.correction.low, self.correction.high)
        if self.clip_dual and recipe.loss == "weight-clip":
            yield (
                f"algorithm.clip_dual = {self.clip_dual} has no effect with algorithm.name = {self.name!r}, whose "
                "clip bounds the ratios of all tokens; leave it out"
            )
        elif 0 < self.clip_dual <= 1 + recipe.clip_high:
            yield (
                f"algorithm.clip_dual = {self.clip_dual} is within the upper bound of algorithm.clip, "
                f"{1 + recipe.clip_high:g}; use a larger ratio, such as 3.0, or 0"
            )
        if low > high or not (high or self.rollout_correction == "none"):
            yield f"algorithm.rollout_correction has the bounds {[low, high]}; give the smallest ratio, then a larger"


class LoraSection(Section):
    """Adapters of low rank (LoRA) that are trained in place of the policy's weights, which do not change: of all linear
    layers, in a mixture of experts of those of attention. Needs the package peft, and a learning rate ten to a hundred
    times as large."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """What the adapters add is multiplied by this value divided by ``rank``."""

    def check_installed(self) -> None:
        """Refuse to begin without peft where there are adapters; nothing is imported.

        Raises:
            ConfigError: with the command that installs it.
        """
        if self.rank:
            check_package(f"lora.rank = {self.rank} (0: no adapters)", "peft")


class OptimizerSection(Section):
    """AdamW of the policy (betas 0.9 and 0.999), and how its work is spread over ranks and memory."""

    learning_rate: LearningRate = 1e-6
    """Highest learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e9), zero_or_range_validator(1e-6, 1e9)] = 1.0
    """Gradients are scaled down to this norm. 0: no clipping."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly."""
    schedule: ScheduleName = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 by the end of the run. If it falls,
    ``run.num_steps`` cannot be changed on resume."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What DeepSpeed ZeRO shards over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload: bool | Literal["parameters"] = False
    """Keep the optimizer state in host memory; needs ``zero_stage`` 1 or higher. ``parameters``: the parameters'
    shards, too; needs ``zero_stage = 3`` and CUDA."""
    micro_batch_tokens: NumTokens = 8192
    """Tokens of one forward and backward pass, on one rank or on those that share a sequence. A longer sequence exceeds
    it."""
    sequence_parallel: NumRanks = 1
    """Consecutive ranks that share a micro-batch (DeepSpeed-Ulysses), if a response's activations do not fit a GPU."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep one hidden state per layer and token, and recompute the rest: a third more time, a fraction of the memory.
    ``auto``: on for CUDA."""

    def uses_gradient_checkpointing(self, device: str) -> bool:
        """Return True if the backward pass computes each layer again, on a device of type ``cpu`` or ``cuda``."""
        return device == "cuda" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        if self.offload == "parameters" and self.zero_stage < 3:
            yield (
                f"optimizer.offload = 'parameters' with optimizer.zero_stage = {self.zero_stage}: only stage 3 shards "
                "parameters; use optimizer.zero_stage = 3, or optimizer.offload = true"
            )
        elif self.offload and self.zero_stage == 0:
            yield "optimizer.offload = true needs sharded state; use optimizer.zero_stage = 1, 2 or 3"


class CheckpointSection(Section):
    """Checkpoints, from which a run is resumed."""

    every_steps: NumSteps = 10
    """Interval of checkpoints of policy, optimizer and drafter. The drafter alone is saved after every step."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept, beside that of the best evaluation."""
