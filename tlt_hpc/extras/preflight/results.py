"""What a check finds, and how errors become findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_REMEDY_OF_ANY = "fix that and run preflight again"
_NO_PACKAGE = "create the environment again (environment.yml, or make) and run preflight in it"


class Level(StrEnum):
    """Severity; only a failure keeps a job from running."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What a check found, and the remedy if something is wrong; each in one line."""

    level: Level
    found: str
    remedy: str = ""


class Skip(Exception):  # noqa: N818
    """A check cannot be made; the text says why."""


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, found, remedy)


def failure(found: str, remedy: str) -> Finding:
    return Finding(Level.FAILURE, found, remedy)


def run_check(check: Callable[[], Finding]) -> Finding:
    """Run a check; a user's mistake, a refusal by the system and a missing package become its finding.

    A programmer's mistake still ends the command.
    """
    try:
        return check()
    except Skip as reason:
        return Finding(Level.SKIPPED, str(reason))
    except ImportError as error:
        return failure(f"cannot import what it needs: {_error_line(error)}", _NO_PACKAGE)
    except ValueError as error:
        return failure_of(error)
    except OSError as error:
        return failure(_error_line(error), _REMEDY_OF_ANY)


def failure_of(error: ValueError) -> Finding:
    """Splits this project's error messages: the problem is before the last semicolon, the remedy after it."""
    found, separator, remedy = _error_line(error).rpartition("; ")
    return failure(found, remedy) if separator else failure(remedy, _REMEDY_OF_ANY)


def _error_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
