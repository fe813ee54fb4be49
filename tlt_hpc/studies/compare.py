"""The proof as a command: the same steps plain, with n-gram speculation and in full, compared with each other.

Everything is read back from the runs' own permanent logs, not from memory.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import Config, without_side_effects
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, read_step
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.train import Reporter, run

Mode = Literal["plain", "ngram", "full"]
MODES: tuple[Mode, ...] = ("plain", "ngram", "full")


@dataclass(frozen=True)
class ModeFigures:
    """What one mode's run gave; seconds are sums over its steps."""

    tokens: int
    reward_mean: float
    policy_sha256: str
    rollout_seconds: float
    step_seconds: float
    accept_length: float
    idle_rank_seconds: float
    harvested_rank_seconds: float
    drafter_steps: int
    guarded_near_ties: int


@dataclass(frozen=True)
class Comparison:
    """The modes' figures and whether they agree."""

    folder: Path
    num_steps: int
    num_ranks: int
    tie_guard: bool
    modes: dict[Mode, ModeFigures]
    mismatched_tokens: int
    rewards_equal: bool
    policy_difference: float = 0.0
    """Root mean square of the final weights' distances from plain's, of the mode that is furthest."""
    policy_tolerance: float = 0.0
    """How large that may be: above 0 where the update reads the rollout's own probabilities."""

    @property
    def tokens_equal(self) -> bool:
        return self.mismatched_tokens == 0

    @property
    def policy_equal(self) -> bool:
        if self.policy_tolerance:
            return self.policy_difference <= self.policy_tolerance
        return len({mode.policy_sha256 for mode in self.modes.values()}) == 1

    @property
    def all_equal(self) -> bool:
        return self.tokens_equal and self.rewards_equal and self.policy_equal

    def speedup(self, mode: Mode, what: str) -> float:
        """Plain seconds over the mode's, of the rollouts or of whole steps."""
        field = f"{what}_seconds"
        return float(vars(self.modes["plain"])[field] / vars(self.modes[mode])[field])


def compare(config: Config, num_steps: int, world: World, reporter: Reporter) -> Comparison | None:
    """Run all modes one after another on the same seeds; collective. None where a signal stopped one of them."""
    stamp = world.broadcast(time.strftime("%Y%m%d-%H%M%S"))
    parent = Path(config.run.folder) / f"{config.run.name}-compare-{stamp}"
    # a step that is thrown away: the first run of a process is slower, and it would be the plain one
    warm_up = config_of(config, "plain", 1, parent / "warm-up")
    if not run(warm_up, world, reporter).finished:
        return None
    digests: dict[Mode, str] = {}
    for mode in MODES:
        result = run(config_of(config, mode, num_steps, parent), world, reporter)
        if not result.finished:
            return None
        digests[mode] = result.policy_sha256
    return read_comparison(config, parent, num_steps, world.size, digests)


def config_of(config: Config, mode: Mode, num_steps: int, parent: Path) -> Config:
    """The configuration of one mode's run: nothing differs but the mode, the length and the place."""
    return without_side_effects(config).model_copy(
        update={
            "run": config.run.model_copy(update={"name": mode, "folder": str(parent), "num_steps": num_steps}),
            "speculation": config.speculation.model_copy(update={"mode": mode}),
        }
    )


def read_comparison(
    config: Config, parent: Path, num_steps: int, num_ranks: int, digests: dict[Mode, str]
) -> Comparison:
    """Read the logs of all modes and compare them with the plain one's."""
    records = {mode: read_records(RunFolder(parent / mode), num_steps, num_ranks) for mode in MODES}
    tokens = {mode: tokens_by_key(records[mode]) for mode in MODES}
    rewards = {mode: rewards_by_key(records[mode]) for mode in MODES}
    tolerance = policy_tolerance(config, num_steps)
    return Comparison(
        folder=parent,
        num_steps=num_steps,
        num_ranks=num_ranks,
        tie_guard=config.tie_guard,
        modes={mode: figures(RunFolder(parent / mode), records[mode], digests[mode]) for mode in MODES},
        mismatched_tokens=sum(num_mismatched(tokens["plain"], tokens[mode]) for mode in MODES),
        rewards_equal=all(rewards[mode] == rewards["plain"] for mode in MODES),
        policy_difference=policy_difference(parent, num_steps, digests) if tolerance else 0.0,
        policy_tolerance=tolerance,
    )


