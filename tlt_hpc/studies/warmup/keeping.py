"""What a warm-up leaves on disk: the best drafter with its facts, and where the training stands."""

from __future__ import annotations

from functools import partial

from safetensors.torch import save_file

from tlt_hpc.models.drafter_file import DRAFTER_FILE
from tlt_hpc.models.once import read_once
from tlt_hpc.storage.drafter_facts import DrafterFacts, write_facts
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.studies.warmup.parts import Parts
from tlt_hpc.studies.warmup.plan import VALIDATION
from tlt_hpc.studies.warmup.progress import Progress, from_json, to_json
from tlt_hpc.studies.warmup.shelf import Shelf

_TRAINING = (".trained", ".exp_avg", ".exp_avg_sq")


def keep_drafter(parts: Parts) -> None:
    """Write the drafter, without what only training needs, where ``drafter.init`` finds it.

    Raises:
        WriteError: the disk refused; the one before stays.
    """
    state = {name: tensor for name, tensor in parts.trainer.state().items() if not name.endswith(_TRAINING)}
    with writing_beside(parts.drafter / DRAFTER_FILE) as path:
        save_file(state, path)


def keep_facts(parts: Parts, shelf: Shelf, progress: Progress) -> None:
    """Write what is on record of the kept drafter.

    Raises:
        WriteError: the disk refused.
    """
    config, best = parts.config, progress.best
    assert best is not None, "validated once"
    facts = DrafterFacts(
        target=config.model.path,
        data=", ".join(config.warmup.sources) or config.data.source_name,
        init=config.warmup.init,
        num_responses=len(shelf),
        num_tokens=sum(shelf.lengths),
        num_updates=best.updates,
        learning_rate=config.warmup.learning_rate,
        batch_tokens=config.warmup.batch_tokens,
        accept_length=best.accept_length,
        strategy=VALIDATION.name,
        temperature=config.rollout.temperature,
        num_validation_prompts=len(parts.texts.held_out),
        num_ranks=parts.world.size,
        curve=progress.curve,
    )
    write_facts(parts.drafter, facts)


def save(parts: Parts, progress: Progress) -> None:
    """Save what the next update needs; collective.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    shards = {"drafter": parts.trainer.state()} if parts.world.rank == 0 else {}
    # a save under a number that is taken is left out, and a validation changes the state too
    number = progress.updates + len(progress.curve)
    parts.saves.save(number, parts.world, shards, {"progress": to_json(progress)})


def resume(parts: Parts) -> Progress:
    """Take up the newest save, where there is one; collective.

    Raises:
        CheckpointError: there are saves, and none is good.
    """
    saved = parts.world.once(parts.saves.newest)
    if saved is None:
        return Progress()
    node, names = parts.world.node_group, saved.names("drafter")
    parts.trainer.load_state({name: read_once(node, partial(saved.read, "drafter", name)) for name in names})
    return from_json(saved.state["progress"])
