"""What to say of a path that is no run's folder: which runs there are, in it or beside it."""

from __future__ import annotations

from pathlib import Path

_MARKS = ("config.toml", "metrics.jsonl", "rollouts")
_MAX_NAMED = 4


def no_run(path: Path, lacks: str = "rollouts/ and no metrics.jsonl") -> str:
    """Why a path is no run's folder (where it is a folder: what it lacks), and what may be meant."""
    if path.exists() and not path.is_dir():
        return f"{path} is a file; give a run's folder, with its rollouts/ and metrics.jsonl"
    if within := _named(path):
        return f"{path} is no run's folder, it holds some; give one of them: {within}"
    why = f"{path} holds no {lacks}" if path.exists() else f"{path} does not exist"
    beside = _named(path.parent)
    return f"{why}; runs in {path.parent}: {beside}" if beside else f"{why}; give a run's folder"


def _named(folder: Path) -> str:
    """The runs in a folder."""
    names = sorted({mark.parent.name for name in _MARKS for mark in folder.glob(f"*/{name}")})
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
