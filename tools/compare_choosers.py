"""Replays recorded workloads against the choosers: total rollout seconds of "off", every fixed strategy, both choosers
and an oracle, by simulation of continuous batching. Knows no torch, no MPI and no model.

    python tools/compare_choosers.py --lengths runs/tiny --costs profile.json --accepts accepts.json --max-live 32

Lengths: a run's folder (each step of each rank is one rollout, in order; a chooser keeps what it learned from one to
the next), or a JSON list of lengths, or of such lists. Costs: a cost profile. Accepts: JSON, strategy -> how many
sequences had 0, 1, ... drafts accepted in a round; a chain that is missing is derived from a deeper one.

Every round's seconds are the profile's, times noise that the choosers cannot foresee. Prefill is left out: it is the
same for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
from numpy.typing import NDArray

from tlt_hpc.rollout.chooser import make_chooser
from tlt_hpc.rollout.cost_profile import CostProfile, read_profile
from tlt_hpc.rollout.decisions import Chooser, Recorder
from tlt_hpc.rollout.strategy import OFF, Strategy, strategy_named
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_summary

Lengths = NDArray[np.int64]
_SPIKE_CHANCE, _SPIKE_FACTOR = 0.005, 5.0


@dataclass(frozen=True)
class World:
    """What is true in a simulation: costs, distributions [reach + 1] of accepted drafts, spread of a round's cost."""

    costs: CostProfile
    accepts: Mapping[Strategy, NDArray[np.float64]]
    noise: float

    def seconds(self, strategy: Strategy, num_live: int, source: np.random.Generator) -> float:
        """One round's seconds: log-normal about the profile's, and now and then another process got in the way."""
        spike = _SPIKE_FACTOR if self.noise and source.random() < _SPIKE_CHANCE else 1.0
        return self.costs.seconds(strategy, num_live) * spike * float(np.exp(self.noise * source.standard_normal()))

    def draw(self, strategy: Strategy, num_live: int, source: np.random.Generator) -> Lengths:
        """Accepted drafts of each sequence [num_live]."""
        chances = np.cumsum(self.accepts[strategy])[:-1]
        return np.searchsorted(chances, source.random(num_live), side="right").astype(np.int64)

    def accept_length(self, strategy: Strategy) -> float:
        chances = self.accepts[strategy]
        return 1.0 + float(chances @ np.arange(len(chances)))


@dataclass(frozen=True)
class Outcome:
    """What one way to choose came to: medians over the repeats; ``over_off`` is time of "off" over its time.

    ``worst_over_off``: the worst single repeat. ``rounds``: share of the rounds by strategy, of the last repeat.
    """

    seconds: float
    over_off: float
    worst_over_off: float
    accept_length: float
    rounds: dict[str, float]


class Fixed(Recorder):
    """Always the same."""

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        return self.strategies[0]


class Oracle(Recorder):
    """Knows the true costs and distributions."""

    def __init__(self, world: World) -> None:
        super().__init__(tuple(world.accepts))
        self._world = world

    def _pick(self, num_live: int, usable: Sequence[Strategy], backlog: int) -> Strategy:
        world = self._world
        return max(usable, key=lambda s: world.accept_length(s) / world.costs.seconds(s, num_live))


def simulate(
    world: World, rollouts: Sequence[Lengths], max_live: int, chooser: Chooser, seed: int
) -> tuple[float, float]:
    """Seconds of all rollouts and the accept length over them."""
    source = np.random.default_rng(seed)
    total = num_tokens = num_row_passes = 0.0
    for lengths in rollouts:
        live, waiting = lengths[:max_live].copy(), lengths[max_live:]
        while len(live):
            strategy = chooser.choose(len(live), chooser.strategies)
            accepted = world.draw(strategy, len(live), source)
            emitted = np.minimum(accepted + 1, live)
            seconds = world.seconds(strategy, len(live), source)
            chooser.observe(strategy, len(live), int(emitted.sum()), seconds, accepted.tolist())
            total, num_tokens = total + seconds, num_tokens + float(emitted.sum())
            num_row_passes += len(live)
            live = (live - emitted)[live > emitted]
            refill, waiting = waiting[: max_live - len(live)], waiting[max_live - len(live) :]
            live = np.concatenate([live, refill])
    return total, num_tokens / max(1.0, num_row_passes)


