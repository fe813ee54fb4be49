"""Keys of earlier versions: which values a saved configuration may still have, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.config.recipes import CORRECTION_BOUNDS, RECIPES, Recipe
from tlt_hpc.config.sections import MAX_SECONDS

ANY = object()
"""A saved configuration may have any value, because no token and no update of a run depends on the key."""


@dataclass(frozen=True)
class Removed:
    """A removed key."""

    instead: str
    """Completes the sentence "it was removed: ..."."""
    default: Any = ANY
    """The value that a saved configuration may have, which is what later versions do."""
    of: Callable[[Mapping[str, Any]], Any] | None = None
    """Computes that value from the section's other keys, instead of ``default``."""

    def accepts(self, value: object, others: Mapping[str, Any]) -> bool:
        """Whether a saved configuration may have ``value``, given the section's other keys."""
        default = self.of(others) if self.of else self.default
        return default is ANY or (type(value) is type(default) and value == default)


def _bound(index: int) -> Callable[[Mapping[str, Any]], Any]:
    return lambda algorithm: CORRECTION_BOUNDS.get(algorithm.get("rollout_correction", "none"), (None, None))[index]


def _recipe(algorithm: Mapping[str, Any]) -> Recipe:
    return RECIPES.get(algorithm.get("name", "grpo"), RECIPES["grpo"])


_BOUNDS = "the bounds are 0 and 2, for icepop 0.5 and 5 (CORRECTION_BOUNDS in config/recipes.py)"
_PARTS = "use the algorithm.name that has it, with algorithm.aggregation, clip_low and clip_high (docs/train.md)"
_ABLATION = "the drafter is always trained in the tail, on its own run's responses"
_EVERY_STEP = "the drafter is trained in every step, or never with drafter.train = false"
REMOVED: dict[str, Removed] = {
    "data.curriculum": Removed("epochs are shuffled; train in stages, each with its own data.source", ""),
    "data.template_date": Removed("chat templates always get this date (TEMPLATE_DATE in data/chat.py)", "2024-07-26"),
    "data.task_size": Removed("give size in data.task_args", 10_000),
    "data.broken_rows": Removed("remove broken rows; `tlt data inspect` names them", "error"),
    "reward.wall_seconds": Removed(
        "it is 60 times reward.cpu_seconds", of=lambda reward: min(60.0 * reward.get("cpu_seconds", 5.0), MAX_SECONDS)
    ),
    "reward.format_pattern": Removed("use reward.format_tags, or judge the form in reward.function", ""),
    "rollout.prefill_tokens": Removed("it is always 4096"),
    "rollout.tie_guard": Removed("the guard is on for model.dtype = 'float32', and off for 'bfloat16'", "auto"),
    "speculation.chooser": Removed("strategies are always chosen by goodput"),
    "speculation.epsilon": Removed("it is always 0.05 (EPSILON in rollout/chooser.py)"),
    "speculation.window": Removed("it is always 128 (WINDOW in rollout/chooser.py)"),
    "speculation.profile_seconds": Removed("costs are learned from the rounds of a rollout"),
    "speculation.ngram_orders": Removed("they are ORDERS in models/ngram.py"),
    "speculation.ngram_history_tokens": Removed("it is HISTORY_TOKENS in rollout/ngram_drafts.py"),
    "drafter.feature_loss_weight": Removed("it is always 1 (LossSettings in drafting/loss.py)", 1.0),
    "drafter.token_loss_weight": Removed("it is always 0.1 (LossSettings in drafting/loss.py)", 0.1),
    "drafter.unroll_steps": Removed("it is 1 for drafter.form = 'eagle' and 7 for 'eagle3'", 0),
    "drafter.unroll_decay": Removed("it is always 0.8 (LossSettings in drafting/loss.py)", 0.8),
    "drafter.every_steps": Removed(_EVERY_STEP, 1),
    "drafter.schedule": Removed(_EVERY_STEP),
    "drafter.fall": Removed(_EVERY_STEP),
    "drafter.cache_compression": Removed("features are not compressed"),
    "drafter.place": Removed(_ABLATION, "tail"),
    "drafter.serial_micro_steps": Removed(_ABLATION),
    "drafter.serial_as": Removed(_ABLATION, ""),
    "drafter.rollouts": Removed(_ABLATION, "fresh"),
    "warmup.noise": Removed("features get no noise"),
    "warmup.strategy": Removed("a warm-up decodes without speculation"),
    "warmup.tokens": Removed("use warmup.updates, each of warmup.batch_tokens"),
    "warmup.minutes": Removed("use warmup.updates; a warm-up that is stopped resumes with the same command"),
    "warmup.ramp_updates": Removed("it is always 50"),
    "warmup.patience": Removed("it is always 8"),
    "warmup.validation_tokens": Removed("it is always 512"),
    "warmup.validation_strategy": Removed("it is always drafter-5"),
    "algorithm.advantage": Removed(_PARTS, of=lambda algorithm: _recipe(algorithm).advantage),
    "algorithm.loss": Removed(_PARTS, of=lambda algorithm: _recipe(algorithm).loss),
    # the estimator that is saved beside it has the same effect
    "algorithm.kl_in": Removed("algorithm.kl_estimator = 'k1' is applied in the reward, 'k2' and 'k3' in the loss"),
    "algorithm.reference_every_steps": Removed(
        "the reference is the initial model; start a new run from a model exported by tlt export-policy", 0
    ),
    "algorithm.rollout_correction_low": Removed(_BOUNDS, of=_bound(0)),
    "algorithm.rollout_correction_high": Removed(_BOUNDS, of=_bound(1)),
    "algorithm.overlong_penalty": Removed("it is always 1", 1.0),
    "optimizer.betas": Removed("they are always [0.9, 0.999]", [0.9, 0.999]),
    "optimizer.epsilon": Removed("it is always 1e-8", 1e-8),
    "checkpoint.drafter_every_steps": Removed("the drafter is saved after every step"),
    "checkpoint.background": Removed("checkpoints are always written in the background"),
    "evaluation.greedy": Removed("every prompt is answered greedily once"),
    "evaluation.names": Removed("data sets are called after their files"),
    "evaluation.pass_k": Removed("k is 2, 4, 8 and so on, and evaluation.samples"),
    "evaluation.seed": Removed("it is always 0"),
    "tracking.project": Removed("set the environment variable WANDB_PROJECT"),
    "tracking.group": Removed("set the environment variable WANDB_RUN_GROUP"),
    "tracking.name": Removed("set the environment variable WANDB_NAME"),
}
"""By section and key."""
