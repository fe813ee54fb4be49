"""Which keys may change when a run continues, and the refusal of others."""

from __future__ import annotations

import os
from pathlib import Path

from tlt_hpc.config.fields import ConfigError
from tlt_hpc.config.reading import load_saved_config
from tlt_hpc.config.rollout_sections import WarmupSection
from tlt_hpc.config.sections import Config, EvaluationSection

# What may differ when a run is resumed: how long it continues, where it runs, how often it saves, what it may occupy.
# None of it changes a token; the rank count and the ZeRO stage change the order of gradient sums, hence last bits.
_FREE = {
    "run": ("num_steps", "ranks", "folder", "stall_factor", "trackers"),
    "model": ("path", "device"),
    "data": ("overlong",),  # checkpoint/claim.py restricts it
    "reward": ("workers",),
    "rollout": ("max_live", "kv_bytes", "tensor_parallel"),
    "speculation": ("strategies",),
    "drafter": ("learning_rate", "micro_step_tokens", "cache_bytes", "cache_folder"),
    "optimizer": (
        *("zero_stage", "offload", "micro_batch_tokens"),
        *("gradient_checkpointing", "sequence_parallel"),
    ),
    "checkpoint": ("every_steps", "keep"),
    "warmup": tuple(WarmupSection.model_fields),  # a warm-up and an evaluation check their own keys
    "evaluation": tuple(EvaluationSection.model_fields),
}
FREE_ON_RESUME = frozenset(f"{section}.{name}" for section, names in _FREE.items() for name in names)


def check_resumable(saved: Path, config: Config) -> None:
    """Refuse changes to the ``saved`` configuration that would make it another run.

    Raises:
        ConfigError: names all such keys with both values.
    """
    if not os.path.lexists(saved):
        return
    now, before = config.model_dump(), load_saved_config(saved)
    # a learning rate that falls to the end of the run depends on where that is
    free = FREE_ON_RESUME - ({"run.num_steps"} if before.optimizer.schedule != "constant" else set())
    changed = {
        f"{section}.{name}": (value, now[section][name])
        for section, values in before.model_dump().items()
        for name, value in values.items()
        if value != now[section][name] and f"{section}.{name}" not in free
    }
    if changed:
        told = "; ".join(f"{key} = {old!r}, now {new!r}" for key, (old, new) in changed.items())
        values = "value" if len(changed) == 1 else "values"
        raise ConfigError(
            f"{saved} holds a run with {told}: resume with the old {values} or give another run.name (what may change: "
            'docs/resume.md, "Changing settings on resume")'
        )
