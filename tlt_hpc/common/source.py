"""Which code runs: versions of packages, the commit of this one's clone, a digest of its files, and what is extra.

The core imports nothing of ``tlt_hpc.extras``: ``load_extra`` finds it by name.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

import tlt_hpc
from tlt_hpc.common.errors import UserError

PACKAGE = Path(tlt_hpc.__file__).parent


def installed_version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    from importlib import metadata  # takes 20 ms, which every command would wait for

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def source_digest(folder: Path = PACKAGE) -> str:
    """Digest of the names and contents of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_git_commit(clone: Path = PACKAGE.parent) -> str:
    """The commit that is checked out in a clone or a worktree; empty if it is neither.

    It is read from the log of HEAD: git need not be installed, and no process is started beside MPI.
    """
    git = clone / ".git"
    try:
        if git.is_file():
            git = clone / git.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        return (git / "logs" / "HEAD").read_text(encoding="utf-8").splitlines()[-1].split()[1]
    except (OSError, UnicodeDecodeError, IndexError):
        return ""


def load_extra(module: str, instead: str = "") -> Any:
    """Import and return a module, given by its full name: of a command, or of ``tlt_hpc.extras``.

    Args:
        instead: what a user without it may do, after "or".

    Raises:
        UserError: this installation lacks it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):  # a library that the extra needs
            raise
        remedy = f"install the whole package (docs/install.md){instead and f', or {instead}'}"
        raise UserError(f"this installation lacks {error.name}", remedy) from None
