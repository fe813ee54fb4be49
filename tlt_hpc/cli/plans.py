"""Describes what a command on ranks would do: its configuration, checked against the files that it names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import (
    Config,
    ConfigError,
    DrafterSection,
    UserError,
    check_resumable,
    check_run_can_learn,
    config_for_comparison,
    load_saved_config,
    truncation_warning,
)
from tlt_hpc.storage.folder import GIVE_OUTPUT, RunFolder, check_writable
from tlt_hpc.storage.records import read_finished
from tlt_hpc.storage.step_lines import read_lines

if TYPE_CHECKING:
    from tlt_hpc.plan.inputs import ModelAssets


def command_config(config: Config, options: argparse.Namespace) -> Config:
    """The configuration that a command runs.

    Raises:
        ValueError: it is none that the command can run, or there is no such run or model to evaluate.
    """
    if options.command == "warmup":
        from tlt_hpc.studies.warmup import plan

        return plan.warmup_config(config)
    if options.command == "evaluate":
        from tlt_hpc.evaluate.subject import evaluation_config, find_subject

        return evaluation_config(config, find_subject(options.checkpoint, options.step, options.output))
    if options.command == "compare":
        return config_for_comparison(config)
    if options.command == "train":
        check_run_can_learn(config)
    return config


def plan_command(config: Config, options: argparse.Namespace, num_ranks: int) -> str:
    """The plan in words, after ``command_config``'s configuration has been held against the files that it names.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    from tlt_hpc.plan.inputs import read_assets

    if options.command == "evaluate":
        return plan_evaluation(config, options, num_ranks)
    assets = read_assets(config, num_ranks)
    said = assets.prompts.warning if options.dry_run else ""  # it may read all rows, and a start says it itself
    said = _warning(said) + _warning(truncation_warning(config.rollout) if options.command == "train" else "")
    return said + describe_training_plan(config, assets, options, num_ranks)


def describe_training_plan(config: Config, assets: ModelAssets, options: argparse.Namespace, num_ranks: int) -> str:
    """The plan of a command that trains.

    Raises:
        ValueError: as ``plan_command``.
    """
    if config.speculation.has_drafter and config.drafter.init != "random":
        check_drafter(config.drafter, assets, is_read=options.dry_run)
    if options.command == "ablate":
        ablation_plan = load_extra("tlt_hpc.extras.ablate.ablation_plan")
        words: str = ablation_plan.describe(ablation_plan.plan_ablation(config, options), num_ranks)
        return words
    if options.command == "warmup":
        from tlt_hpc.models.weight_files import weight_files
        from tlt_hpc.studies.warmup import plan

        weight_files(assets.folder)  # the decoder reads no others
        return plan.describe(config, assets, num_ranks)
    if options.command == "compare":
        modes = 4 - len(set(options.without))
        in_turn = f"compare     {modes} modes in turn, all in memory at once: {modes} times what one run needs\n"
        run = config.run.model_copy(update={"num_steps": options.steps})
        return in_turn + plan_run(config.model_copy(update={"run": run}), assets, num_ranks)
    return plan_run(config, assets, num_ranks)


def plan_run(config: Config, assets: ModelAssets, num_ranks: int) -> str:
    """The plan of a run or a comparison in words.

    Raises:
        ValueError: as ``plan_command``.
    """
    from tlt_hpc.data.evaluation_sets import joined_set_warnings
    from tlt_hpc.plan.inputs import describe, open_checked_sets
    from tlt_hpc.plan.memory.summary import summarise_memory_plan

    config.run.check_trackers()
    config.lora.check_installed()
    has_sets = config.evaluation.every_steps
    sets = open_checked_sets(config, assets.folder, assets.shape, assets.tokenizer) if has_sets else ()
    memory = summarise_memory_plan(config, assets.shape, num_ranks)
    said = _warning(joined_set_warnings(sets)) + (f"memory      {memory}\n" if memory else "")
    return said + describe(config, assets, num_ranks)


def check_drafter(drafter: DrafterSection, assets: ModelAssets, is_read: bool) -> None:
    """See whether the drafter that training starts with is there, and read it if asked: ranks do, with torch.

    Raises:
        ValueError: it is missing, broken or of another model.
    """
    from tlt_hpc.models.weight_files import find_initial_drafter

    init = drafter.init
    try:
        find_initial_drafter(init, f"drafter.init = {init!r}")
    except ValueError as error:
        raise ConfigError(f"{error} or 'random'") from None
    if is_read:
        from tlt_hpc.models.drafter_file import read_drafter_of_init

        read_drafter_of_init(init, drafter.form, assets.shape, assets.folder)


def plan_evaluation(config: Config, options: argparse.Namespace, num_ranks: int) -> str:
    """The same for an evaluation, which reads nothing of what the job trains on.

    Raises:
        ValueError: as ``plan_command``, or no such run or model.
    """
    from tlt_hpc.data.evaluation_sets import joined_set_warnings
    from tlt_hpc.evaluate.evaluate import describe, read_and_check_assets
    from tlt_hpc.evaluate.subject import find_subject

    subject = find_subject(options.checkpoint, options.step, options.output)
    check_writable(subject.run.path if subject.run and not subject.out else subject.folder(config), GIVE_OUTPUT)
    assets, sets = read_and_check_assets(config, subject, num_ranks)
    return _warning(joined_set_warnings(sets)) + describe(config, subject, sets, assets, num_ranks)


def _warning(said: str) -> str:
    return f"warning     {said}\n" if said else ""


def check_folder(config: Config) -> str:
    """See whether a run can begin in its folder, or continue; returns the line of one that has finished, else nothing.

    Raises:
        ValueError, OSError: what is there is of another job, damaged, or cannot be read.
    """
    folder = RunFolder(config.folder)
    check_resumable(folder.config, config)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"run.folder and run.name give {folder.path}, which is a file; move it away or give another")
    check_writable(folder.path, "set run.folder to another place")
    read_lines(folder.metrics)
    return finished_message(config)


def finished_message(config: Config) -> str:
    """The message for a user who starts a finished run again with the same configuration; else empty.

    A run that is to be extended or evaluated differently has another configuration.

    Raises:
        UserError: what the run has left is damaged.
    """
    folder = RunFolder(config.folder)
    word = read_finished(folder.finished)
    if word is None or not folder.config.is_file():
        return ""
    if word.num_steps < config.run.num_steps or load_saved_config(folder.config) != config:
        return ""
    steps, digest = format_count(word.num_steps, "step"), word.policy_sha256[:12]
    return f"already finished: {steps} in {config.folder}, policy {digest}; raise run.num_steps to continue"
