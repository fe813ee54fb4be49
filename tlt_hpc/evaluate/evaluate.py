"""Evaluates a policy: ``tlt evaluate``, which can be killed and resumed.

Every rank answers its share of the prompts, and rank 0 counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.cluster.watch.record import warn_and_clear_last_end
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import Config, check_replicas, to_toml
from tlt_hpc.data.evaluation_sets import (
    EvaluationSet,
    joined_set_warnings,
    longest_prompt_tokens,
    longest_response_tokens,
)
from tlt_hpc.evaluate.between_steps import evaluation_settings, write_results
from tlt_hpc.evaluate.exam import Exam, generate_answers_all_ranks, make_exam_all_ranks, sampling_params
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.evaluate.subject import Subject, load_weights_all_ranks, open_checkpoint_all_ranks
from tlt_hpc.evaluate.tally import Results
from tlt_hpc.models.drafter_file import inference_drafter, is_inference_tensor, read_drafter_of_init
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.piece import read_and_broadcast_all
from tlt_hpc.models.shape import ModelShape, check_sharding, read_shape
from tlt_hpc.models.tokenizer import find_model, load_tokenizer, tokens_without_text
from tlt_hpc.models.weight_check import check_weights
from tlt_hpc.models.weight_files import end_token_ids, weight_files
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import ModelAssets, describe_model, open_checked_sets
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.run.session import Session, open_judge, open_session, restrict_draft_vocabulary
from tlt_hpc.storage.folder import make_folder

logger = logging.getLogger(__name__)


class EvaluationReporter(Protocol):
    """Shows an evaluation to its user; called on rank 0 alone."""

    def show_start(self, name: str, folder: Path, num_responses: int, num_done: int, warning: str) -> None:
        """Show that the evaluation ``name`` starts in ``folder``, and how many of its responses are there already."""

    def show_progress(self, roster: Roster) -> None:
        """Show the progress of the ranks that generate."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, or of one that was stopped; the same on every rank."""

    name: str
    folder: Path
    num_generated: int
    """Responses that this start made."""
    num_left: int
    results: Results | None
    """None where a stop vote ended it."""
    reason: str = ""
    """Which."""

    @property
    def finished(self) -> bool:
        return self.results is not None


@BEAT.in_phase(Phase.EVALUATION)
def run_evaluation_all_ranks(
    config: Config, subject: Subject, world: World, reporter: EvaluationReporter
) -> EvaluationResult:
    """Evaluate, or resume an evaluation; ``config`` is ``evaluation_config``'s. Collective.

    Raises:
        ValueError: the user's mistake (configuration, checkpoint, data, a folder that holds another evaluation).
    """
    judge = open_judge(config.reward, world)
    assets, sets = world.node_group.run_first_and_broadcast(lambda: read_and_check_assets(config, subject, world.size))
    exam = make_exam_all_ranks(config, sets, judge, world)
    subject, checkpoint = open_checkpoint_all_ranks(subject, world)
    folder = EvaluationFolder(subject.folder(config))
    with closing(open_session(config, world, assets)) as session:
        facts = evaluation_settings(
            config, session.assets, sets, load_weights_all_ranks(session.decoder, subject, checkpoint, config, world)
        )
        done = world.run_first_and_broadcast(lambda: claim_evaluation_folder(folder, facts))
        BEAT.folder = folder.status
        num_missing, total = len(exam.missing_requests(done)), len(exam.missing_requests(()))
        if world.rank == 0:
            reporter.show_start(subject.name, folder.path, total, total - num_missing, joined_set_warnings(sets))
        if num_missing:
            engine = make_engine(session, exam, checkpoint)
            if not generate_answers_all_ranks(session, engine, exam, folder, done, reporter.show_progress):
                num_left = world.run_first_and_broadcast(
                    lambda: len(exam.missing_requests(folder.read_all_responses()))
                )
                reason = world.gather_first_stop_reason()
                return EvaluationResult(subject.name, folder.path, num_missing - num_left, num_left, None, reason)
    named, log = {"evaluated": subject.name, **facts}, subject.log_file(config)
    results = world.run_first_and_broadcast(
        lambda: write_results(config.evaluation, session.tokenizer, exam, folder, log, named, subject.step)
    )
    return EvaluationResult(subject.name, folder.path, num_missing, 0, results)


