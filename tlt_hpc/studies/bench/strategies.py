"""Which strategies a bench lets the engine choose from. Knows names, not what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_hpc.config import SpeculationSection
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of, strategy_named
from tlt_hpc.studies.bench.subject import Subject


def chosen_strategies(names: Sequence[str], subject: Subject) -> tuple[Strategy, ...]:
    """The named strategies, "off" always among them; without names those of a run's defaults.

    Raises:
        ValueError: a name is no strategy, or needs a drafter that is not there.
    """
    if not names:
        mode = "ngram" if subject.drafter is None else "full"
        return strategies_of(mode, SpeculationSection().strategies)
    return tuple(dict.fromkeys((OFF, *(_checked(name, subject) for name in names))))


def _checked(name: str, subject: Subject) -> Strategy:
    try:
        strategy = strategy_named(name)
    except ValueError as error:
        raise ValueError(f"--strategies: {error}") from None
    if strategy.has_drafter and subject.drafter is None:
        raise ValueError(f"--strategies {name}: model {subject.name} has no drafter; give one with --drafter FOLDER")
    return strategy
