"""Runs ``tlt ablate``: one arm after the other in this process, then the held-out measurement and the figures.

Every rank runs it. Arms that have finished are not run again, so the same command resumes an ablation that was killed.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from tlt_hpc.checkpoint.policy_weights import policy_readers
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.display import Screen, StepReporter, print_comparison
from tlt_hpc.cluster.stopping import STOPPED_EARLY
from tlt_hpc.common.records import Request, SampleKey
from tlt_hpc.config import Config
from tlt_hpc.extras.ablate.ablation_plan import WITHOUT_DRAFTER, Ablation, check_ranks, plan_ablation
from tlt_hpc.look.series import paired_ratio
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.piece import read_and_broadcast_parts
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import read_and_broadcast_assets
from tlt_hpc.rollout.acceptance import JUDGED_DEPTH
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.run.session import Session, open_session
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_finished, write_json
from tlt_hpc.studies.compare import WARM_UP, Comparison, read_comparison, table_rows, to_tree
from tlt_hpc.studies.warmup.texts import from_prompts
from tlt_hpc.train import Reporter, run_training

_CLEAR = 2.0
"""Standard errors from which a difference is called one."""


@dataclass(frozen=True)
class Passes:
    """Tokens and target passes of responses [N], in the same order for all arms."""

    tokens: tuple[int, ...]
    passes: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Tokens of a target pass, over all responses."""
        return sum(self.tokens) / sum(self.passes)


@dataclass(frozen=True)
class AblationFigures:
    """The arms' logs, compared with the first arm's, and how each arm's last drafter drafts on held-out prompts."""

    comparison: Comparison
    held_out: dict[str, Passes]

    @property
    def arms_equal_as_promised(self) -> bool:
        """True if the arms are equal as far as is promised (``Config.is_exact``)."""
        return not (self.comparison.is_exact and self.differing_names)

    @property
    def differing_names(self) -> list[str]:
        """The names of what differs between the arms."""
        texts = {passes.tokens for passes in self.held_out.values()}
        equal = {**self.comparison.equality_by_name, "held-out texts": len(texts) <= 1}
        return [name for name, is_equal in equal.items() if not is_equal]

    def rows(self) -> dict[str, list[str]]:
        """The table: names of figures, each with a cell for every arm."""
        found = [self.held_out.get(arm) for arm in self.comparison.runs]
        cells = ["-" if passes is None else f"{passes.accept_length:.3f}" for passes in found]
        return {"held-out accept length": cells, **table_rows(self.comparison)}

    def verdict(self) -> str:
        """The differences between the arms, then whether training in the tail, or draft-ahead, gains; may be empty."""
        parts = []
        if self.differing_names:
            promised = "which should be equal" if self.comparison.is_exact else "as they may without batch_invariant"
            parts.append(f"The arms differ in {', '.join(self.differing_names)}, {promised}.")
        if {"tail", "frozen"} <= self.held_out.keys():
            tail, frozen = self.held_out["tail"], self.held_out["frozen"]
            gain = accept_length_gain(tail, frozen)
            parts.append(
                f"After {self.comparison.num_steps} steps the drafter trained in the tail has an accept length of "
                f"{tail.accept_length:.3f} on held-out prompts, the frozen one {frozen.accept_length:.3f}: "
                f"{gain.text}. Training in the tail {gain.verb} the frozen drafter in accept length."
            )
        if {"tail", "ahead"} <= self.comparison.runs.keys():
            parts.append(self._tail_versus_ahead_sentence())
        return " ".join(parts)

    def _tail_versus_ahead_sentence(self) -> str:
        """A sentence on which of the two uses of the tail gains more in rollout seconds."""
        tail, ahead = self.comparison.runs["tail"], self.comparison.runs["ahead"]
        median, low, high = paired_ratio(tail.by_step["rollout"], ahead.by_step["rollout"])
        verb = "gains more than" if low > 1 else "gains less than" if high < 1 else "does not clearly differ from"
        interval = f"95 % interval {low:.2f} to {high:.2f}" if math.isfinite(high) else "noise unknown"
        return (
            f"In rollout seconds draft-ahead {verb} training in the tail: tail takes {median:.2f} times as long as "
            f"ahead (median of the steps' ratios, {interval}; the arms ran one after another: policy updates, the same "
            f"work, took {tail.update_seconds / ahead.update_seconds:.2f} times as long)."
        )