def compare(
    world: World,
    rollouts: Sequence[Lengths],
    max_live: int,
    *,
    repeats: int = 3,
    with_prior: bool = True,
    epsilon: float = 0.05,
    window: int = 128,
) -> dict[str, Outcome]:
    """Every way to choose over the same rollouts, "off" first; each repeat has its own noise and seeds."""
    arms = tuple(world.accepts)
    prior = world.costs if with_prior else None
    ways: dict[str, Callable[[int], Chooser]] = {arm.name: lambda _, arm=arm: Fixed([arm]) for arm in arms}  # type: ignore[misc]
    ways |= {
        "goodput": lambda seed: make_chooser("goodput", arms, epsilon=epsilon, window=window, seed=seed, costs=prior),
        "bandit": lambda seed: make_chooser("bandit", arms, epsilon=epsilon, window=300, seed=seed, costs=prior),
        "oracle": lambda _: Oracle(world),
    }
    off: list[float] = []
    outcomes = {}
    for name, make in ways.items():
        seconds, accept = [], []
        for seed in range(repeats):
            chooser = make(seed)
            spent, length = simulate(world, rollouts, max_live, chooser, seed)
            seconds.append(spent)
            accept.append(length)
        off = off or seconds
        outcomes[name] = _outcome(seconds, accept, off, chooser)
    return outcomes


def _outcome(seconds: list[float], accept: list[float], off: list[float], chooser: Chooser) -> Outcome:
    over_off = [plain / spent for plain, spent in zip(off, seconds, strict=True)]
    rounds = {name: count for name, (count, _) in chooser.totals().items() if count}
    return Outcome(
        seconds=statistics.median(seconds),
        over_off=statistics.median(over_off),
        worst_over_off=min(over_off),
        accept_length=statistics.median(accept),
        rounds={name: count / sum(rounds.values()) for name, count in rounds.items()},
    )


# -- input ----------------------------------------------------------------------------------------------------------


def read_lengths(path: Path) -> list[Lengths]:
    """Response lengths [N] of each rollout, in the order in which they ran.

    Raises:
        ValueError: neither a run's folder with rollouts nor lists of lengths.
    """
    if path.is_dir():
        folder = RunFolder(path)
        files = [file for step in folder.rollout_steps() for file in folder.rollout_logs(step)]
        rollouts = [read_summary(file).response_lengths for file in files]
    else:
        tree = _read_json(path)
        lists = tree if isinstance(tree, list) and tree and isinstance(tree[0], list) else [tree]
        try:
            rollouts = [np.array(lengths, dtype=np.int64).reshape(-1) for lengths in lists]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}; give a JSON list of lengths, or a list of such lists") from error
    rollouts = [lengths[lengths > 0] for lengths in rollouts]
    if not sum(map(len, rollouts)):
        raise ValueError(f"{path} holds no response; give a run's folder such as runs/tiny, or a JSON list of lengths")
    return rollouts


