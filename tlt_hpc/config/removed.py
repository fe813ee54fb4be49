"""Keys of earlier versions: what a saved configuration may still say of them, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tlt_hpc.config.base import MAX_SECONDS
from tlt_hpc.config.recipes import CORRECTION_BOUNDS


@dataclass(frozen=True)
class Removed:
    """A key that is no longer there.

    ``instead`` completes the sentence "it was removed: ..." for a user's own file. A saved configuration may still have
    the key with the value ``default``, which is what later versions do; ``any_value``: with any value, of which a
    warning tells, since no step of a training depends on it.
    """

    default: Any
    instead: str
    any_value: bool = False
    of: Callable[[Mapping[str, Any]], Any] | None = None
    """The value that later versions act on, given the section's other keys; instead of ``default``."""

    def is_kept(self, value: object, others: Mapping[str, Any]) -> bool:
        """Whether later versions act as with ``value``, beside ``others`` in the section."""
        default = self.of(others) if self.of else self.default
        return type(value) is type(default) and value == default


def _correction_bounds(algorithm: Mapping[str, Any]) -> tuple[float, float] | tuple[None, None]:
    return CORRECTION_BOUNDS.get(algorithm.get("rollout_correction", "none"), (None, None))


_BOUNDS = "the bounds are 0 and 2, for icepop 0.5 and 5 (CORRECTION_BOUNDS in config/recipes.py)"
_ABLATION = "the drafter is always trained in the tail, on its own run's responses"
REMOVED: dict[str, Removed] = {
    "speculation.depths": Removed(None, "name strategies such as drafter-4 in speculation.strategies"),
    "speculation.sharpness": Removed(None, "write it behind a strategy in speculation.strategies, as in drafter-4a1.5"),
    "data.reward": Removed(None, "use reward.default"),
    "data.curriculum": Removed("", "epochs are shuffled; train in stages, each with its own data.source"),
    "data.template_date": Removed("2024-07-26", "chat templates always get this date (TEMPLATE_DATE in data/chat.py)"),
    "data.task_size": Removed(10_000, "give size in data.task_args"),
    "reward.wall_seconds": Removed(
        300.0,
        "it is 60 times reward.cpu_seconds",
        of=lambda reward: min(60.0 * reward.get("cpu_seconds", 5.0), MAX_SECONDS),
    ),
    "reward.format_pattern": Removed("", "use reward.format_tags, or judge the form in reward.function"),
    "rollout.prefill_tokens": Removed(4096, "it is always 4096", any_value=True),
    "rollout.tie_guard": Removed("auto", "the guard is on for model.dtype = 'float32', and off for 'bfloat16'"),
    "speculation.chooser": Removed("goodput", "strategies are always chosen by goodput", any_value=True),
    "speculation.epsilon": Removed(0.05, "it is always 0.05 (EPSILON in rollout/chooser.py)", any_value=True),
    "speculation.window": Removed(128, "it is always 128 (WINDOW in rollout/chooser.py)", any_value=True),
    "speculation.ngram_orders": Removed([12, 8, 6, 4, 2, 1], "they are ORDERS in models/ngram.py", any_value=True),
    "speculation.ngram_history_tokens": Removed(
        200_000, "it is always 200000 (HISTORY_TOKENS in rollout/ngram_drafts.py)", any_value=True
    ),
    "drafter.feature_loss_weight": Removed(1.0, "it is always 1 (LossSettings in drafting/loss.py)"),
    "drafter.token_loss_weight": Removed(0.1, "it is always 0.1 (LossSettings in drafting/loss.py)"),
    "drafter.unroll_steps": Removed(0, "it is 1 for drafter.form = 'eagle' and 7 for 'eagle3'"),
    "drafter.unroll_decay": Removed(0.8, "it is always 0.8 (LossSettings in drafting/loss.py)"),
    "drafter.every_steps": Removed(1, "use drafter.schedule = 'always' or 'falling'"),
    "drafter.schedule": Removed("every", "use drafter.schedule = 'always' or 'falling'"),
    "drafter.fall": Removed(0.1, "it is always 0.1 (FALL in drafting/schedule.py)", any_value=True),
    "drafter.cache_compression": Removed("none", "features are not compressed", any_value=True),
    "drafter.place": Removed("tail", _ABLATION),
    "drafter.serial_micro_steps": Removed(20, _ABLATION, any_value=True),
    "drafter.serial_as": Removed("", _ABLATION),
    "drafter.rollouts": Removed("fresh", _ABLATION),
    "warmup.strategy": Removed("off", "a warm-up decodes without speculation", any_value=True),
    "warmup.tokens": Removed(0, "use warmup.updates, each of warmup.batch_tokens", any_value=True),
    "warmup.minutes": Removed(
        0.0, "use warmup.updates; a warm-up that is stopped resumes with the same command", any_value=True
    ),
    "warmup.ramp_updates": Removed(50, "it is always 50", any_value=True),
    "warmup.patience": Removed(8, "it is always 8", any_value=True),
    "warmup.validation_tokens": Removed(512, "it is always 512", any_value=True),
    "warmup.validation_strategy": Removed("drafter-5", "it is always drafter-5", any_value=True),
    "algorithm.kl_in": Removed(
        "loss",
        "algorithm.kl_estimator = 'k1' is applied in the reward, 'k2' and 'k3' in the loss",
        any_value=True,  # the estimator that is saved beside it says the same
    ),
    "algorithm.rollout_correction_low": Removed(0.0, _BOUNDS, of=lambda algorithm: _correction_bounds(algorithm)[0]),
    "algorithm.rollout_correction_high": Removed(0.0, _BOUNDS, of=lambda algorithm: _correction_bounds(algorithm)[1]),
    "algorithm.overlong_penalty": Removed(1.0, "it is always 1"),
    "optimizer.betas": Removed([0.9, 0.999], "they are always [0.9, 0.999]"),
    "optimizer.epsilon": Removed(1e-8, "it is always 1e-8"),
    "checkpoint.drafter_every_steps": Removed(1, "the drafter is saved after every step", any_value=True),
    "checkpoint.background": Removed(True, "checkpoints are always written in the background", any_value=True),
    "evaluation.greedy": Removed(True, "every prompt is answered greedily once", any_value=True),
    "evaluation.names": Removed([], "data sets are called after their files", any_value=True),
    "evaluation.pass_k": Removed([], "k is 2, 4, 8 and so on, and evaluation.samples", any_value=True),
    "evaluation.seed": Removed(0, "it is always 0", any_value=True),
    "tracking.project": Removed("tlt", "set the environment variable WANDB_PROJECT", any_value=True),
    "tracking.group": Removed("", "set the environment variable WANDB_RUN_GROUP", any_value=True),
    "tracking.name": Removed("", "set the environment variable WANDB_NAME", any_value=True),
}
"""By section and key. Those up to ``data.reward`` were removed before version 0.1."""
