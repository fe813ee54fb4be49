"""Runs ``tlt evaluate``: every rank answers its share of the prompts, rank 0 counts. Can be killed and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.cluster.watch.last import warn_of_last
from tlt_hpc.common.files import LINES_BYTES, read_text
from tlt_hpc.common.records import SampleKey
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, UserError, check_replicas, to_toml
from tlt_hpc.data.evaluation_sets import EvaluationSet, left_out, longest_prompt, longest_response
from tlt_hpc.data.rows import digest_of
from tlt_hpc.evaluate.answering import answer
from tlt_hpc.evaluate.figures import to_json
from tlt_hpc.evaluate.folder import WEIGHTS, EvaluationFolder
from tlt_hpc.evaluate.requests import Wanted, sampling_params, wanted_responses
from tlt_hpc.evaluate.subject import Subject, config_for, load_weights, open_checkpoint
from tlt_hpc.evaluate.tally import Results, tally
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import TOKEN_IDS, initial_drafter, serving_drafter
from tlt_hpc.models.folder import end_token_ids, find_model, load_tokenizer
from tlt_hpc.models.once import read_all_once
from tlt_hpc.models.shape import ModelShape, check_sharding, read_shape
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import ModelAssets, open_checked_sets
from tlt_hpc.rewards.scorer import without_form
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.session import (
    CALIBRATION_RESPONSES,
    Session,
    open_bench,
    open_session,
)
from tlt_hpc.storage.evaluation_log import JudgedResponse
from tlt_hpc.storage.folder import make_folder
from tlt_hpc.storage.records import add_json_line, write_json


class EvaluationReporter(Protocol):
    """Whoever shows an evaluation to its user; called on rank 0 alone."""

    def started(self, name: str, folder: Path, num_responses: int, num_done: int, warning: str) -> None: ...

    def answering(self, roster: Roster) -> None: ...

    def counting(self) -> None: ...


@dataclass(frozen=True)
class EvaluationResult:
    """How an evaluation ended; the same on every rank."""

    name: str
    folder: Path
    num_generated: int
    """Responses that this start made."""
    num_left: int
    results: Results | None
    """None where a stop vote ended it."""
    reason: str = ""
    """Which."""
    seconds: float = 0.0
    """That rank 0 took to generate and judge, in this start."""

    @property
    def finished(self) -> bool:
        return self.results is not None


def evaluation_config(config: Config, subject: Subject) -> Config:
    """What ``evaluate`` takes: the job's with the subject's model, its answers judged without their form."""
    found = config_for(config, subject)
    return found.model_copy(update={"reward": without_form(found.reward)})


@BEAT.within(Phase.EVALUATION)
def evaluate(config: Config, subject: Subject, world: World, reporter: EvaluationReporter) -> EvaluationResult:
    """Evaluate, or resume an evaluation; ``config`` is ``evaluation_config``'s. Collective.

    Raises:
        ValueError: the user's mistake (configuration, checkpoint, data, a folder that holds another evaluation).
    """
    bench = open_bench(config, world)
    assets, sets = world.node_group.once(lambda: read_assets(config, world.size))
    check_same_sets(sets, world)
    subject, checkpoint = open_checkpoint(subject, world)
    folder, wanted = EvaluationFolder(subject.folder(config)), wanted_responses(config, sets)
    with closing(open_session(config, world, assets)) as session:
        fingerprint = load(session.decoder, subject, checkpoint, config.model.path, world)
        facts = facts_of(config, sets, fingerprint)
        done = claim(folder, facts, world)
        num_missing = count_missing(wanted, done, world)
        if world.rank == 0:
            total = sum(len(each.requests) for each in wanted)
            reporter.started(subject.name, folder.path, total, total - num_missing, left_out(sets))
        start = time.perf_counter()
        if num_missing:
            engine = make_engine(session, sets, checkpoint)
            some = wanted[:: max(1, len(wanted) // CALIBRATION_RESPONSES)]
            session.calibrate(engine, [each.requests[-1] for each in some])
            start = time.perf_counter()
            if not answer(session, engine, bench, wanted, folder, done, reporter.answering):
                left = world.once(lambda: len(missing_of(wanted, folder.read())))
                made, reason = num_missing - left, world.first_stop_reason()
                return EvaluationResult(subject.name, folder.path, made, left, None, reason)
        seconds = time.perf_counter() - start

    def count_results() -> Results:
        reporter.counting()
        responses = complete(folder, wanted)
        results = tally(wanted, responses, bench, assets.tokenizer, config.evaluation.ks)
        report(folder, subject.log(config), results, {"evaluated": subject.name, **facts}, subject.step)
        return results

    results = world.once(count_results)
    return EvaluationResult(subject.name, folder.path, num_missing, 0, results, seconds=seconds)


def make_engine(session: Session, sets: Sequence[EvaluationSet], checkpoint: Checkpoint | None) -> RolloutEngine:
    """The engine with the evaluation's sampling, and the checkpoint's drafter or what ``drafter.init`` names.

    Without a drafter there is none of its strategies. Collective over the node, whose first rank reads.

    Raises:
        ConfigError: ``drafter.init`` names what does not fit the model, or the budget of pages is too small.
    """
    config, drafter = session.config, None
    if config.speculation.mode == "full":
        weights = read_all_once(
            session.world.node_group, lambda: _drafter_weights(config, checkpoint, session.decoder.shape)
        )
        drafter = None if weights is None else serving_drafter(weights, session.decoder)
    settings = session.settings()
    strategies = tuple(s for s in settings.strategies if drafter is not None or not s.has_drafter)
    params, longest = sampling_params(config), longest_prompt(sets)
    settings = replace(settings, params=params, max_prompt_tokens=longest, strategies=strategies)
    engine = session.make_engine(settings, drafter)
    engine.keeps = session.keeps
    engine.drafter_ready = drafter is not None
    return engine


# of [reward]: what a verdict depends on
_JUDGING = (
    "default",
    "by_source",
    "function",
    "tolerance",
    "format_tags",
    "cpu_seconds",
    "memory_mb",
)


def read_assets(config: Config, num_ranks: int) -> tuple[ModelAssets, tuple[EvaluationSet, ...]]:
    """The light files of the model, and the data sets; ``config`` is ``config_for``'s.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    folder = find_model(config.model.path)
    shape = read_shape(folder)
    check_replicas(config, num_ranks)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    tokenizer = load_tokenizer(folder)
    sets = open_checked_sets(config, folder, shape, tokenizer)
    return ModelAssets(folder, shape, tokenizer, end_token_ids(folder, shape)), sets


