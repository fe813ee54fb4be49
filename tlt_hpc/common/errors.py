"""The one error that every package may raise, apart from the configuration, whose libraries take long to import."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can fix; its text is one line with the remedy, and a command ends with it."""
