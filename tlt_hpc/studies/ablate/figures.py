"""What an ablation's runs have logged, read back arm by arm and held against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.drafting.schedule import JUDGED_DEPTH, DraftCounts
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablate.ablate_options import ArmName
from tlt_hpc.studies.ablate.plan import Ablation, digest_of
from tlt_hpc.studies.ablate.statistics import Gain, Passes, gain_in_passes, ratio
from tlt_hpc.studies.compare import num_mismatched, rewards_by_key, tokens_by_key

_UNEVEN = 1.1
"""Ratio of two arms' seconds for the same policy updates from which their speeds are not compared."""


@dataclass(frozen=True)
class StepFigures:
    """One step of an arm; rank-seconds are sums over the ranks."""

    rollout_seconds: float
    serial_seconds: float
    """Wall-clock seconds after the rollout in which all ranks trained the drafter."""
    update_seconds: float
    """Of the policy, on the same tokens in every arm: where they differ, so did what the machine had free."""
    step_seconds: float
    idle_rank_seconds: float
    harvested_rank_seconds: float
    num_updates: int
    """Micro-steps of all ranks."""
    num_tokens: int
    num_passes: float
    """Target passes by sequence, so that tokens over them are the accept length, whatever drafted."""
    reward: float
    drafts: DraftCounts
    """Of the learned drafter's own rounds."""


@dataclass(frozen=True)
class ArmFigures:
    """What one arm gave."""

    arm: ArmName
    steps: tuple[StepFigures, ...]
    policy_sha256: str
    num_mismatched: int
    """Response tokens that differ from the first arm's."""
    rewards_equal: bool
    num_trained_tokens: int
    """Of the drafter's updates, repeats counted."""
    held_out: Passes | None

    def total(self, name: str) -> float:
        """A figure of the steps, summed."""
        return float(sum(vars(step)[name] for step in self.steps))

    @property
    def accept_length(self) -> float:
        """Of all rounds, whatever drafted them."""
        return self.total("num_tokens") / self.total("num_passes")

    @property
    def serial_and_rollout_seconds(self) -> float:
        return self.total("rollout_seconds") + self.total("serial_seconds")