def check_same_sets(sets: Sequence[EvaluationSet], world: World) -> None:
    """Refuse data sets that are not the same on all nodes: ranks would not agree on what is to be answered.

    Collective.

    Raises:
        ConfigError: on all ranks.
    """
    seen = world.allgather((world.hostname, {each.name: each.prompts_digest() for each in sets}))
    for rank, (hostname, marks) in enumerate(seen):
        for name, mark in marks.items():
            if mark != seen[0][1].get(name):
                raise ConfigError(
                    f"evaluation.sources: rank {rank} on {hostname} reads another {name!r} than rank 0 on "
                    f"{seen[0][0]}; give all nodes the same files"
                )


def facts_of(config: Config, sets: Sequence[EvaluationSet], fingerprint: str) -> dict[str, object]:
    """What responses and verdicts depend on, by name."""
    evaluation = config.evaluation
    function = config.reward.function.rpartition(":")[0]
    return {
        WEIGHTS: fingerprint,
        "model.dtype": config.model.dtype,
        "evaluation.seed": evaluation.seed,
        "evaluation.temperature": evaluation.temperature,
        "evaluation.top_p": evaluation.top_p,
        "evaluation.max_new_tokens": longest_response(config),
        "rollout.stop_strings": config.rollout.stop_strings,
        **{f"reward.{name}": vars(config.reward)[name] for name in _JUDGING},
        "reward.format_pattern": "",  # a key of earlier versions, whose evaluations can be resumed
        **({"the file of reward.function": digest_of(Path(function))} if function else {}),
        **{f"data of {each.name}": each.digest for each in sets},
    }


def _drafter_weights(config: Config, checkpoint: Checkpoint | None, shape: ModelShape) -> dict[str, Tensor] | None:
    if checkpoint is None or not checkpoint.names("drafter"):
        return initial_drafter(config.drafter.init, config.drafter.form, shape)
    if not int(checkpoint.read("drafter", "num_steps")) and config.drafter.init == "random":
        return None
    names = [n for n in checkpoint.names("drafter") if n.endswith(".weight") or n == TOKEN_IDS]
    return {name: checkpoint.read("drafter", name) for name in names}