def make_engine(session: Session, exam: Exam, checkpoint: Checkpoint | None) -> RolloutEngine:
    """The calibrated engine with the evaluation's sampling, and the checkpoint's drafter or that of ``drafter.init``.

    Without a drafter there is none of its strategies. Collective over the node, whose first rank reads.

    Raises:
        ConfigError: ``drafter.init`` names what does not fit the model, or the budget of pages is too small.
    """
    config, drafter = session.config, None
    if config.speculation.has_drafter:
        weights = read_and_broadcast_all(
            session.world.node_group, lambda: _drafter_weights(config, checkpoint, session.decoder.shape)
        )
        drafter = None if weights is None else inference_drafter(weights, session.decoder)
        if isinstance(drafter, Eagle):
            restrict_draft_vocabulary(drafter, config, session.assets, [p for each in exam.sets for p in each.prompts])
    settings = session.engine_settings()
    strategies = tuple(s for s in settings.strategies if drafter is not None or not s.has_drafter)
    params, longest = sampling_params(config), longest_prompt_tokens(exam.sets)
    settings = replace(settings, params=params, max_prompt_tokens=longest, strategies=strategies)
    engine = session.make_engine(
        settings, drafter, keeps=session.keeps_response, drafter_is_trained=drafter is not None
    )
    session.calibrate(engine, [each.requests[-1] for each in exam.wanted])
    return engine


def _drafter_weights(config: Config, checkpoint: Checkpoint | None, shape: ModelShape) -> dict[str, Tensor] | None:
    if checkpoint is None or not checkpoint.tensor_names("drafter"):
        return read_drafter_of_init(config.drafter.init, config.drafter.form, shape, find_model(config.model.path))
    if not int(checkpoint.read_tensor("drafter", "num_steps")) and config.drafter.init == "random":
        return None
    with checkpoint.open_tensor_reader("drafter") as read:
        return {name: read(name) for name in filter(is_inference_tensor, checkpoint.tensor_names("drafter"))}


def claim_evaluation_folder(folder: EvaluationFolder, facts: dict[str, object]) -> set[SampleKey]:
    """Claim the folder for this start, on rank 0; the keys of the responses that are there.

    Raises:
        UserError: it is another evaluation's.
    """
    done = folder.check_and_save_settings(facts)
    make_folder(folder.status)
    claim_owner(folder.status, BEAT.start_name)
    warn_and_clear_last_end(folder.status, BEAT.start_name)
    return done


def read_and_check_assets(
    config: Config, subject: Subject, num_ranks: int
) -> tuple[ModelAssets, tuple[EvaluationSet, ...]]:
    """The light files of the model, and the data sets; ``config`` is ``evaluation_config``'s.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    folder = find_model(config.model.path)
    shape = read_shape(folder)
    check_replicas(config.rollout, num_ranks)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    if subject.reads_model_weights:
        weight_files(folder)  # the decoder reads no others
        check_weights(folder, shape)
    tokenizer = load_tokenizer(folder)
    sets = open_checked_sets(config, folder, shape, tokenizer)
    ends = end_token_ids(folder, shape)
    return ModelAssets(
        folder, shape, tokenizer, ends, tokens_without_text(folder, tokenizer, shape.vocab_size, ends)
    ), sets


def describe(
    config: Config, subject: Subject, sets: Sequence[EvaluationSet], assets: ModelAssets, num_ranks: int
) -> str:
    """The plan in words, then the resolved configuration as TOML."""
    evaluation = config.evaluation
    named = ", ".join(f"{each.name} ({format_count(len(each.prompts), 'prompt')})" for each in sets)
    sampled = f"{evaluation.samples} times at temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}"
    newest = ", its newest checkpoint" if subject.run is not None and subject.step is None else ""
    lines = [
        f"evaluation  {subject.name}{newest} on {format_count(num_ranks, 'rank')}, seed {evaluation.seed}",
        *describe_model(config.model, assets),
        f"data        {named}",
        f"answers     greedily and {sampled}, at most {format_count(longest_response_tokens(config), 'token')}",
        f"speculation {config.speculation.mode}",
    ]
    return "\n".join([*lines, "", to_toml(config)])
