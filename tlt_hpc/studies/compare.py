"""Compares runs of the same steps; ``tlt compare`` runs them in four modes of speculation.

The modes take each step in turn, so that a machine whose speed changes changes it for all of them. Everything is read
back from the runs' own logs, not from memory.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import Config, UserError, config_for_comparison
from tlt_hpc.look.metrics import DECODE_CPU
from tlt_hpc.look.series import PairedRatio, paired_ratio
from tlt_hpc.mpi.world import World
from tlt_hpc.run.job import Job, build_job
from tlt_hpc.run.saving import wait_for_saves_all_ranks
from tlt_hpc.storage.folder import COMPARISON, RunFolder, wait_for_listed_files
from tlt_hpc.storage.rollout_log import StepRecord, read_step
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.train import Reporter, run_training, take_steps

MODES = ("plain", "ngram", "tail", "ahead-tail")
"""Modes that are compared, each with the first; named as the arms of ``tlt ablate``."""
TIMED = {"rollout": "rollout/seconds", "decode_cpu": DECODE_CPU, "step": "timing_s/step"}
"""Names of what speeds are printed of, and its name in a step's line."""
WARM_UP = "warm-up"
"""Name of a run of one step that does not count: the first run of a process is slower than the others."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run; tokens, seconds and updates are sums over its steps.

    CPU seconds are user and system time of all ranks, without the processes that judge responses. Those of decoding are
    of one rank in each step, the one that used most of them until its last token.
    """

    tokens: int
    reward_mean: float
    policy_sha256: str
    rollout_seconds: float
    rollout_cpu_seconds: float
    decode_cpu_seconds: float
    step_seconds: float
    step_cpu_seconds: float
    update_seconds: float
    accept_length: float
    idle_rank_seconds: float
    harvested_rank_seconds: float
    drafter_steps: int
    guarded_near_ties: int
    mismatched_tokens: int
    """Response tokens that differ from the first run's."""
    rewards_equal: bool
    by_step: dict[str, list[float]]
    """Seconds of each step, by the names of ``TIMED``."""


@dataclass(frozen=True)
class Comparison:
    """The runs' figures by name, and whether they agree with the first run's."""

    folder: Path
    num_steps: int
    num_ranks: int
    is_exact: bool
    """The texts are promised to be equal."""
    runs: dict[str, RunFigures]

    @property
    def mismatched_tokens(self) -> int:
        """Response tokens of all runs that differ from the first run's."""
        return sum(run.mismatched_tokens for run in self.runs.values())

    @property
    def equality_by_name(self) -> dict[str, bool]:
        """By what is compared (tokens, rewards, policy): True if it is the same in all runs."""
        return {
            "tokens": self.mismatched_tokens == 0,
            "rewards": all(run.rewards_equal for run in self.runs.values()),
            "policy": len({run.policy_sha256 for run in self.runs.values()}) == 1,
        }

    def speedups(self) -> dict[str, dict[str, PairedRatio]]:
        """Return the plain run's seconds divided by each run's, step by step, by run and by name of ``TIMED``.

        Meaningful only for runs that took turns.
        """
        plain = self.runs["plain"].by_step
        return {
            name: {what: paired_ratio(plain[what], run.by_step[what]) for what in TIMED}
            for name, run in self.runs.items()
        }


def compare(
    config: Config, modes: Sequence[str], num_steps: int, world: World, reporter_of: Callable[[str], Reporter]
) -> Comparison | None:
    """Run the modes on the same seeds, one step of each in turn, and compare them. Collective.

    Args:
        modes: of ``MODES``, the first of them included. All are in memory at once.
        reporter_of: gives the reporter that shows the run of a name.

    Returns:
        The comparison; None if a signal stopped the runs.
    """
    stamp = world.broadcast(time.strftime("%Y%m%d-%H%M%S"))
    parent = Path(config.run.folder) / f"{config.run.name}{COMPARISON}{stamp}"
    if not run_training(mode_config(config, modes[-1], 1, parent / WARM_UP), world, reporter_of(WARM_UP)).finished:
        return None
    gc.unfreeze()  # the first run also imported libraries, which excludes what exists then
    gc.collect()  # DeepSpeed's engines are full of cycles
    with ExitStack() as opened:
        jobs = {
            mode: opened.enter_context(closing(build_job(mode_config(config, mode, num_steps, parent), world)))
            for mode in modes
        }
        digests = run_jobs_in_turn_all_ranks(jobs, num_steps, reporter_of)
    if not digests:
        return None
    return world.run_first_and_broadcast(lambda: read_comparison(config, parent, num_steps, world.size, digests))


