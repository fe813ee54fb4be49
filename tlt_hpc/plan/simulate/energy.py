"""Watts by what a rank does, and a step's energy from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tlt_hpc.plan.simulate.step import Steps


@dataclass(frozen=True)
class Watts:
    """Of one GPU with its share of the node. Assumed, none of them measured here: 700 W is an H100's limit."""

    decode: float = 450.0
    train: float = 600.0
    wait: float = 150.0
    update: float = 650.0


def kilowatt_hours(steps: Steps, watts: Watts) -> float:
    """Of an average step, all ranks."""
    idle, harvested = float(steps.idle_rank_seconds.mean()), float(steps.harvested_rank_seconds.mean())
    busy = float(steps.rollout_seconds.mean()) * steps.num_ranks - idle
    update = float(steps.other_seconds.mean()) * steps.num_ranks
    joules = busy * watts.decode + harvested * watts.train + (idle - harvested) * watts.wait + update * watts.update
    return joules / 3.6e6


def read_watts(text: str) -> Watts:
    """From ``decode=450,wait=150``.

    Raises:
        ValueError: an unknown phase, or no number of 0 or more.
    """
    known = [field.name for field in fields(Watts)]
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            given[name.strip()] = float(value)
        except ValueError:
            given[name.strip()] = -1.0
    if bad := [name for name, value in given.items() if name not in known or not 0 <= value < 1e6]:
        raise ValueError(f"--watts {text}: {bad[0]!r} is none of {', '.join(known)} with watts, as in decode=450")
    return Watts(**given)
