"""Who else is told of a run's figures: [tracking]."""

from __future__ import annotations

import importlib.util
from typing import Literal

from tlt_hpc.common.errors import UserError
from tlt_hpc.config.base import Section


class TrackingSection(Section):
    """Trackers that receive what ``metrics.jsonl`` holds."""

    tensorboard: bool = False
    """Write event files to the run's ``tensorboard`` folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases. ``offline`` writes files to the run's ``wandb`` folder, for ``wandb sync``; ``online`` needs a
    network on the node of rank 0, and a login. Project, group and name are those of the environment variables
    ``WANDB_PROJECT`` (default ``tlt``), ``WANDB_RUN_GROUP`` and ``WANDB_NAME`` (default ``run.name``)."""


def asked_for(section: TrackingSection) -> dict[str, str]:
    """The trackers that are asked for, by the key that does."""
    found = {"tensorboard": "tracking.tensorboard = true"} if section.tensorboard else {}
    return found | ({"wandb": f"tracking.wandb = {section.wandb!r}"} if section.wandb != "off" else {})


def check_installed(section: TrackingSection) -> None:
    """Refuse to begin without a package that is asked for; nothing is imported.

    Raises:
        UserError: with the command that installs it.
    """
    for package, key in asked_for(section).items():
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{key} needs the package {package!r}, which is not installed; pip install {package}")
