"""``tlt bench accept``: accept length of shared noise, multi-round rejection and top-K sample-match.

The same model, drafter, text and tree shapes; each rule at its best sharpness. Responses come from the engine; see
``chances`` for why one set of responses serves all three. Knows no clock: nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tlt_hpc.common.records import Rollout, Stream
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.studies.bench.chances import RULES, Chances, Grid, Rule, measure
from tlt_hpc.studies.bench.lengths import Floats, Tree, accept_lengths, reached, visits
from tlt_hpc.studies.bench.subject import Limits, Subject, make_engine, roll_out
from tlt_hpc.studies.bench.unroll import unroll
from tlt_hpc.studies.bench.workload import Workload

UNCERTAIN_NATS = 0.3
TREES = tuple(
    Tree(children, depth) for children, deepest in ((1, 6), (2, 6), (4, 3)) for depth in range(1, deepest + 1)
)
SHARPNESS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)
_LARGE_VOCABULARY = 4096
"""Above it one draw a chance must do: a draw costs as much as the model's pass, and positions average as well."""


@dataclass(frozen=True)
class Best:
    """A rule's figure at the sharpness that is best for it."""

    value: float
    sharpness: float


@dataclass(frozen=True)
class Subset:
    """Figures over some of the positions; the word before each is the tree's or the number of candidates."""

    num_positions: int
    mean_entropy: float
    first_level: dict[str, dict[Rule, Best]]
    """By number of candidates: chance that one of them is the target's token."""
    accept_length: dict[str, dict[Rule, Best]]
    """By tree: mean over the positions, each as the start of a round."""
    one_minus_tv: float
    """Mean at sharpness 1: what rejection accepts of one candidate, and no coupling exceeds."""
    one_minus_tv_over_one_plus_tv: float
    """Mean at sharpness 1 of what shared noise accepts of one candidate at least."""

    def gain(self, tree: str) -> float:
        """Shared noise over multi-round rejection, in accept length."""
        return self.accept_length[tree]["shared_noise"].value / self.accept_length[tree]["rejection"].value


@dataclass(frozen=True)
class AcceptReport:
    """One temperature."""

    temperature: float
    num_responses: int
    rollout_accept_length: dict[str, dict[Rule, Best]]
    """By tree: tokens over rounds of whole rollouts, whose rounds start where the last one ended."""
    everywhere: Subset
    uncertain: Subset | None
    """Positions where the target's entropy exceeds ``UNCERTAIN_NATS``; None where there is none."""


def bench_accept(subject: Subject, workload: Workload, temperature: float, num_responses: int) -> AcceptReport:
    """Sample responses at one temperature and measure all rules along them; the subject has a drafter."""
    assert subject.drafter is not None, "the options see to that"
    grid = Grid(
        candidates=tuple(sorted({tree.children for tree in TREES})),
        sharpness=SHARPNESS,
        num_draws=1 if subject.num_tokens > _LARGE_VOCABULARY else 32,
    )
    generator = torch.Generator().manual_seed(workload.seed)
    found = []
    for response in sample_responses(subject, workload, temperature, num_responses):
        tokens = torch.from_numpy(np.concatenate([response.prompt_tokens, response.response_tokens])).long()
        if len(tokens) <= max(len(response.prompt_tokens), 2):
            continue
        logits = unroll(
            subject.decoder,
            subject.drafter,
            tokens.to(subject.decoder.device),
            len(response.prompt_tokens),
            subject.num_tokens,
            max(tree.depth for tree in TREES),
        )
        found.append(measure(logits, temperature, grid, generator))
    return summarise(temperature, found, grid)


def sample_responses(subject: Subject, workload: Workload, temperature: float, count: int) -> list[Rollout]:
    """Responses of the engine, without speculation, at the workload's own lengths."""
    limits = Limits(min(count, 32), workload.max_prompt_tokens, workload.max_new_tokens)
    workload = replace(workload, temperature=temperature)
    engine = make_engine(subject, limits, temperature, (OFF,), workload.requests(4, 0, Stream.CALIBRATION))
    return roll_out(engine, workload.requests(count, 0)).rollouts


def summarise(temperature: float, found: Sequence[Chances], grid: Grid) -> AcceptReport:
    """Figures over all responses, and over the uncertain positions alone."""
    entropy = np.concatenate([each.entropy for each in found])
    uncertain = entropy > UNCERTAIN_NATS
    return AcceptReport(
        temperature=temperature,
        num_responses=len(found),
        rollout_accept_length={
            tree.name: {rule: _best(grid, len(entropy) / _num_rounds(found, grid, tree, rule)) for rule in RULES}
            for tree in TREES
        },
        everywhere=_subset(found, grid, entropy, np.ones(len(entropy), dtype=bool)),
        uncertain=_subset(found, grid, entropy, uncertain) if uncertain.any() else None,
    )


def _subset(found: Sequence[Chances], grid: Grid, entropy: Floats, chosen: np.ndarray) -> Subset:
    shared = np.concatenate([each.overlap for each in found], 1)[:, chosen][grid.sharpness.index(1.0)]
    return Subset(
        num_positions=int(chosen.sum()),
        mean_entropy=float(entropy[chosen].mean()),
        first_level={
            str(count): {rule: _first_level(found, grid, i, rule, chosen) for rule in RULES}
            for i, count in enumerate(grid.candidates)
        },
        accept_length={
            tree.name: {rule: _accept_length(found, grid, tree, rule, chosen) for rule in RULES} for tree in TREES
        },
        one_minus_tv=float(shared.mean()),
        one_minus_tv_over_one_plus_tv=float((shared / (2 - shared)).mean()),
    )


def _accept_length(found: Sequence[Chances], grid: Grid, tree: Tree, rule: Rule, chosen: np.ndarray) -> Best:
    lengths = [accept_lengths(each) for each in _reach(found, grid, tree, rule)]
    return _best(grid, np.concatenate(lengths, 1)[:, chosen].mean(1))


def _num_rounds(found: Sequence[Chances], grid: Grid, tree: Tree, rule: Rule) -> Floats:
    """Expected rounds [A] of all responses."""
    rounds: Floats = np.sum([visits(each).sum(1) for each in _reach(found, grid, tree, rule)], 0)
    return rounds


def _reach(found: Sequence[Chances], grid: Grid, tree: Tree, rule: Rule) -> list[Floats]:
    which = grid.candidates.index(tree.children)
    return [reached(each.walk[rule][:, which, : tree.depth]) for each in found]


def _first_level(found: Sequence[Chances], grid: Grid, which: int, rule: Rule, chosen: np.ndarray) -> Best:
    return _best(grid, np.concatenate([each.first[rule][:, which] for each in found], 1)[:, chosen].mean(1))


def _best(grid: Grid, values: Floats) -> Best:
    best = min(np.flatnonzero(values == values.max()), key=lambda i: abs(grid.sharpness[i] - 1))
    return Best(float(values[best]), grid.sharpness[best])