def ablate(ablation: Ablation, world: World, reporter: Reporter) -> AblationFigures | None:
    """Run all arms that have not finished yet, and compare them; collective. None if a signal stopped it.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data, a drafter).
    """
    world.run_first_and_broadcast(lambda: check_ranks(ablation, world.size))
    digests = world.run_first_and_broadcast(lambda: read_finished_digests(ablation))
    left = [arm for arm in ablation.arms if arm not in digests]
    if left:
        config = replace(ablation, num_steps=1).config_of(left[-1])  # the last one finds a drafter that does not fit
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": WARM_UP})})
        remove_folder_all_ranks(config.folder, world)  # of an earlier start
        is_finished = run_arm(config, world, reporter) is not None
        remove_folder_all_ranks(config.folder, world)
        if not is_finished:
            return None
    for arm in left:
        digest = run_arm(ablation.config_of(arm), world, reporter)
        if digest is None:
            return None
        digests[arm] = digest
    world.print_once("measuring accept length on held-out prompts, by arm")
    held_out = measure_accept_lengths_all_ranks(ablation, world)
    if held_out is None:
        return None
    in_order = {arm: digests[arm] for arm in ablation.arms}
    comparison = world.run_first_and_broadcast(
        lambda: read_comparison(ablation.config, ablation.folder, ablation.num_steps, world.size, in_order)
    )
    return AblationFigures(comparison, held_out)


def read_finished_digests(ablation: Ablation) -> dict[str, str]:
    """Digests of the last policies of the arms that have taken all their steps.

    Raises:
        UserError: a file of an arm is damaged or cannot be read.
    """
    found = {arm: read_finished(RunFolder(ablation.folder / arm).finished) for arm in ablation.arms}
    return {arm: word.policy_sha256 for arm, word in found.items() if word and word.num_steps == ablation.num_steps}


def remove_folder_all_ranks(folder: Path, world: World) -> None:
    """Remove a folder that no rank uses any more; collective."""
    world.barrier()
    world.run_first_and_broadcast(lambda: shutil.rmtree(folder, ignore_errors=True))


def run_arm(config: Config, world: World, reporter: Reporter) -> str | None:
    """Run one arm; returns the digest of its last policy, or None if a signal ended it."""
    result = run_training(config, world, reporter)
    gc.unfreeze()  # the first run also imported libraries, which excludes what exists then
    gc.collect()  # DeepSpeed's engines are full of cycles
    return result.policy_sha256 if result.finished else None


def measure_accept_lengths_all_ranks(ablation: Ablation, world: World) -> dict[str, Passes] | None:
    """Tokens and target passes of every held-out response, by arm that has a drafter; collective.

    Each drafter answers the same prompts in chains of four, with its arm's last policy: with the tie guard that is the
    same in all arms, and so is the text. None if a signal ended it.

    Raises:
        ConfigError: too few prompts to hold any out.
    """
    arms = [arm for arm in ablation.arms if arm not in WITHOUT_DRAFTER]
    if not arms:
        return {}
    config = ablation.config_of(arms[0])
    assets = read_and_broadcast_assets(config, world.size, world.node_group)
    # prompts of the warm-up's draws, which are no step's; but data that has an end comes again
    requests = from_prompts(config.warmup, assets.prompts).validation_requests(config.run.seed)
    measured: dict[str, Passes] = {}
    with closing(open_session(config, world, assets)) as session:
        for arm in arms:
            load_policy(ablation, arm, session)
            own = measure_arm(session, ablation, arm, requests)
            if own is None:
                return None
            rows = sorted(chain.from_iterable(world.allgather(own)))
            measured[arm] = Passes(tuple(tokens for _, tokens, _ in rows), tuple(passes for *_, passes in rows))
    return measured


def load_policy(ablation: Ablation, arm: str, session: Session) -> None:
    """Load an arm's last policy into the decoder; collective over the node, whose first rank reads.

    Raises:
        ValueError: on all its ranks, if the checkpoint cannot be read.
    """
    node = session.world.node_group
    run, config = RunFolder(ablation.folder / arm), ablation.config
    checkpoint = node.run_first_and_broadcast(
        lambda: CheckpointStore(run.checkpoints, config.checkpoint.keep).open_step(ablation.num_steps)
    )
    readers = policy_readers(run, config, checkpoint, session.assets.folder)
    weights = ((name, read(None)) for name, read in read_and_broadcast_parts(node, readers))
    session.decoder.load_weights(weights, ablation.num_steps)


