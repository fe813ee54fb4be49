"""Who else is told of a run's figures: [tracking]."""

from __future__ import annotations

from typing import Literal

from tlt_hpc.config.base import Label, Section, SomeLabel


class TrackingSection(Section):
    """Beside ``metrics.jsonl`` and the rollout log, which are always written."""

    tensorboard: bool = False
    """Event files under the run's ``tensorboard``."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: ``offline`` writes files under the run's ``wandb``, for `wandb sync`; ``online`` needs a
    network on the node of rank 0, and a login."""
    project: SomeLabel = "tlt"
    """Of Weights & Biases."""
    group: Label = ""
    """Of Weights & Biases; empty: none."""
    name: Label = ""
    """What the run is called there; empty: ``run.name``."""
