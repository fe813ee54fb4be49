"""Which code runs: the package's version, the commit of its clone, a digest of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tlt_hpc

PACKAGE = Path(tlt_hpc.__file__).parent


def source_digest(folder: Path = PACKAGE) -> str:
    """Of the names and contents of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def git_commit(clone: Path = PACKAGE.parent) -> str:
    """The commit that is checked out there; empty where it is no clone. Read, for git need not be there."""
    try:
        git = _git_folder(clone / ".git")
        common = git / "commondir"  # of a worktree, whose branches are the clone's
        shared = git / _text(common) if common.is_file() else git
        head = _text(git / "HEAD")
        commit = _resolve(shared, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if len(commit) in (40, 64) and set(commit) <= set("0123456789abcdef") else ""


def _git_folder(path: Path) -> Path:
    return path.parent / _text(path).removeprefix("gitdir: ") if path.is_file() else path


def _resolve(git: Path, name: str) -> str:
    """What a branch stands at: in a file of its own, or among the packed ones."""
    if (git / name).is_file():
        return _text(git / name)
    rows = (line.split() for line in _text(git / "packed-refs").splitlines() if line[:1] not in ("#", "^"))
    return next((row[0] for row in rows if row[1:] == [name]), "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