def policy_tolerance(config: Config, num_steps: int) -> float:
    """How far final weights may lie apart where a rollout correction reads the rollout's probabilities; otherwise 0.

    By root mean square, a thousandth of the way that Adam can take a weight in the run's updates. Single weights may
    lie further apart, where a gradient is nothing but rounding.
    """
    if config.algorithm.rollout_correction == "none":
        return 0.0
    return 0.001 * config.optimizer.learning_rate * config.algorithm.updates_per_step * num_steps


def policy_difference(parent: Path, num_steps: int, digests: dict[Mode, str]) -> float:
    """Largest distance of any mode's final weights from plain's, by root mean square, from their last checkpoints."""
    different = [mode for mode in MODES if digests[mode] != digests["plain"]]
    plain = last_checkpoint(parent, "plain", num_steps) if different else None
    return max((distance(plain, last_checkpoint(parent, mode, num_steps)) for mode in different if plain), default=0.0)


def distance(left: Checkpoint, right: Checkpoint) -> float:
    """Root mean square of the distances of two policies' weights."""
    names = [name for name in left.names("policy") if name.endswith(".master")]
    differences = [(left.read("policy", name) - right.read("policy", name)).double() for name in names]
    squares = sum(float(difference.square().sum()) for difference in differences)
    return math.sqrt(squares / sum(difference.numel() for difference in differences))


def last_checkpoint(parent: Path, mode: Mode, num_steps: int) -> Checkpoint:
    """The checkpoint that a mode's run has ended with."""
    return CheckpointStore(RunFolder(parent / mode).checkpoints, keep=1).at(num_steps)


def read_records(folder: RunFolder, num_steps: int, num_ranks: int) -> list[StepRecord]:
    """All ranks' records of all steps."""
    return [read_step(folder.rollout_log(step, rank)) for step in range(num_steps) for rank in range(num_ranks)]


def tokens_by_key(records: list[StepRecord]) -> dict[SampleKey, np.ndarray]:
    """Response tokens of every sample."""
    return {rollout.key: rollout.response_tokens for record in records for rollout in record.rollouts}


def rewards_by_key(records: list[StepRecord]) -> dict[SampleKey, float]:
    """Reward of every sample."""
    return {
        rollout.key: float(reward)
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }


def num_mismatched(left: dict[SampleKey, np.ndarray], right: dict[SampleKey, np.ndarray]) -> int:
    """Tokens that differ or that only one side has, over all samples of both."""
    empty = np.empty(0, np.int32)
    total = 0
    for key in left.keys() | right.keys():
        a, b = left.get(key, empty), right.get(key, empty)
        shared = min(len(a), len(b))
        total += int((a[:shared] != b[:shared]).sum()) + max(len(a), len(b)) - shared
    return total


def figures(folder: RunFolder, records: list[StepRecord], digest: str) -> ModeFigures:
    """One mode's figures, from its log and its metrics."""
    metrics = list(read_lines(folder.metrics).values())
    rollouts = [rollout for record in records for rollout in record.rollouts]
    num_tokens = sum(len(rollout.response_tokens) for rollout in rollouts)
    return ModeFigures(
        tokens=num_tokens,
        reward_mean=float(np.mean(np.concatenate([record.rewards for record in records]))),
        policy_sha256=digest,
        rollout_seconds=sum(row["rollout/seconds"] for row in metrics),
        step_seconds=sum(row["timing_s/step"] for row in metrics),
        accept_length=num_tokens / sum(rollout.num_target_passes for rollout in rollouts),
        idle_rank_seconds=sum(timing.idle_seconds for record in records for timing in (record.timing, *record.refills)),
        harvested_rank_seconds=sum(record.harvested_seconds for record in records),
        drafter_steps=sum(len(record.micro_steps) for record in records),
        guarded_near_ties=sum(record.guarded_near_ties for record in records),
    )


def write_json(comparison: Comparison, path: Path) -> None:
    """The figures as JSON."""
    tree = {
        "modes": {mode: asdict(values) for mode, values in comparison.modes.items()},
        "equal": {
            "tokens": comparison.tokens_equal,
            "mismatched_tokens": comparison.mismatched_tokens,
            "rewards": comparison.rewards_equal,
            "policy": comparison.policy_equal,
            **({"policy_difference": comparison.policy_difference} if comparison.policy_tolerance else {}),
        },
        "speedup": {
            mode: {what: comparison.speedup(mode, what) for what in ("rollout", "step")} for mode in ("ngram", "full")
        },
    }
    path.write_text(json.dumps(tree, indent=2) + "\n")
