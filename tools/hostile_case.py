"""What a maker of hostile inputs hands to the tool that runs commands on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    kind: str
    """What is wrong with it, e.g. ``metrics.jsonl: a FIFO``."""
    config: Path
    """The job file for ``train --dry-run`` and ``evaluate``."""
    overrides: tuple[str, ...]
    """``key=value`` behind it."""
    run: Path
    """The run folder for ``watch``, ``report``, ``inspect_run`` and ``evaluate``."""
    must_fail: frozenset[str]
    """Commands that may not end with status 0, of "train", "watch", "report", "evaluate", "inspect", "check"."""
