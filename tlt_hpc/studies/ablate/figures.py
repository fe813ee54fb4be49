"""What an ablation's runs have logged, read back arm by arm and compared: figures, verdict, table and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.drafting.schedule import JUDGED_DEPTH, DraftCounts
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import Line, read_lines
from tlt_hpc.studies.ablate.gains import Passes, gain_in_passes, ratio
from tlt_hpc.studies.ablate.plan import Ablation, digest_of
from tlt_hpc.studies.compare import num_mismatched, rewards_by_key, tokens_by_key

_UNEVEN = 1.1
"""Ratio of two arms' seconds for the same policy updates from which their speeds are not compared."""
_COLUMNS = {
    "rollout_seconds": "rollout/seconds",
    "update_seconds": "timing_s/update_actor",
    "step_seconds": "timing_s/step",
    "idle_rank_seconds": "rollout/idle_rank_seconds",
    "harvested_rank_seconds": "rollout/harvested_rank_seconds",
    "num_updates": "drafter/steps",
    "num_tokens": "perf/total_num_tokens",
}
"""Figures of a step that are summed over an arm -> their names in metrics.jsonl; rank-seconds are sums over ranks."""


@dataclass(frozen=True)
class ArmFigures:
    """What one arm gave."""

    arm: str
    lines: tuple[Line, ...]
    """Of metrics.jsonl, by step."""
    policy_sha256: str
    num_mismatched: int
    """Response tokens that differ from the first arm's."""
    rewards_equal: bool
    num_trained_tokens: int
    """Of the drafter's updates, repeats counted."""
    held_out: Passes | None

    def column(self, name: str) -> list[float]:
        """A figure of each step."""
        return [line[_COLUMNS[name]] for line in self.lines]

    def total(self, name: str) -> float:
        """A figure of the steps, summed."""
        return float(sum(self.column(name)))

    @property
    def accept_length(self) -> float:
        """Of all rounds, whatever drafted them."""
        return self.total("num_tokens") / sum(map(num_passes, self.lines))


def num_passes(line: Line) -> float:
    """Target passes of a step by sequence, so that tokens over them are the accept length, whatever drafted."""
    return float(line["perf/total_num_tokens"] / line["drafter/spec_decode/mean_acceptance_length"])


def own_accept_length(lines: Sequence[Line]) -> float | None:
    """Of a chain of four of the learned drafter, over the rounds of several steps; None if there were none."""
    counts = [DraftCounts.from_metrics(line) for line in lines]
    columns = [
        tuple(map(sum, zip(*(vars(each)[name] for each in counts), strict=True))) for name in ("reached", "accepted")
    ]
    pooled = DraftCounts(*columns)
    return pooled.accept_length if pooled.num_sequences else None


