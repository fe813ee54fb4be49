"""An evaluation between two steps of a run: the same responses and files as ``tlt evaluate`` on a checkpoint of it.

It borrows the run's engine and leaves it as it was, but for what only speed depends on. No key of a training response
is used, so no training token changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import SampleKey
from tlt_hpc.data.evaluation_sets import EvaluationSet, left_out
from tlt_hpc.evaluate.answering import answer
from tlt_hpc.evaluate.evaluate import check_same_sets, complete, count_missing, facts_of, report
from tlt_hpc.evaluate.folder import EvaluationFolder, changed_facts
from tlt_hpc.evaluate.requests import Wanted, wanted_responses
from tlt_hpc.evaluate.subject import fingerprint_of, step_folder
from tlt_hpc.evaluate.tally import tally
from tlt_hpc.models.folder import find_model
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import open_checked_sets
from tlt_hpc.rewards.scorer import Judge, without_form
from tlt_hpc.session import Job, open_bench

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
TESTING = "timing_s/testing"
"""The figure that every evaluated step's line has, as verl calls it."""


@dataclass(frozen=True)
class TrainingEvaluation:
    """What is evaluated between steps, the same at each."""

    sets: tuple[EvaluationSet, ...]
    wanted: list[Wanted]
    bench: Judge

    def is_due(self, job: Job, step: int) -> bool:
        """Whether the policy after ``step`` steps is to be judged."""
        every = job.config.evaluation.every_steps
        return step > 0 and (step % every == 0 or step >= job.config.run.num_steps)


def prepare(job: Job) -> TrainingEvaluation | None:
    """Read the data sets once for the whole run; None where it does not evaluate. Collective.

    Raises:
        ValueError: a data set cannot be used, or is not the same on all nodes.
    """
    if not job.config.evaluation.every_steps:
        return None
    config = job.config
    bench = open_bench(config.model_copy(update={"reward": without_form(config.reward)}), job.world)
    folder, shape = find_model(config.model.path), job.engine.decoder.shape
    sets = job.world.node_group.once(lambda: open_checked_sets(config, folder, shape, job.tokenizer))
    check_same_sets(sets, job.world)
    if job.world.rank == 0 and left_out(sets):
        logger.warning("left out of the evaluation: %s", left_out(sets))
    return TrainingEvaluation(sets, wanted_responses(config, sets), bench)


@BEAT.within(Phase.EVALUATION)
def evaluate_policy(
    job: Job, evaluation: TrainingEvaluation, step: int, shown: Callable[[Roster], None]
) -> Metrics | None:
    """Judge the policy that the engine holds, after ``step`` steps; collective. None where a stop vote came first.

    Returns on all ranks the figures under verl's names, with ``timing_s/testing``.
    """
    start = time.perf_counter()
    fingerprint = fingerprint_of(job.policy.named_weights(), job.engine.decoder.shape.tied_head)
    folder = EvaluationFolder(step_folder(job.folder, step))
    facts = facts_of(job.config, evaluation.sets, fingerprint)
    done = claim_anew(job.world, folder, facts)
    is_there = not count_missing(evaluation.wanted, done, job.world)
    if not is_there:
        engine, learned = job.engine, job.engine.chooser.state()
        engine.feature_sink = None  # the drafter learns from the policy's own rollouts
        is_there = answer(job, engine, evaluation.bench, evaluation.wanted, folder, done, shown, step)
        engine.chooser.load_state(learned)  # accept lengths at another temperature say little of the next rollout's
        engine.take_counts()
    if not is_there:
        return None

    def count_results() -> Metrics:
        responses = complete(folder, evaluation.wanted)
        ks = job.config.evaluation.ks
        results = tally(evaluation.wanted, responses, evaluation.bench, job.tokenizer, ks)
        named = {"evaluated": f"{job.folder.path}, step {step}", **facts}
        report(folder, job.folder.path / "evaluations.jsonl", results, named, step)
        return {**results.metrics, TESTING: time.perf_counter() - start}

    return job.world.once(count_results)


def claim_anew(world: World, folder: EvaluationFolder, facts: dict[str, object]) -> set[SampleKey]:
    """The names of the responses that are there; those of another evaluation are set aside first. Collective.

    A run that steps were taken back from, or whose settings have changed, comes by the same step again.
    """

    def claim() -> set[SampleKey]:
        changed = changed_facts(folder.read_facts(), facts)
        if changed:
            logger.warning(
                "%s has %s = %r, now %r: kept as %s, evaluated again", folder.path, *changed, folder.set_aside()
            )
        folder.claim(facts)
        return set(folder.read())

    return world.once(claim)
