"""What a check says. Knows no check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_REMEDY_OF_ANY = "mend that and run preflight again"
_NO_PACKAGE = "make the environment again (environment.yml, or make) and run preflight in it"


class Level(StrEnum):
    """How grave it is; only a failure keeps a job from running."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it where it is not well; each in one line."""

    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Verdict:
    """A finding with the name of its check."""

    name: str
    level: Level
    found: str
    remedy: str = ""


class Skip(Exception):  # noqa: N818
    """A check cannot be made; its text says why."""


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, found, remedy)


def failure(found: str, remedy: str) -> Finding:
    return Finding(Level.FAILURE, found, remedy)


def judge(name: str, check: Callable[[], Finding]) -> Verdict:
    """What a check says, whatever it meets: a mistake of the user's, a system that refuses, a package that lacks.

    A programmer's mistake still ends the command.
    """
    try:
        finding = check()
    except Skip as reason:
        finding = Finding(Level.SKIPPED, str(reason))
    except ImportError as error:
        finding = failure(f"cannot import what it takes: {_line(error)}", _NO_PACKAGE)
    except ValueError as error:
        finding = failure_of(error)
    except OSError as error:
        finding = failure(_line(error), _REMEDY_OF_ANY)
    return Verdict(name, finding.level, finding.found, finding.remedy)


def failure_of(error: ValueError) -> Finding:
    """An error of this project's: what is wrong stands before the last semicolon, the remedy behind it."""
    found, separator, remedy = _line(error).rpartition("; ")
    return failure(found, remedy) if separator else failure(remedy, _REMEDY_OF_ANY)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