@dataclass(frozen=True)
class AblationFigures:
    """The arms, compared with the first of them."""

    folder: Path
    num_ranks: int
    tie_guard: bool
    arms: tuple[ArmFigures, ...]

    @property
    def num_steps(self) -> int:
        return len(self.arms[0].lines)

    @property
    def window(self) -> int:
        """Steps that "first" and "last" mean: a third of all."""
        return max(1, self.num_steps // 3)

    @property
    def num_mismatched(self) -> int:
        return sum(arm.num_mismatched for arm in self.arms)

    @property
    def equal(self) -> dict[str, bool]:
        """What is compared with the first arm's, and whether it is the same in all arms."""
        return {
            "tokens": self.num_mismatched == 0,
            "rewards": all(arm.rewards_equal for arm in self.arms),
            "policy": len({arm.policy_sha256 for arm in self.arms}) == 1,
            "held_out": len({arm.held_out.tokens for arm in self.arms if arm.held_out}) <= 1,
        }

    @property
    def as_promised(self) -> bool:
        """Whether the arms are equal as far as the tie guard promises: without it, in nothing."""
        return all(self.equal.values()) or not self.tie_guard

    def find(self, name: str) -> ArmFigures | None:
        """An arm by its name; None if it was not run."""
        return next((arm for arm in self.arms if arm.arm == name), None)

    def first(self, arm: ArmFigures) -> float | None:
        """Accept length of the drafter's own rounds over the first steps; None if it had none."""
        return own_accept_length(arm.lines[: self.window])

    def last(self, arm: ArmFigures) -> float | None:
        """The same over the last steps."""
        return own_accept_length(arm.lines[-self.window :])

    def speedup(self, arm: ArmFigures) -> float | None:
        """Plain rollout seconds over the arm's; None without a plain arm."""
        plain = self.find("plain")
        return None if plain is None else plain.total("rollout_seconds") / arm.total("rollout_seconds")


def read_figures(ablation: Ablation, held_out: Mapping[str, Passes]) -> AblationFigures:
    """All arms' figures, from their logs and metrics."""
    arms = tuple(read_arm(ablation, arm, held_out.get(arm)) for arm in ablation.arms)
    return AblationFigures(ablation.folder, ablation.num_ranks, ablation.config.tie_guard, arms)


def read_arm(ablation: Ablation, arm: str, held_out: Passes | None) -> ArmFigures:
    """One arm's figures."""
    first, folder = RunFolder(ablation.folder / ablation.arms[0]), RunFolder(ablation.folder / arm)
    digest = digest_of(ablation, arm)
    assert digest is not None, f"{arm} has not finished"
    mismatched, rewards_equal, num_trained_tokens = 0, True, 0
    for step in range(ablation.num_steps):
        theirs, ours = (
            [read_step(run.rollout_log(step, rank)) for rank in range(ablation.num_ranks)] for run in (first, folder)
        )
        mismatched += num_mismatched(tokens_by_key(theirs), tokens_by_key(ours))
        rewards_equal &= rewards_by_key(theirs) == rewards_by_key(ours)
        num_trained_tokens += sum(micro_step.num_tokens for record in ours for micro_step in record.micro_steps)
    lines = tuple(read_lines(folder.metrics).values())
    return ArmFigures(arm, lines, digest, mismatched, rewards_equal, num_trained_tokens, held_out)


# -- the verdict ----------------------------------------------------------------------------------------------------


def verdict(figures: AblationFigures) -> str:
    """What the arms do not have in common, then whether training in the tail pays; empty if nothing is said."""
    return " ".join(filter(None, (_differences(figures), _comparison(figures))))


def _differences(figures: AblationFigures) -> str:
    """What the arms do not have in common, and how they are compared then."""
    names = {"tokens": "texts", "rewards": "rewards", "policy": "final policies", "held_out": "held-out texts"}
    unequal = ", ".join(names[name] for name, equal in figures.equal.items() if not equal)
    if not unequal:
        return ""
    guard = "although the tie guard is on" if figures.tie_guard else "as they may with the tie guard off"
    hows = {
        "tokens": "; their seconds are those of different texts",
        "held_out": "; held-out accept lengths are compared unpaired",
    }
    how = "".join(text for name, text in hows.items() if not figures.equal[name])
    return f"The arms differ in {unequal}, {guard}{how}."


def _comparison(figures: AblationFigures) -> str:
    """Whether training in the tail beats the frozen drafter, by how much, and in what noise; empty without both."""
    tail, frozen = figures.find("tail"), figures.find("frozen")
    if tail is None or frozen is None:
        return ""
    assert tail.held_out is not None and frozen.held_out is not None
    accept = gain_in_passes(tail.held_out, frozen.held_out)
    return (
        f"After {figures.num_steps} steps the drafter trained in the tail has an accept length of "
        f"{tail.held_out.accept_length:.3f} on held-out prompts, the frozen one {frozen.held_out.accept_length:.3f}: "
        f"{accept.text}. Training in the tail {accept.verb} the frozen drafter in accept length"
        f"{_speed(tail, frozen, figures.window)}."
    )


def _speed(tail: ArmFigures, frozen: ArmFigures, window: int) -> str:
    """The same for rollout seconds, unless the machine had other work in one of the arms."""
    ours, theirs = (sum(arm.column("update_seconds")[-window:]) for arm in (tail, frozen))
    if abs(math.log(ours / theirs)) > math.log(_UNEVEN):
        return (
            f"; speeds cannot be compared, for the machine had other work: equal policy updates took {ours:.1f} s "
            f"beside the tail and {theirs:.1f} s beside the frozen drafter"
        )
    mine, frozens = (arm.column("rollout_seconds")[-window:] for arm in (tail, frozen))
    return (
        f", and {ratio(frozens, mine).verb} it in speed: its rollouts of the last {window} steps took "
        f"{sum(mine):.2f} s, frozen {sum(frozens):.2f} s ({ratio(mine, frozens).text})"
    )


# -- table, JSON and picture ------------------------------------------------------------------------------------------


def cells_of(figures: AblationFigures) -> list[list[str]]:
    """The table's rows: the arms' names, then a row a figure."""
    window = figures.window

    def total(name: str, digits: int = 2) -> Callable[[ArmFigures], str]:
        return lambda arm: f"{arm.total(name):,.{digits}f}"

    rows: dict[str, Callable[[ArmFigures], str]] = {
        "held-out accept length": lambda arm: _number(arm.held_out.accept_length if arm.held_out else None, 3),
        f"own accept length, first {window}": lambda arm: _number(figures.first(arm), 3),
        f"own accept length, last {window}": lambda arm: _number(figures.last(arm), 3),
        "accept length, all rounds": lambda arm: _number(arm.accept_length, 3),
        "rollout seconds": total("rollout_seconds"),
        "step seconds": total("step_seconds"),
        "policy update seconds": total("update_seconds"),
        "idle rank-seconds": total("idle_rank_seconds"),
        "harvested rank-seconds": total("harvested_rank_seconds"),
        "drafter updates": total("num_updates", 0),
        "tokens trained on": lambda arm: f"{arm.num_trained_tokens:,}",
        "rollout speed, plain = 1": lambda arm: _number(figures.speedup(arm), 2),
    }
    if figures.num_mismatched:
        rows["tokens unlike the first arm's"] = lambda arm: f"{arm.num_mismatched:,}"
    return [["", *(arm.arm for arm in figures.arms)]] + [
        [name, *(cell(arm) for arm in figures.arms)] for name, cell in rows.items()
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def to_markdown(figures: AblationFigures) -> str:
    """The table with the verdict below it."""
    head, *rows = cells_of(figures)
    lines = [head, ["---", *["--:"] * len(figures.arms)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{verdict(figures)}\n"


def to_tree(figures: AblationFigures) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {
        "num_steps": figures.num_steps,
        "num_ranks": figures.num_ranks,
        "tie_guard": figures.tie_guard,
        "window": figures.window,
        "own_depth": JUDGED_DEPTH,
        "equal": figures.equal,
        "verdict": verdict(figures),
        "arms": {arm.arm: _arm_tree(figures, arm) for arm in figures.arms},
    }


def _arm_tree(figures: AblationFigures, arm: ArmFigures) -> dict[str, Any]:
    rewards = [line["critic/score/mean"] for line in arm.lines]
    return {
        "own_accept_length_first": figures.first(arm),
        "own_accept_length_last": figures.last(arm),
        "held_out_accept_length": arm.held_out.accept_length if arm.held_out else None,
        "held_out": vars(arm.held_out) if arm.held_out else None,
        "accept_length": arm.accept_length,
        **{name: arm.total(name) for name in _COLUMNS},
        "num_trained_tokens": arm.num_trained_tokens,
        "reward_mean": sum(rewards) / len(rewards),
        "rollout_speedup": figures.speedup(arm),
        "policy_sha256": arm.policy_sha256,
        "mismatched_tokens": arm.num_mismatched,
        "rewards_equal": arm.rewards_equal,
        "steps": [_step_tree(line) for line in arm.lines],
    }


def _step_tree(line: Line) -> dict[str, Any]:
    figures = {name: line[column] for name, column in _COLUMNS.items()}
    own, sequences = own_accept_length([line]), DraftCounts.from_metrics(line).num_sequences
    return {**figures, "reward": line["critic/score/mean"], "own_accept_length": own, "own_sequences": sequences}


def write_report(figures: AblationFigures) -> list[Path]:
    """Write JSON, the table in Markdown and the picture into the ablation's folder; returns the paths.

    Raises:
        WriteError: the disk refused.
    """
    from tlt_hpc.studies.ablate.plot import plot  # on one rank alone, and only now: matplotlib takes its time

    tree, folder = to_tree(figures), figures.folder
    texts = {folder / "figures.json": json.dumps(tree, indent=1) + "\n", folder / "table.md": to_markdown(figures)}
    for path, text in texts.items():
        with writing_beside(path) as part:
            part.write_text(text, encoding="utf-8")
    return [*texts, *plot(tree, folder / "ablation.png")]