@dataclass(frozen=True)
class Figures:
    """The arms, held against the first of them."""

    folder: Path
    num_ranks: int
    tie_guard: bool
    arms: tuple[ArmFigures, ...]

    @property
    def num_steps(self) -> int:
        return len(self.arms[0].steps)

    @property
    def window(self) -> int:
        """Steps that "first" and "last" mean: a third of all."""
        return max(1, self.num_steps // 3)

    @property
    def tokens_equal(self) -> bool:
        return all(arm.num_mismatched == 0 for arm in self.arms)

    @property
    def rewards_equal(self) -> bool:
        return all(arm.rewards_equal for arm in self.arms)

    @property
    def policy_equal(self) -> bool:
        return len({arm.policy_sha256 for arm in self.arms}) == 1

    @property
    def held_out_equal(self) -> bool:
        """Whether the responses to held-out prompts are as long in all arms that have any."""
        return len({arm.held_out.tokens for arm in self.arms if arm.held_out}) <= 1

    @property
    def equal(self) -> dict[str, bool]:
        """What is held against the first arm's, and whether it is the same in all arms."""
        return {
            "tokens": self.tokens_equal,
            "rewards": self.rewards_equal,
            "policy": self.policy_equal,
            "held_out": self.held_out_equal,
        }

    @property
    def all_equal(self) -> bool:
        return all(self.equal.values())

    @property
    def as_promised(self) -> bool:
        """Whether the arms are equal as far as the tie guard promises: without it, in nothing."""
        return self.all_equal or not self.tie_guard

    def find(self, name: ArmName) -> ArmFigures | None:
        """An arm by its name; None where it was not run."""
        return next((arm for arm in self.arms if arm.arm == name), None)

    def first(self, arm: ArmFigures) -> float | None:
        """Accept length of the drafter's own rounds over the first steps; None where it had none."""
        return own_accept_length(arm.steps[: self.window])

    def last(self, arm: ArmFigures) -> float | None:
        """The same over the last steps."""
        return own_accept_length(arm.steps[-self.window :])

    def speedup(self, arm: ArmFigures, with_serial: bool = False) -> float | None:
        """Plain rollout seconds over the arm's, with its serial training where asked for; None without a plain arm."""
        plain = self.find("plain")
        if plain is None:
            return None
        seconds = arm.serial_and_rollout_seconds if with_serial else arm.total("rollout_seconds")
        return plain.total("rollout_seconds") / seconds


def own_accept_length(steps: Sequence[StepFigures]) -> float | None:
    """Of a chain of four of the learned drafter, over the rounds of several steps; None where there were none."""
    columns = [
        tuple(map(sum, zip(*(vars(step.drafts)[name] for step in steps), strict=True)))
        for name in ("reached", "accepted")
    ]
    pooled = DraftCounts(*columns)
    return pooled.accept_length if pooled.num_sequences else None


def read_figures(ablation: Ablation, held_out: Mapping[ArmName, Passes]) -> Figures:
    """All arms' figures, from their logs and metrics."""
    arms = tuple(read_arm(ablation, arm, held_out.get(arm)) for arm in ablation.arms)
    return Figures(ablation.folder, ablation.num_ranks, ablation.config.tie_guard, arms)


def read_arm(ablation: Ablation, arm: ArmName, held_out: Passes | None) -> ArmFigures:
    """One arm's figures."""
    folder, first = RunFolder(ablation.folder / arm), RunFolder(ablation.folder / ablation.arms[0])
    digest = digest_of(ablation, arm)
    assert digest is not None, f"{arm} is not done"
    rows = list(read_lines(folder.metrics).values())
    differences = [compare_step(first, folder, step, ablation.num_ranks) for step in range(ablation.num_steps)]
    return ArmFigures(
        arm=arm,
        steps=tuple(step_figures(row) for row in rows),
        policy_sha256=digest,
        num_mismatched=sum(mismatched for mismatched, _, _ in differences),
        rewards_equal=all(equal for _, equal, _ in differences),
        num_trained_tokens=sum(trained for _, _, trained in differences),
        held_out=held_out,
    )


def compare_step(first: RunFolder, folder: RunFolder, step: int, num_ranks: int) -> tuple[int, bool, int]:
    """Tokens that differ from the first arm's, whether rewards are equal, and tokens that the drafter trained on."""
    theirs, ours = ([read_step(run.rollout_log(step, rank)) for rank in range(num_ranks)] for run in (first, folder))
    return (
        num_mismatched(tokens_by_key(theirs), tokens_by_key(ours)),
        rewards_by_key(theirs) == rewards_by_key(ours),
        sum(micro_step.num_tokens for record in ours for micro_step in record.micro_steps),
    )


def step_figures(row: Mapping[str, Any]) -> StepFigures:
    """From a line of metrics.jsonl."""
    tokens = row["perf/total_num_tokens"]
    return StepFigures(
        rollout_seconds=row["rollout/seconds"],
        serial_seconds=row["timing_s/drafter"],
        update_seconds=row["timing_s/update_actor"],
        step_seconds=row["timing_s/step"],
        idle_rank_seconds=row["rollout/idle_rank_seconds"],
        harvested_rank_seconds=row["rollout/harvested_rank_seconds"],
        num_updates=int(row["drafter/steps"]),
        num_tokens=int(tokens),
        num_passes=tokens / row["drafter/spec_decode/mean_acceptance_length"],
        reward=row["critic/score/mean"],
        drafts=DraftCounts.from_metrics(row),
    )


# -- what it comes to -----------------------------------------------------------------------------------------------


def differences(figures: Figures) -> str:
    """What the arms do not have in common, and how they are compared then; empty where they are equal."""
    if figures.all_equal:
        return ""
    names = {"tokens": "texts", "rewards": "rewards", "policy": "final policies", "held_out": "held-out texts"}
    unequal = ", ".join(names[name] for name, equal in figures.equal.items() if not equal)
    guard = "although the tie guard is on" if figures.tie_guard else "as they may with the tie guard off"
    hows = {
        "tokens": "; their seconds are those of different texts",
        "held_out": "; held-out accept lengths are compared unpaired",
    }
    how = "".join(text for name, text in hows.items() if not figures.equal[name])
    return f"The arms differ in {unequal}, {guard}{how}."


def verdict(figures: Figures) -> str:
    """What the arms do not have in common, then whether training in the tail pays; empty where nothing is said."""
    return " ".join(filter(None, (differences(figures), comparison(figures))))


def comparison(figures: Figures) -> str:
    """Whether training in the tail beats the frozen drafter, by how much, and in what noise; empty without both."""
    tail, frozen = figures.find("tail"), figures.find("frozen")
    if tail is None or frozen is None:
        return ""
    assert tail.held_out is not None and frozen.held_out is not None
    accept = gain_in_passes(tail.held_out, frozen.held_out)
    sentences = [
        f"After {figures.num_steps} steps the drafter trained in the tail has an accept length of "
        f"{tail.held_out.accept_length:.3f} on held-out prompts, the frozen one {frozen.held_out.accept_length:.3f}: "
        f"{accept.text}. Training in the tail {judgement(accept)} the frozen drafter in accept length"
        f"{speed_judgement(tail, frozen, figures.window)}."
    ]
    control = figures.find("control")
    if control is not None and control.held_out is not None:
        fresh = gain_in_passes(tail.held_out, control.held_out)
        sentences.append(
            f"As many updates on the first step's rollouts, of {tokens_an_update(control)} tokens each (the tail's had "
            f"{tokens_an_update(tail)}), come to {control.held_out.accept_length:.3f}: fresh rollouts are worth "
            f"{fresh.text}."
        )
    return " ".join(sentences)


def tokens_an_update(arm: ArmFigures) -> int:
    """Mean tokens of a drafter's update; 0 where there was none."""
    updates = sum(step.num_updates for step in arm.steps)
    return round(arm.num_trained_tokens / updates) if updates else 0


def judgement(gain: Gain) -> str:
    """A verb for a difference, or for none."""
    if not gain.is_clear:
        return "does not differ, beyond the noise, from"
    return "beats" if gain.share > 0 else "is behind"


def speed_judgement(tail: ArmFigures, frozen: ArmFigures, window: int) -> str:
    """The same for rollout seconds, unless the machine had other work in one of the arms."""
    ours, theirs = (sum(step.update_seconds for step in arm.steps[-window:]) for arm in (tail, frozen))
    if abs(math.log(ours / theirs)) > math.log(_UNEVEN):
        return (
            f"; speeds cannot be compared, for the machine had other work: equal policy updates took {ours:.1f} s "
            f"beside the tail and {theirs:.1f} s beside the frozen drafter"
        )
    mine, frozens = seconds_of(tail, window), seconds_of(frozen, window)
    return (
        f", and {judgement(ratio(frozens, mine))} it in speed: its rollouts of the last {window} steps took "
        f"{sum(mine):.2f} s, frozen {sum(frozens):.2f} s ({ratio(mine, frozens).text})"
    )


def seconds_of(arm: ArmFigures, window: int) -> list[float]:
    """Rollout seconds of the last steps."""
    return [step.rollout_seconds for step in arm.steps[-window:]]


def to_tree(figures: Figures) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {
        "num_steps": figures.num_steps,
        "num_ranks": figures.num_ranks,
        "tie_guard": figures.tie_guard,
        "window": figures.window,
        "own_depth": JUDGED_DEPTH,
        "equal": figures.equal,
        "verdict": verdict(figures),
        "arms": {arm.arm: arm_tree(figures, arm) for arm in figures.arms},
    }


def arm_tree(figures: Figures, arm: ArmFigures) -> dict[str, Any]:
    """One arm, as JSON holds it."""
    return {
        "own_accept_length_first": figures.first(arm),
        "own_accept_length_last": figures.last(arm),
        "held_out_accept_length": arm.held_out.accept_length if arm.held_out else None,
        "held_out": {"tokens": arm.held_out.tokens, "passes": arm.held_out.passes} if arm.held_out else None,
        "accept_length": arm.accept_length,
        **{
            name: arm.total(name)
            for name in (
                "rollout_seconds",
                "serial_seconds",
                "update_seconds",
                "step_seconds",
                "idle_rank_seconds",
                "harvested_rank_seconds",
                "num_updates",
                "num_tokens",
            )
        },
        "num_trained_tokens": arm.num_trained_tokens,
        "reward_mean": float(np.mean([step.reward for step in arm.steps])),
        "rollout_speedup": figures.speedup(arm),
        "rollout_and_serial_speedup": figures.speedup(arm, with_serial=True),
        "policy_sha256": arm.policy_sha256,
        "mismatched_tokens": arm.num_mismatched,
        "rewards_equal": arm.rewards_equal,
        "steps": [step_tree(step) for step in arm.steps],
    }


def step_tree(step: StepFigures) -> dict[str, Any]:
    """One step, as JSON holds it."""
    plain = {name: value for name, value in vars(step).items() if name != "drafts"}
    own = own_accept_length([step])
    return {**plain, "own_accept_length": own, "own_sequences": step.drafts.num_sequences}
