"""The one error that every package may raise, apart from the configuration, whose libraries take long to import."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can fix; its text is one line with the remedy, and a command ends with it.

    It is made from the whole text, or from what is wrong and the remedy, where a caller may know a better remedy.
    """

    def __str__(self) -> str:
        return "; ".join(self.args)

    @property
    def message_without_remedy(self) -> str:
        """The mistake, without its remedy unless the error was made from the whole text."""
        return str(self.args[0])
