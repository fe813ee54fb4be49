"""Finds parts of ``tlt_hpc.extras`` by their names: the core imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tlt_hpc.common.errors import UserError


def load_extra(module: str) -> Any:
    """Import and return a module, given by its full name: of a command, or of ``tlt_hpc.extras``.

    Raises:
        UserError: this installation lacks it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):  # a library that the extra needs
            raise
        raise UserError(
            f"this installation lacks {error.name}", "install the whole package (docs/install.md)"
        ) from None