def run_jobs_in_turn_all_ranks(
    jobs: Mapping[str, Job], num_steps: int, reporter_of: Callable[[str], Reporter]
) -> dict[str, str]:
    """Run the jobs, one step of each in turn. Collective.

    Returns the digest of each one's last policy, in the order of ``jobs``; empty if a signal stopped them.
    """
    runs = {mode: take_steps(job, None, reporter_of(mode)) for mode, job in jobs.items()}
    digests = dict.fromkeys(jobs, "")
    orders = cycle(permutations(jobs))  # no mode always comes first, or always after a certain other
    for order in islice(orders, num_steps + 1):  # the first of them prepares the first step
        for mode in order:
            result = next(runs[mode])
            if result is not None and not result.finished:
                return {}
            if result is not None:
                digests[mode] = result.policy_sha256
            wait_for_saves_all_ranks(jobs[mode])  # not to be written during another mode's step
    return digests


def mode_config(config: Config, mode: str, num_steps: int, parent: Path) -> Config:
    """Return the configuration of one mode's run: only the mode, the length and the folder differ."""
    with_drafter = "frozen" if config.speculation.mode == "frozen" else "full"
    speculation = {"mode": mode if mode in ("plain", "ngram") else with_drafter}
    if mode != "ahead-tail":
        speculation["ahead"] = "off"
    return config_for_comparison(config).model_copy(
        update={
            "run": config.run.model_copy(update={"name": mode, "folder": str(parent), "num_steps": num_steps}),
            "speculation": config.speculation.model_copy(update=speculation),
        }
    )


def read_comparison(
    config: Config, parent: Path, num_steps: int, num_ranks: int, digests: Mapping[str, str]
) -> Comparison:
    """Read the logs of the runs in ``parent``; ``digests`` are those of their last policies, by the run's name.

    Raises:
        UserError: a rank's log is not there.
    """
    folders = {name: RunFolder(parent / name) for name in digests}
    first = next(iter(folders.values()))
    runs = {name: read_run(folder, first, num_steps, num_ranks, digests[name]) for name, folder in folders.items()}
    return Comparison(parent, num_steps, num_ranks, config.is_exact, runs)


def read_run(folder: RunFolder, first: RunFolder, num_steps: int, num_ranks: int, digest: str) -> RunFigures:
    """Read one run's logs, and compare them step by step with those of the run in ``first``."""
    totals = dict.fromkeys(("tokens", "passes", "idle", "harvested", "updates", "guarded", "mismatched"), 0.0)
    rewards: list[float] = []
    rewards_equal = True
    for step in range(num_steps):
        records, reference = (read_step_logs(run, step, num_ranks) for run in (folder, first))
        scores = rewards_by_key(records)
        rewards += scores.values()
        rewards_equal &= scores == rewards_by_key(reference)
        totals["mismatched"] += num_mismatched(tokens_by_key(reference), tokens_by_key(records))
        for record in records:
            totals["tokens"] += sum(len(rollout.response_tokens) for rollout in record.rollouts)
            totals["passes"] += sum(rollout.num_target_passes for rollout in record.rollouts)
            totals["idle"] += sum(timing.idle_seconds for timing in (record.timing, *record.refills))
            totals["harvested"] += record.harvested_seconds
            totals["updates"] += len(record.micro_steps)
            totals["guarded"] += record.guarded_near_ties
    lines = read_lines(folder.metrics).values()
    by_step = {what: [float(line.get(name, math.nan)) for line in lines] for what, name in TIMED.items()}
    return RunFigures(
        tokens=int(totals["tokens"]),
        reward_mean=float(np.mean(rewards)),
        policy_sha256=digest,
        rollout_seconds=sum(by_step["rollout"]),
        decode_cpu_seconds=sum(by_step["decode_cpu"]),
        rollout_cpu_seconds=sum(line.get("perf/rollout_cpu_seconds", math.nan) for line in lines),
        step_seconds=sum(by_step["step"]),
        step_cpu_seconds=sum(line.get("perf/cpu_seconds", math.nan) for line in lines),
        update_seconds=sum(line["timing_s/update_actor"] for line in lines),
        accept_length=totals["tokens"] / totals["passes"],
        idle_rank_seconds=totals["idle"],
        harvested_rank_seconds=totals["harvested"],
        drafter_steps=int(totals["updates"]),
        guarded_near_ties=int(totals["guarded"]),
        mismatched_tokens=int(totals["mismatched"]),
        rewards_equal=rewards_equal,
        by_step=by_step,
    )