def read_accepts(path: Path, names: Sequence[str]) -> dict[Strategy, NDArray[np.float64]]:
    """Distributions [reach + 1] of accepted drafts by strategy, "off" first; ``names`` empty: all in the file.

    Raises:
        ValueError: a name or a distribution that is none, or a strategy that the file tells nothing of.
    """
    tree = _read_json(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: give a JSON object, strategy -> counts of 0, 1, ... accepted drafts")
    counts = {strategy_named(name): np.array(values, dtype=np.float64) for name, values in tree.items()}
    for strategy, values in counts.items():
        if values.shape != (strategy.reach + 1,) or values.min() < 0 or values.sum() <= 0:
            raise ValueError(f"{path}: {strategy.name} takes {strategy.reach + 1} counts, got {values.tolist()}")
    wanted = [strategy_named(name) for name in names] or list(counts)
    drafting = [strategy for strategy in wanted if strategy != OFF]
    return {OFF: np.ones(1), **{strategy: _distribution(path, strategy, counts) for strategy in drafting}}


def _distribution(
    path: Path, strategy: Strategy, counts: Mapping[Strategy, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Its own counts, or those of a deeper chain of its family with all beyond its reach at its reach."""
    if strategy in counts:
        return np.asarray(counts[strategy] / counts[strategy].sum())
    deeper = [s for s in counts if s.family == strategy.family and s.reach > strategy.reach]
    if not deeper:
        raise ValueError(f"{path} tells nothing of {strategy.name}; record it, or a deeper chain of the same drafter")
    values = counts[min(deeper, key=lambda s: s.reach)]
    folded = np.append(values[: strategy.reach], values[strategy.reach :].sum())
    return np.asarray(folded / folded.sum())


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


# -- command --------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit status 2 and one line on input that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        rollouts = read_lengths(options.lengths)
        world = World(read_profile(options.costs), read_accepts(options.accepts, options.strategies), options.noise)
        _check(world, options)
    except (OSError, ValueError) as error:
        print(f"compare_choosers: {error}", file=sys.stderr)
        return 2
    outcomes = compare(
        world,
        rollouts,
        options.max_live,
        repeats=options.repeats,
        with_prior=not options.no_prior,
        epsilon=options.epsilon,
        window=options.window,
    )
    print_table(outcomes, rollouts, options.max_live)
    if options.json:
        text = json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def print_table(outcomes: Mapping[str, Outcome], rollouts: Sequence[Lengths], max_live: int) -> None:
    """One line per way to choose."""
    lengths = np.concatenate(rollouts)
    p50, p90 = np.percentile(lengths, (50, 90))
    print(
        f"{len(rollouts)} rollouts, {len(lengths)} responses (p50 {p50:.0f}, p90 {p90:.0f}, max {lengths.max()}), "
        f"at most {max_live} live"
    )
    width = max(map(len, outcomes))
    print(f"{'chooser':{width}}    seconds  speed  worst  accept  rounds  (speed: off = 1; worst: of the repeats)")
    for name, one in outcomes.items():
        most = sorted(one.rounds.items(), key=lambda item: -item[1])[:4]
        rounds = ", ".join(f"{strategy} {share:.0%}" for strategy, share in most)
        print(
            f"{name:{width}} {one.seconds:10.3f} {one.over_off:6.3f} {one.worst_over_off:6.3f} "
            f"{one.accept_length:7.2f}  {rounds}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulate recorded rollouts under every way to choose a strategy.")
    parser.add_argument("--lengths", type=Path, required=True, help="a run's folder, or JSON lengths")
    parser.add_argument("--costs", type=Path, required=True, help="a cost profile (JSON)")
    parser.add_argument("--accepts", type=Path, required=True, help="JSON: strategy -> counts of accepted drafts")
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), default=[], help="names, with commas; default: all"
    )
    parser.add_argument("--max-live", type=int, default=32, help="sequences decoded at a time (default 32)")
    parser.add_argument("--noise", type=float, default=0.08, help="spread of a round's cost (default 0.08)")
    parser.add_argument("--no-prior", action="store_true", help="the choosers start without the cost profile")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of rounds that may be trials")
    parser.add_argument("--window", type=int, default=128, help="rounds that the goodput chooser remembers")
    parser.add_argument("--repeats", type=int, default=3, help="simulations of each; medians are shown (default 3)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def _check(world: World, options: argparse.Namespace) -> None:
    if options.max_live < 1 or options.repeats < 1 or options.window < 1 or not 0 <= options.epsilon <= 1:
        raise ValueError("--max-live, --repeats and --window are at least 1, --epsilon lies in 0..1")
    if not world.costs.covers(tuple(world.accepts), options.max_live):
        names = ", ".join(strategy.name for strategy in world.accepts)
        raise ValueError(f"{options.costs} does not cover {names} at {options.max_live} live; measure a wider profile")


if __name__ == "__main__":
    sys.exit(ending("compare_choosers", main))
