"""Evaluates the policy between two steps of a run, and what ``tlt evaluate`` shares with that: facts and figures.

It uses the run's engine and leaves it as it was, but for what only speed depends on. No key of a training response is
used, so no training token changes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.files import LINES_BYTES, read_text
from tlt_hpc.common.formatting import format_count, format_spans
from tlt_hpc.config import Config, UserError
from tlt_hpc.config.data_sections import is_function
from tlt_hpc.config.sections import EvaluationSection
from tlt_hpc.data.evaluation_sets import EvaluationSet, joined_set_warnings, longest_response_tokens
from tlt_hpc.data.rows import digest_of
from tlt_hpc.evaluate.exam import Exam, generate_answers_all_ranks, make_exam_all_ranks
from tlt_hpc.evaluate.folder import NEVER_SAMPLED, WEIGHTS, EvaluationFolder, digest_weights, step_folder
from tlt_hpc.evaluate.tally import Results, aggregate_responses
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import ModelAssets, open_checked_sets
from tlt_hpc.rewards.scorer import without_reward_parts
from tlt_hpc.run.job import Job
from tlt_hpc.run.session import open_judge
from tlt_hpc.storage.records import add_json_line, write_json

logger = logging.getLogger(__name__)

TESTING = "timing_s/testing"
"""The figure that every evaluated step's line has, as verl calls it."""
# of [reward]: what a verdict depends on
_JUDGING = ("default", "by_source", "format_tags", "cpu_seconds")


def read_exam_all_ranks(config: Config, world: World, shape: ModelShape, tokenizer: Tokenizer) -> Exam | None:
    """Read the data sets once for the whole run; None where it does not evaluate. Collective.

    Raises:
        ValueError: a data set cannot be used, or is not the same on all nodes.
    """
    if not config.evaluation.every_steps:
        return None
    judge = open_judge(without_reward_parts(config.reward), world)
    folder = find_model(config.model.path)
    sets = world.node_group.run_first_and_broadcast(lambda: open_checked_sets(config, folder, shape, tokenizer))
    exam = make_exam_all_ranks(config, sets, judge, world)
    if world.rank == 0 and joined_set_warnings(sets):
        logger.warning("evaluation: %s", joined_set_warnings(sets))
    return exam


@BEAT.in_phase(Phase.EVALUATION)
def evaluate_policy_all_ranks(
    job: Job, exam: Exam, step: int, shown: Callable[[Roster], None]
) -> dict[str, float] | None:
    """Collective. Evaluate the policy that the engine holds, after ``step`` steps; None where a stop vote came first.

    Returns on all ranks the figures under verl's names, with ``timing_s/testing``.
    """
    start = time.perf_counter()
    folder, log = EvaluationFolder(step_folder(job.folder, step)), job.folder.path / "evaluations.jsonl"
    fingerprint = digest_weights(job.policy.gather_named_weights(), job.engine.decoder.shape.tied_head)
    facts = evaluation_settings(job.config, job.assets, exam.sets, fingerprint)
    # a run that steps were taken back from, or whose settings have changed, comes by the same step again
    done = job.world.run_first_and_broadcast(lambda: folder.check_and_save_settings(facts, replaces=True))
    if exam.missing_requests(done):
        learned = job.engine.chooser.acceptance.state()
        job.engine.outbox.set_sink(None)  # the drafter learns from the policy's own rollouts
        is_whole = generate_answers_all_ranks(job, job.engine, exam, folder, done, shown, step)
        # accept lengths at another temperature tell little about the next rollout's
        job.engine.chooser.acceptance.load_state(learned)
        job.engine.take_counts()
        if not is_whole:
            return None
    named = {"evaluated": f"{job.folder.path}, step {step}", **facts}
    settings, tokenizer = job.config.evaluation, job.tokenizer
    metrics = job.world.run_first_and_broadcast(
        lambda: write_results(settings, tokenizer, exam, folder, log, named, step).metrics
    )
    return {**metrics, TESTING: job.world.broadcast(time.perf_counter() - start)}


def evaluation_settings(
    config: Config, assets: ModelAssets, sets: Sequence[EvaluationSet], fingerprint: str
) -> dict[str, object]:
    """Return the settings that responses and verdicts depend on, by name."""
    evaluation = config.evaluation
    functions = filter(is_function, config.reward.kinds)
    return {
        WEIGHTS: fingerprint,
        "the model's end tokens": sorted(assets.eos_token_ids),
        NEVER_SAMPLED: ", ".join(format_spans(assets.excluded_token_ids)),
        "model.dtype": config.model.dtype,
        "data.prompt_key": config.data.prompt_key,
        "data.answer_key": config.data.answer_key,
        "evaluation.seed": evaluation.seed,
        "evaluation.temperature": evaluation.temperature,
        "evaluation.top_p": evaluation.top_p,
        "evaluation.max_new_tokens": longest_response_tokens(config),
        "rollout.stop_strings": config.rollout.stop_strings,
        **{f"reward.{name}": vars(config.reward)[name] for name in _JUDGING},
        **{f"the file of {spec}": digest_of(Path(spec.rpartition(":")[0])) for spec in functions},
        **{f"data of {each.name}": each.digest for each in sets},
    }


def write_results(
    evaluation: EvaluationSection,
    tokenizer: Tokenizer,
    exam: Exam,
    folder: EvaluationFolder,
    log: Path,
    facts: dict[str, Any],
    step: int | None,
) -> Results:
    """Compute the figures of all responses, and write them to the folder and, once, to the log; on rank 0.

    Raises:
        UserError: some responses cannot be read although they were written.
        WriteError: no room or no permission.
    """
    responses = folder.read_all_responses()
    if lacking := exam.missing_requests(responses):
        raise UserError(
            f"{folder.path} lacks {format_count(len(lacking), 'response')} that were written: their files are damaged; "
            "start again, and they are generated again"
        )
    results = aggregate_responses(exam, responses, tokenizer, evaluation.pass_at_ks)
    tree = {
        **facts,
        "responses": results.num_responses,
        "response_tokens": results.num_tokens,
        "accept_length": results.accept_length,
        "not_judged": results.failures,
        "sets": {name: asdict(figures) for name, figures in results.figures.items()},
    }
    write_json(folder.results, tree)
    steps = {} if step is None else {"num_steps": step}
    line = {"evaluated": facts["evaluated"], **steps, "folder": str(folder.path), **results.metrics}
    if not log.exists() or json.dumps(line) not in read_text(log, LINES_BYTES).splitlines():
        add_json_line(log, line)
    return results
