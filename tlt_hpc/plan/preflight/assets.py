"""Whether what a job reads is here, and whole: model, tokenizer, templates, data, judges, drafter, trackers."""

from __future__ import annotations

from tlt_hpc.config import (
    EMBEDDED_TASK,
    ConfigError,
    check_learns,
    check_ranks,
    check_resumable,
)
from tlt_hpc.mpi.owner import find_at_work
from tlt_hpc.plan.preflight.machine import size
from tlt_hpc.plan.preflight.subject import Subject
from tlt_hpc.plan.preflight.verdict import Finding, Skip, failure, failure_of, ok, warning
from tlt_hpc.storage.folder import RunFolder

JUDGE_SECONDS = 60.0
"""Until what judges responses is ready: importing math-verify and the user's own function takes a few."""


def check_run(subject: Subject) -> Finding:
    """A run that is there already is one that this configuration may go on with."""
    config = subject.config
    saved = RunFolder(config.folder).config
    if not saved.exists():
        return ok(f"a new one, {config.folder}")
    check_resumable(saved, config)
    if name := find_at_work(RunFolder(config.folder).status):
        return warning(
            f"{config.folder}: a start of this run is at work there ({name}), and a second one ends itself",
            "wait for it, end it, or give this one another run.name",
        )
    return ok(f"{config.folder} is there, and goes on")


def check_ranks_fit(subject: Subject) -> Finding:
    """The samples, the heads and the replicas can be dealt over the ranks."""
    config, num_ranks = subject.config, subject.num_ranks
    check_learns(config)
    check_ranks(config, num_ranks)
    parallel, gpus = config.rollout.tensor_parallel, subject.request.gpus_per_node
    if subject.ranks_per_node % parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {parallel} with {subject.ranks_per_node} ranks a node: a replica would lie on "
            f"several nodes; use a multiple of {parallel} ranks a node"
        )
    if gpus and subject.ranks_per_node != gpus:
        return warning(
            f"{subject.ranks_per_node} ranks and {gpus} GPUs a node: one rank a GPU is what the program is made for",
            f"use --ranks-per-node={gpus}",
        )
    nodes = subject.request.nodes
    return ok(
        f"{num_ranks} on one node" if nodes == 1 else f"{num_ranks}, {subject.ranks_per_node} on each of {nodes} nodes"
    )


def check_model(subject: Subject) -> Finding:
    """The folder, its sizes, and every file of weights, which is opened and not read."""
    from tlt_hpc.models.shape import read_shape
    from tlt_hpc.models.tokenizer import find_model
    from tlt_hpc.plan.inputs import check_files
    from tlt_hpc.plan.shape_checks import check_shape

    config = subject.config
    try:
        folder = find_model(config.model.path)
    except ValueError as error:
        absent = failure_of(error)
        return failure(absent.found, f"{absent.remedy}; --fix --model-id OWNER/NAME downloads it")
    shape = read_shape(folder)
    check_files(folder, shape)
    check_shape(config, shape, subject.num_ranks)
    files = [path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern)]
    num_bytes = sum(path.stat().st_size for path in files)
    return ok(f"{config.model.path}: {shape.family}, {shape.num_parameters / 1e6:,.1f} M parameters, {len(files)} "
              f"file{'s' * (len(files) != 1)} of weights, {size(num_bytes)}")  # fmt: skip


def check_tokenizer(subject: Subject) -> Finding:
    """It is there, and knows no token that the model does not have."""
    from tlt_hpc.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(subject.model_folder)
    most = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if most > subject.shape.vocab_size:
        return warning(
            f"the tokenizer has {most} tokens and the model {subject.shape.vocab_size}: it may be another model's",
            "take the model's own tokenizer.json",
        )
    return ok(f"{most} tokens")


def check_template(subject: Subject) -> Finding:
    """The chat template compiles; a set of prompts that needs one and has none is the data's failure."""
    from tlt_hpc.data.chat import read_template
    from tlt_hpc.models.tokenizer import read_chat_format

    if subject.config.data.source == EMBEDDED_TASK:
        return ok("none needed: the embedded task has no chats")
    given = subject.config.data.chat_template
    if read_template(subject.config.data, read_chat_format(subject.model_folder)) is None:
        return ok("none in the model folder; prompts that are lists of messages would need one")
    return ok("the model folder's" if given == "auto" else given)