def measure_arm(
    session: Session, ablation: Ablation, arm: str, requests: list[Request]
) -> list[tuple[SampleKey, int, int]] | None:
    """Tokens and passes of this rank's share of the responses with an arm's drafter; None after a stop request."""
    folder = str(ablation.folder / arm / "drafter")
    drafter = load_drafter(folder, session.decoder, f"arm {arm!r}", session.world.node_group)
    settings = replace(session.engine_settings(), strategies=(Strategy("drafter", JUDGED_DEPTH),))
    engine = session.make_engine(settings, drafter, drafter_is_trained=True)
    session.calibrate_with_own_keys(engine, requests[:1])  # on every rank: of few prompts some ranks have none
    if session.generate(engine, requests[session.world.rank :: session.world.size]).has_stop_vote:
        return None
    return [(r.key, len(r.response_tokens), r.num_target_passes) for r in engine.take_finished_rollouts()]


@dataclass(frozen=True)
class Gain:
    """The relative gain of an arm over another, with its standard error (NaN: unknown)."""

    share: float
    error: float

    @property
    def verb(self) -> str:
        """The verb between the two arms; no difference if the gain lies within the noise, or that is unknown."""
        if not abs(self.share) > _CLEAR * self.error:
            return "does not differ, beyond the noise, from"
        return "beats" if self.share > 0 else "is behind"

    @property
    def text(self) -> str:
        """The gain in per cent, with the noise."""
        noise = "noise unknown" if math.isnan(self.error) else f"± {100 * self.error:.1f}"
        return f"{100 * self.share:+.1f} % ({noise})"


def accept_length_gain(arm: Passes, other: Passes) -> Gain:
    """Gain in accept length: by pairs of responses, or of independent samples if the arms' texts differ."""
    if arm.tokens == other.tokens:
        # tokens / passes over tokens / passes: the same tokens cancel
        return gain_of_paired_sums(other.passes, arm.passes)
    quotient = arm.accept_length / other.accept_length
    errors = (gain_of_paired_sums(each.tokens, each.passes).error / each.accept_length for each in (arm, other))
    return Gain(quotient - 1.0, quotient * math.hypot(*errors))


def gain_of_paired_sums(over: Sequence[float], under: Sequence[float]) -> Gain:
    """Sum of ``over`` [N] divided by the sum of ``under`` [N], which are pairs, minus 1 (linearised standard error)."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    quotient = float(a.sum() / b.sum())
    if len(a) < 2:
        return Gain(quotient - 1.0, math.nan)
    rest = a - quotient * b
    return Gain(quotient - 1.0, float(math.sqrt(len(a)) * rest.std(ddof=1) / b.sum()))


def write_figures(figures: AblationFigures) -> None:
    """Write figures.json and table.md into the ablation's folder.

    Raises:
        WriteError: the disk refused.
    """
    comparison = figures.comparison
    held_out = {arm: {**vars(found), "accept_length": found.accept_length} for arm, found in figures.held_out.items()}
    write_json(
        comparison.folder / "figures.json",
        {**to_tree(comparison), "held_out": held_out, "unequal": figures.differing_names, "verdict": figures.verdict()},
    )
    lines = [["", *comparison.runs], ["---", *["--:"] * len(comparison.runs)]]
    lines += [[name, *cells] for name, cells in figures.rows().items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (comparison.folder / "table.md").write_text(f"{table}\n\n{figures.verdict()}\n", encoding="utf-8")


def run_ablate_command(config: Config, options: argparse.Namespace, world: World) -> int:
    """Run ``tlt ablate`` on this rank; returns the exit status."""
    figures = ablate(plan_ablation(config, options), world, StepReporter(Screen(world.rank == 0)))
    if figures is None:
        reason = world.gather_first_stop_reason()
        if world.rank == 0:
            print(f"stopped early ({reason}); the same command resumes", flush=True)
        return STOPPED_EARLY
    if world.rank == 0:
        print_comparison(figures.comparison, figures.rows(), figures.verdict())
        write_figures(figures)
    return 0 if figures.arms_equal_as_promised else 1