def read_step_logs(run: RunFolder, step: int, num_ranks: int) -> list[StepRecord]:
    """Read the logs of a step of all ranks; of fewer, the rest would pass for the whole.

    Raises:
        UserError: a log is not there, nor comes within the time that NFS may take.
    """
    paths = [run.rollout_log(step, rank) for rank in range(num_ranks)]
    for name in wait_for_listed_files(paths[0].parent, {path.name for path in paths}):
        raise UserError(f"{paths[0].parent} lacks {name}, so {run.path} cannot be compared; delete it and start again")
    return [read_step(path) for path in paths]


def tokens_by_key(records: list[StepRecord]) -> dict[SampleKey, np.ndarray]:
    """Return the response tokens [n] int32 of every sample."""
    return {rollout.key: rollout.response_tokens for record in records for rollout in record.rollouts}


def rewards_by_key(records: list[StepRecord]) -> dict[SampleKey, float]:
    """Return the reward of every sample."""
    pairs = (pair for record in records for pair in zip(record.rollouts, record.rewards, strict=True))
    return {rollout.key: float(reward) for rollout, reward in pairs}


def num_mismatched(left: dict[SampleKey, np.ndarray], right: dict[SampleKey, np.ndarray]) -> int:
    """Return the number of tokens that differ or that only one side has, over all samples of both."""
    empty, total = np.empty(0, np.int32), 0
    for key in left.keys() | right.keys():
        a, b = left.get(key, empty), right.get(key, empty)
        shared = min(len(a), len(b))
        total += int((a[:shared] != b[:shared]).sum()) + max(len(a), len(b)) - shared
    return total


def to_tree(comparison: Comparison) -> dict[str, Any]:
    """Return the figures as a tree for JSON."""
    return {
        "runs": {name: asdict(figures) for name, figures in comparison.runs.items()},
        "equal": {**comparison.equality_by_name, "mismatched_tokens": comparison.mismatched_tokens},
    }


def table_rows(comparison: Comparison) -> dict[str, list[str]]:
    """Return the table: names of figures, each with a cell for every run."""
    formats = {
        "tokens": ",", "reward_mean": ".4f", "policy_sha256": ".12", "guarded_near_ties": ",", "accept_length": ".3f",
        "rollout_seconds": ".2f", "rollout_cpu_seconds": ".2f", "decode_cpu_seconds": ".2f", "step_seconds": ".2f",
        "step_cpu_seconds": ".2f", "update_seconds": ".2f", "idle_rank_seconds": ".2f",
        "harvested_rank_seconds": ".2f", "drafter_steps": ",",
    }  # fmt: skip
    runs = comparison.runs
    return {
        name.replace("_", " "): [format(vars(run)[name], form) for run in runs.values()]
        for name, form in formats.items()
    }


def speed_rows(comparison: Comparison) -> dict[str, list[str]]:
    """Return the rows on speed: the median of the steps' ratios, with its 95 % interval if there are enough steps."""
    rows = dict[str, list[str]]()
    for name, ratios in comparison.speedups().items():
        for what, (median, low, high) in ratios.items():
            interval = f" ({low:.2f} to {high:.2f})" if name != "plain" and math.isfinite(high) else ""
            rows.setdefault(f"median {what.replace('_', ' ')} speed, plain = 1", []).append(f"{median:.2f}x{interval}")
    return rows


def equality_of(comparison: Comparison) -> str:
    """Return one line that says what is equal in all runs."""
    words = {name: "yes" if is_equal else "NO" for name, is_equal in comparison.equality_by_name.items()}
    return (
        f"tokens equal: {words['tokens']} ({comparison.mismatched_tokens} mismatched); rewards equal: "
        f"{words['rewards']}; final policy weights equal: {words['policy']}"
    )
