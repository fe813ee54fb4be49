"""Checks of what a job reads, by the functions that a start of the run calls: model, data, rewards, drafter."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.common.formatting import format_bytes
from tlt_hpc.config import (
    EMBEDDED_MODEL,
    EMBEDDED_TASK,
    ModelSection,
    check_ranks,
    check_replicas,
    check_resumable,
    check_run_can_learn,
    truncation_warning,
)
from tlt_hpc.config.data_sections import is_function
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.extras.preflight.results import Finding, Skip, failure, failure_of, ok, warning
from tlt_hpc.mpi.owner import read_running_owner
from tlt_hpc.storage.folder import RunFolder

if TYPE_CHECKING:
    from tlt_hpc.rewards.client import RewardClient

_PATTERNS = ["*.json", "model*.safetensors", "*.txt", "*.jinja", "tokenizer*", "LICENSE*"]
"""Files of a repository that a run reads, without copies of the weights in other formats (Mistral's consolidated.*)."""
JUDGE_SECONDS = 60.0
"""Time limit for the reward server to start and for one response: sympy and a user's imports take seconds."""


def check_run(job: PlannedJob) -> Finding:
    """If the run exists already, this configuration may resume it."""
    config = job.config
    saved = RunFolder(config.folder).config
    if not saved.exists():
        return ok(f"a new one, {config.folder}")
    check_resumable(saved, config)
    if name := read_running_owner(RunFolder(config.folder).status):
        return warning(
            f"{config.folder}: a start of this run is at work there ({name}), and a second one ends itself",
            "wait for it, end it, or give this one another run.name",
        )
    return ok(f"{config.folder} is there, and will be resumed")


def check_ranks_fit(job: PlannedJob) -> Finding:
    """The samples and the replicas can be divided over the ranks, one rank a GPU."""
    config, num_ranks = job.config, job.num_ranks
    check_run_can_learn(config)
    check_ranks(config, num_ranks)
    # a replica on several nodes would send each pass over the network
    check_replicas(config.rollout, job.ranks_per_node)
    gpus = job.request.gpus_per_node
    if gpus and job.ranks_per_node != gpus:
        return warning(
            f"{job.ranks_per_node} ranks and {gpus} GPUs a node: the program is made for one rank a GPU",
            f"use --ntasks-per-node={gpus}",
        )
    nodes = job.request.nodes
    return ok(f"{num_ranks}, {job.ranks_per_node} on each of {nodes} nodes" if nodes > 1 else f"{num_ranks} on a node")


def check_sampling(job: PlannedJob) -> Finding:
    """Responses are sampled from what the update scores."""
    found, _, remedy = truncation_warning(job.config.rollout).rpartition("; ")
    return warning(found, remedy) if found else ok("from the whole softmax")


def check_model(job: PlannedJob) -> Finding:
    """The folder, its sizes, and every file of weights, which is opened but not read."""
    from tlt_hpc.models.shape import read_shape
    from tlt_hpc.models.tokenizer import find_model, hub_name
    from tlt_hpc.models.weight_files import torch_files, weight_files
    from tlt_hpc.plan.inputs import check_experts, check_shape, check_weights_read_end_tokens

    config = job.config
    config.lora.check_installed()
    try:
        folder = find_model(config.model.path)
    except ValueError as error:
        absent = failure_of(error)
        return failure(absent.found, f"{absent.remedy}, or add --fix --model-id {hub_name(Path(config.model.path))}")
    shape = read_shape(folder)
    check_weights_read_end_tokens(folder, shape)
    check_shape(config, shape, job.num_ranks)
    check_experts(config, shape, "cuda" if job.uses_gpu else "cpu")
    files = torch_files(folder) or list(weight_files(folder))
    num_bytes = sum(path.stat().st_size for path in files)
    return ok(f"{config.model.path}: {shape.family}, {shape.num_parameters / 1e6:,.1f} M parameters, "
              f"{len(files)} file{'s' * (len(files) != 1)} of weights, {format_bytes(num_bytes)}")  # fmt: skip


def check_data(job: PlannedJob) -> Finding:
    """Tokenizer and chat template can be read, and the first 10,000 rows drawn can be used."""
    from tlt_hpc.data.files import data_files
    from tlt_hpc.data.prompts import open_prompts
    from tlt_hpc.models.tokenizer import load_tokenizer
    from tlt_hpc.plan.inputs import find_unanswerable_reason, read_chat_format_with_stops

    data_files(job.config.data)  # a missing one is reported even if the model is missing, too
    tokenizer = load_tokenizer(job.model_folder)
    chat = read_chat_format_with_stops(job.config.rollout, job.model_folder, job.shape, tokenizer)
    prompts = open_prompts(job.config, tokenizer, chat, partial(find_unanswerable_reason, job.config.reward, job.shape))
    if prompts.warning:
        return warning(prompts.warning, "see tlt data inspect")
    if job.config.data.source == EMBEDDED_TASK:
        return ok(f"{EMBEDDED_TASK}, generated during the run")
    return ok(f"{job.config.data.source_name}: the first rows drawn can be used")


def check_evaluation(job: PlannedJob) -> Finding:
    """The data sets that are evaluated between steps, if there are any."""
    if not job.config.evaluation.every_steps:
        return ok("none between the steps")
    from tlt_hpc.data.evaluation_sets import joined_set_warnings
    from tlt_hpc.models.tokenizer import load_tokenizer
    from tlt_hpc.plan.inputs import open_checked_sets

    sets = open_checked_sets(job.config, job.model_folder, job.shape, load_tokenizer(job.model_folder))
    if said := joined_set_warnings(sets):
        return warning(said, "see tlt data inspect with the job's file")
    return ok(f"every {job.config.evaluation.every_steps} steps; its data can be used")


def check_rewards(job: PlannedJob) -> Finding:
    """The reward server starts here as it does in a job: it imports the user's function, which judges one response."""
    from tlt_hpc.rewards.client import RewardClient
    from tlt_hpc.rewards.judge import needs_server

    reward = job.config.reward
    kinds = ", ".join(reward.kinds)
    if not needs_server(reward):
        return ok(f"{kinds}; judged in the ranks")
    client = RewardClient(reward)
    try:
        client.wait_until_ready(JUDGE_SECONDS)
        found = _try_functions(job, client) if reward.functions else None
    finally:
        client.close()
    if found:
        return found
    sandbox = f"; the sandbox works on this machine (by {client.sandbox})" if client.sandbox else ""
    return ok(f"{kinds}: the server starts{sandbox}")


def _try_functions(job: PlannedJob, client: RewardClient) -> Finding | None:
    """What is wrong with the user's functions on an empty response to a prompt of the first step; None: nothing."""
    from tlt_hpc.data.prompts import open_prompts
    from tlt_hpc.models.tokenizer import load_tokenizer, read_chat_format
    from tlt_hpc.rewards.answer import Failure
    from tlt_hpc.rewards.scorer import Judge

    judge = Judge(job.config.reward, client)
    try:
        tokenizer, chat = load_tokenizer(job.model_folder), read_chat_format(job.model_folder)
        prompts = open_prompts(job.config, tokenizer, chat).draw_step_prompts(0)
    except (ValueError, Skip):  # the checks of model and data say so
        return None
    prompt = min(prompts, key=lambda prompt: not is_function(judge.kind_of(prompt)))  # for which all are called
    if not is_function(judge.kind_of(prompt)) and not job.config.reward.added_functions:
        return None
    number, end = client.submit(judge.make_answer(prompt, "")), time.monotonic() + JUDGE_SECONDS
    while (verdict := client.take_ready_verdicts().get(number)) is None:
        if time.monotonic() > end:
            limit = f"make it faster; a run waits up to {job.config.reward.wall_seconds:g} s for a response"
            return warning(f"a reward function took more than {JUDGE_SECONDS:g} s for an empty response", limit)
        time.sleep(0.02)
    if not verdict.failure or verdict.failure is Failure.UNREADABLE:  # the check of the data says so
        return None
    remedy = "let it return a number for every text; a response that it fails on has reward 0"
    return warning(f"a reward function failed for an empty response: {verdict.detail}", remedy)


def check_drafter(job: PlannedJob) -> Finding:
    """The drafter that the run begins with exists and is of this model; its strategies are valid."""
    from tlt_hpc.models.drafter_file import read_drafter_of_init
    from tlt_hpc.plan.inputs import check_strategies

    config = job.config
    check_strategies(config.speculation)
    if not config.speculation.has_drafter:
        return ok(f"none: speculation.mode = {config.speculation.mode!r}")
    if config.drafter.init != "random":
        read_drafter_of_init(config.drafter.init, config.drafter.form, job.shape, job.model_folder)
    return ok(f"{config.drafter.form} from {config.drafter.init!r}")


def check_trackers(job: PlannedJob) -> Finding:
    """The packages of the configured trackers are installed."""
    run = job.config.run
    run.check_trackers()
    if "wandb" in run.trackers:
        return warning(
            "run.trackers has 'wandb', which needs a network on rank 0's node; compute nodes usually have none",
            "use 'wandb-offline' and wandb sync",
        )
    return ok(", ".join(run.trackers) or "none configured")


# --- what --fix does ---


def download_model(model_id: str, folder: Path) -> None:
    """Download a model's repository from the hub into a folder; an interrupted download is resumed.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: no network, no such repository, or no permission to read it.
        ValueError: not the name of a repository.
    """
    import httpx
    from huggingface_hub import snapshot_download

    try:
        with redirect_stderr(sys.__stderr__):  # its progress bars use escape sequences
            snapshot_download(model_id, local_dir=folder, allow_patterns=_PATTERNS)
    except httpx.HTTPError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def download_missing_model(model: ModelSection, model_id: str) -> Finding:
    """Download the model if it is not there."""
    folder = Path(model.path)
    if str(folder) == EMBEDDED_MODEL or (folder / "config.json").is_file():
        return ok(f"{folder} is there")
    if not model_id:
        return warning(f"{folder} does not exist, and no model to download was given", "give --model-id OWNER/NAME")
    try:
        download_model(model_id, folder)
    except (OSError, ValueError) as error:
        return failure(
            f"could not fetch {model_id!r}: {_first_line(error)}",
            f"give --model-id as OWNER/NAME; else fetch it where there is internet: hf download {model_id} --local-dir "
            f"{shlex.quote(str(folder))}; for a model with terms accept them, set HF_TOKEN and unset HF_HUB_OFFLINE",
        )
    return ok(f"fetched {model_id} to {folder}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
