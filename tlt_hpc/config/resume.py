"""Which keys may change when a run continues, and the refusal of others."""

from __future__ import annotations

import os
from pathlib import Path

from tlt_hpc.config.base import ConfigError
from tlt_hpc.config.drafter import WarmupSection
from tlt_hpc.config.evaluation import EvaluationSection
from tlt_hpc.config.reading import load_saved_config
from tlt_hpc.config.tracking import TrackingSection
from tlt_hpc.config.whole import Config

# What may differ when a run is resumed: how long it continues, where it runs, how often it saves, what it may occupy.
# None of it changes a token; the rank count and the ZeRO stage change the order of gradient sums, hence last bits.
FREE_ON_RESUME = frozenset(
    {
        "run.num_steps",
        "run.ranks",
        "run.folder",
        "run.stall_factor",
        "model.path",
        "model.device",
        "data.overlong",  # what of these two may change data/claim.py says
        "data.broken_rows",
        "reward.workers",
        "rollout.max_live",
        "rollout.kv_bytes",
        "rollout.page_size",
        "rollout.tensor_parallel",
        "speculation.strategies",
        "speculation.profile_seconds",
        "drafter.average_merges",
        "drafter.micro_step_tokens",
        "drafter.micro_step_seconds",
        "drafter.cache_bytes",
        "drafter.schedule",
        "drafter.cache_folder",
        "optimizer.zero_stage",
        "optimizer.offload",
        "optimizer.offload_parameters",
        "optimizer.micro_batch_tokens",
        "optimizer.gradient_checkpointing",
        "optimizer.sequence_parallel",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "checkpoint.replay",
        "checkpoint.keep_responses_seconds",
        *(f"warmup.{name}" for name in WarmupSection.model_fields),  # what a warm-up may not change it checks itself
        *(f"evaluation.{name}" for name in EvaluationSection.model_fields),  # so does an evaluation
        *(f"tracking.{name}" for name in TrackingSection.model_fields),
    }
)


def check_resumable(saved: Path, config: Config) -> None:
    """Refuse to continue, with a configuration whose changes would make it another run, with the one that is ``saved``.

    Raises:
        ConfigError: names all such keys with both values.
    """
    if not os.path.lexists(saved):
        return
    changed = changed_keys(load_saved_config(saved), config)
    if changed:
        told = "; ".join(f"{key} = {old!r}, now {new!r}" for key, (old, new) in changed.items())
        values = "value" if len(changed) == 1 else "values"
        raise ConfigError(
            f"{saved} holds a run with {told}: resume with the old {values} or give another run.name (what may change: "
            'docs/resume.md, "Changing settings on resume")'
        )


def changed_keys(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """Keys whose values differ and may not on resume, with both values."""
    changed = {}
    for section, values in old.model_dump().items():
        for name, value in values.items():
            now = new.model_dump()[section][name]
            if value != now and f"{section}.{name}" not in FREE_ON_RESUME:
                changed[f"{section}.{name}"] = (value, now)
    return changed
