"""One hostile input, as ``hostile.py`` runs commands on it and as its makers hand it over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A job file and a run folder, and what is wrong with one of them."""

    kind: str
    """What is wrong with it, e.g. "metrics.jsonl: a FIFO"."""
    config: Path
    """The job file for ``train --dry-run`` and ``evaluate``."""
    overrides: tuple[str, ...]
    """key=value behind it."""
    run: Path
    """The run folder for ``watch``, ``report``, ``inspect_run`` and ``evaluate``."""
    must_fail: frozenset[str]
    """Commands that may not end with status 0, of "train", "watch", "report", "evaluate", "inspect", "check"."""