def load(decoder: Decoder, subject: Subject, checkpoint: Checkpoint | None, model: str, world: World) -> str:
    """Give a decoder its part of the weights that are judged; returns their fingerprint. Collective.

    Raises:
        UserError: they are not those of the folder ``model``, by which it was made.
    """
    try:
        return load_weights(decoder, subject, checkpoint, world)
    except UserError:  # files that cannot be read: no matter of what they hold
        raise
    except ValueError as error:
        raise UserError(f"{subject.name} does not fit model.path = {model!r}: {error}") from None


def claim(folder: EvaluationFolder, facts: dict[str, object], world: World) -> set[SampleKey]:
    """Have rank 0 claim the folder; the names of the responses that are there. Collective.

    Raises:
        UserError: on all ranks, where it is another evaluation's.
    """

    def claim_on_rank_0() -> set[SampleKey]:
        folder.claim(facts)
        make_folder(folder.status)
        claim_owner(folder.status, BEAT.start)
        warn_of_last(folder.status, BEAT.start)
        return set(folder.read())

    found = world.once(claim_on_rank_0)
    BEAT.folder = folder.status
    return found


def missing_of(wanted: list[Wanted], done: Container[SampleKey]) -> list[SampleKey]:
    """The responses that are not there yet."""
    return [request.key for each in wanted for request in each.requests if request.key not in done]


def count_missing(wanted: list[Wanted], done: Container[SampleKey], world: World) -> int:
    """How many responses are not there yet, as rank 0 finds: what all ranks do next hangs on it. Collective."""
    return world.once(lambda: len(missing_of(wanted, done)))


def complete(folder: EvaluationFolder, wanted: list[Wanted]) -> dict[SampleKey, JudgedResponse]:
    """All responses, read back.

    Raises:
        UserError: some cannot be read although they were written.
    """
    found = folder.read()
    lacking = missing_of(wanted, found)
    if lacking:
        raise UserError(
            f"{folder.path} lacks {count(len(lacking), 'response')} that were written: their files are damaged; "
            "start again, and they are generated again"
        )
    return found


def report(folder: EvaluationFolder, log: Path, results: Results, facts: dict[str, Any], step: int | None) -> None:
    """Leave the results in the folder, and a line in the log where they are new.

    Raises:
        WriteError: no room or no permission.
    """
    tree = {
        **facts,
        "responses": results.num_responses,
        "response_tokens": results.num_tokens,
        "accept_length": results.accept_length,
        "not_judged": results.failures,
        "sets": {name: to_json(figures) for name, figures in results.figures.items()},
    }
    steps = {} if step is None else {"num_steps": step}
    line = {"evaluated": facts["evaluated"], **steps, "folder": str(folder.path), **results.metrics}
    text = json.dumps(tree, indent=1) + "\n"
    is_new = not folder.results.exists() or folder.results.read_text(encoding="utf-8") != text
    if is_new:
        write_json(folder.results, tree)
    logged = read_text(log, LINES_BYTES).splitlines() if log.exists() else []
    if is_new or json.dumps(line) not in logged:  # a kill may have come between the two
        add_json_line(log, line)


def describe(config: Config, subject: Subject, sets: Sequence[EvaluationSet], shape: ModelShape, num_ranks: int) -> str:
    """The plan in words, then the resolved configuration as TOML."""
    evaluation = config.evaluation
    named = ", ".join(f"{each.name} ({count(len(each.prompts), 'prompt')})" for each in sets)
    each = ["greedily"]
    if evaluation.samples:
        each.append(f"{evaluation.samples} times at temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}")
    lines = [
        f"evaluation  {subject.name} on {count(num_ranks, 'rank')}, seed {evaluation.seed}",
        f"model       {config.model.path}: {shape.family}, {shape.num_layers} layers of width {shape.hidden_size}, "
        f"{shape.num_parameters / 1e6:.1f} M parameters, {config.model.dtype}",
        f"data        {named}",
        f"answers     {' and '.join(each)}, at most {count(longest_response(config), 'token')}",
        f"speculation {config.speculation.mode}",
    ]
    return "\n".join([*lines, "", to_toml(config)])
