"""Keeps what a program or a test raises, to be told instead of ending the process."""

from __future__ import annotations


class Attempt:
    """A block whose exception is kept; lack of memory ends the process.

    Args:
        kinds: exceptions that are kept.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds
        self.error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, self._kinds) and not isinstance(error, MemoryError):
            self.error = error
        return self.error is not None
