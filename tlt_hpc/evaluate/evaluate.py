"""Runs ``tlt evaluate``: every rank answers its share of the prompts, rank 0 counts. Can be killed and go on."""

from __future__ import annotations

import json
import time
from collections.abc import Container
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.cluster.watch.last import warn_of_last
from tlt_hpc.common.records import SampleKey
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, UserError, to_toml
from tlt_hpc.data.evaluation_sets import EvaluationSets, longest_response
from tlt_hpc.evaluate.answering import Means, answer
from tlt_hpc.evaluate.folder import EvaluationFolder, add_json_line, has_json_line, write_json
from tlt_hpc.evaluate.metrics import to_json
from tlt_hpc.evaluate.parts import (
    build_engine,
    calibration_of,
    check_same_sets,
    facts_of,
    open_drafter,
    read_assets,
)
from tlt_hpc.evaluate.requests import Wanted, wanted_responses
from tlt_hpc.evaluate.subject import Subject, config_for, load_weights, open_checkpoint
from tlt_hpc.evaluate.tally import Results, tally
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.standing import without_form
from tlt_hpc.session import calibrate, make_decoder, make_pulse, make_replica, open_bench
from tlt_hpc.storage.evaluation_log import JudgedResponse
from tlt_hpc.storage.folder import make_folder


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
    """Evaluate, or go on; ``config`` is ``evaluation_config``'s. Collective.

    Raises:
        ValueError: the user's mistake (configuration, checkpoint, data, a folder that holds another evaluation).
    """
    bench = open_bench(config, world)
    assets, sets = world.node_group.once(lambda: read_assets(config, world.size))
    check_same_sets(sets, world)
    subject, checkpoint = open_checkpoint(subject, world)
    replica = make_replica(config, world)
    decoder = make_decoder(config, assets, world, replica)
    fingerprint = load(decoder, subject, checkpoint, config.model.path, world)
    folder = EvaluationFolder(subject.folder(config))
    facts = facts_of(config, sets, fingerprint)
    wanted = wanted_responses(config, sets)
    done = claim(folder, facts, world)
    num_missing = count_missing(wanted, done, world)
    if world.rank == 0:
        total = sum(len(each.requests) for each in wanted)
        reporter.started(subject.name, folder.path, total, total - num_missing, sets.warning)
    made = 0.0
    if num_missing:
        drafter = open_drafter(config, checkpoint, decoder, world.node_group)
        engine = build_engine(config, assets, sets, decoder, drafter, world, replica)
        calibrate(engine, calibration_of(wanted), config.speculation.profile_seconds, world.node_group)
        start = time.perf_counter()
        with closing(make_pulse(world, replica, lambda: engine.text_mark)) as pulse:
            means = Means(engine, bench, assets.tokenizer, pulse, world, replica)
            is_whole = answer(means, wanted, folder, done, 0, reporter.answering)
        made = time.perf_counter() - start
        if not is_whole:
            return stopped(subject.name, folder, wanted, num_missing, world)

    def count_results() -> Results:
        reporter.counting()
        responses = complete(folder, wanted)
        results = tally(sets, wanted, responses, bench, assets.tokenizer, config.evaluation.ks)
        report(folder, subject.log(config), results, {"evaluated": subject.name, **facts}, subject.step)
        return results

    results = world.once(count_results)
    return EvaluationResult(subject.name, folder.path, num_missing, 0, results, seconds=made)


def stopped(
    name: str, folder: EvaluationFolder, wanted: list[Wanted], num_missing: int, world: World
) -> EvaluationResult:
    """How an evaluation stands that a vote has ended; collective."""
    left = world.once(lambda: len(missing_of(wanted, folder.read())))
    return EvaluationResult(name, folder.path, num_missing - left, left, None, world.first_stop_reason())


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
            "start again, and they are generated anew"
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
    if is_new or not has_json_line(log, line):  # a kill may have come between the two
        add_json_line(log, line)


def describe(config: Config, subject: Subject, sets: EvaluationSets, shape: ModelShape, num_ranks: int) -> str:
    """The plan in words, then the resolved configuration as TOML."""
    evaluation = config.evaluation
    named = ", ".join(f"{each.name} ({count(len(each.prompts), 'prompt')})" for each in sets.sets)
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