def check_data(subject: Subject) -> Finding:
    """The files are there, have the columns, and the first 10,000 rows drawn can be used."""
    from tlt_hpc.data.prompts import open_prompts, open_reader
    from tlt_hpc.models.tokenizer import read_chat_format

    data = subject.config.data
    if data.source == EMBEDDED_TASK:
        open_prompts(subject.config, subject.tokenizer, read_chat_format(subject.model_folder))
        return ok(f"{EMBEDDED_TASK}, made as it goes")
    try:
        tokenizer, chat = subject.tokenizer, read_chat_format(subject.model_folder)
    except Skip as reason:  # what can be said without one
        rows = len(open_reader(data.model_copy(update={"chat_template": "auto"}), subject.config.run.seed, None))
        raise Skip(f"{data.source_name} has {rows:,} rows; they cannot be held against the model: {reason}") from None
    prompts = open_prompts(subject.config, tokenizer, chat)
    rows = len(open_reader(data, subject.config.run.seed, tokenizer, chat))
    found = f"{data.source_name}: {rows:,} rows, the first drawn can be used"
    return warning(prompts.warning, "see tlt data inspect") if prompts.warning else ok(found)


def check_evaluation(subject: Subject) -> Finding:
    """The data sets that are evaluated between steps, where there are any."""
    if not subject.config.evaluation.every_steps:
        return ok("none between the steps")
    try:
        from tlt_hpc.plan.inputs import open_checked_sets
    except RuntimeError:  # mpi4py's, where it finds no library; the check of that says so
        raise Skip("evaluation cannot be loaded without an MPI library") from None
    folder = subject.model_folder
    open_checked_sets(subject.config, folder, subject.shape, subject.tokenizer)
    return ok(f"every {subject.config.evaluation.every_steps} steps; its data can be used")


def check_rewards(subject: Subject) -> Finding:
    """What judges responses starts here as it does in a job: the user's function is imported, the sandbox is made."""
    from tlt_hpc.rewards.client import RewardClient
    from tlt_hpc.rewards.functions import check_function
    from tlt_hpc.rewards.judge import needs_worker
    from tlt_hpc.rewards.standing import settings_of

    reward = subject.config.reward
    settings = settings_of(reward)
    if reward.function:
        check_function(reward.function)
    if not any(needs_worker(kind, settings) for kind in settings.kinds):
        return ok(f"{', '.join(settings.kinds)}; judged in the ranks")
    client = RewardClient(settings)
    try:
        client.wait_until_ready(JUDGE_SECONDS)
    finally:
        client.close()
    here = "; the sandbox works on this machine" if "code" in settings.kinds else ""
    return ok(f"{', '.join(settings.kinds)}{f' {reward.function}' if reward.function else ''}: its server starts{here}")


def check_drafter(subject: Subject) -> Finding:
    """The drafter that the run begins with is there, and this model's; its strategies can be."""
    from tlt_hpc.models.drafter_file import initial_drafter
    from tlt_hpc.plan.shape_checks import check_strategies

    config = subject.config
    check_strategies(config)
    if config.speculation.mode != "full":
        return ok(f"none: speculation.mode = {config.speculation.mode!r}")
    if config.drafter.init != "random":
        initial_drafter(config.drafter.init, config.drafter.form, subject.shape)
    return ok(f"{config.drafter.form} from {config.drafter.init!r}")


def check_trackers(subject: Subject) -> Finding:
    """The packages of the trackers that are asked for are installed."""
    from tlt_hpc.config.tracking import asked_for, check_installed

    tracking = subject.config.tracking
    check_installed(tracking)
    if tracking.wandb == "online":
        return warning(
            "tracking.wandb = 'online' needs a network on rank 0's node, which compute nodes mostly have not",
            "use tracking.wandb = 'offline' and wandb sync",
        )
    return ok(", ".join(asked_for(tracking)) or "none asked for")
