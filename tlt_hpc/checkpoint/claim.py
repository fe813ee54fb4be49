"""Claims a run's folder at its start: one start, one configuration and the same data on all ranks, or none."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.cluster.watch.record import warn_and_clear_last_end
from tlt_hpc.config import Config, ConfigError, check_resumable, to_toml
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.models.weight_files import weight_files, weights_digest
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder, wait_for_listed_files, writing_atomically
from tlt_hpc.storage.records import Environment, add_environment, read_record, write_json

MODEL = "model.path"
"""The key of a model's digest among a run's facts."""


def claim_run_folder_all_ranks(
    folder: RunFolder,
    config: Config,
    world: World,
    prompts: PromptSource | None = None,
    environment: Environment | None = None,
) -> None:
    """Collective. Save configuration and fingerprints of the data with the run, or compare them with the saved ones.

    ``environment``: on rank 0, what is to be noted of this start.

    Raises:
        UserError: on all ranks, where the folder holds a run of another configuration, cannot be written, or is not
            seen by all of them.
    """
    probe = folder.path / f"shared-{uuid4().hex}"

    def write_claim() -> tuple[str, str]:
        check_resumable(folder.config, config)
        folder.make_missing_folders()
        claim_owner(folder.status, BEAT.start_name)
        warn_and_clear_last_end(folder.status, BEAT.start_name)
        with writing_atomically(folder.config) as path:
            path.write_text(to_toml(config), encoding="utf-8")
        if prompts is not None:
            check_and_write_fingerprints(
                folder.path,
                {**prompts.fingerprints(), **digest_base_model(config, find_model(config.model.path))},
            )
        if environment is not None:
            add_environment(folder.environment, environment)
        probe.touch()
        return probe.name, world.hostname

    name, writer = world.run_first_and_broadcast(write_claim)
    try:
        _check_ranks_agree(config, name, writer, prompts, world)
    finally:
        if world.rank == 0:
            probe.unlink(missing_ok=True)
    BEAT.folder = folder.status


def _check_ranks_agree(config: Config, name: str, writer: str, prompts: PromptSource | None, world: World) -> None:
    """Refuse a folder in which a rank does not find the file that rank 0 wrote, and data that differs between nodes.

    A save would otherwise wait for ever, and ranks would generate, and score, different prompts as one.
    """
    drawn = [] if prompts is None else prompts.draw_step_prompts(0)
    digest = sha256(b"".join(prompt.tokens.tobytes() + prompt.answer.encode() for prompt in drawn)).digest()
    hidden = world.run_on_all_ranks(lambda: wait_for_listed_files(config.folder, {name}))
    seen = world.allgather((world.hostname, not hidden, digest))
    for rank, (hostname, is_there, found) in enumerate(seen):
        if not is_there:
            raise ConfigError(
                f"run.folder = {config.run.folder!r}: rank {rank} on {hostname} does not see what rank 0 on "
                f"{writer} wrote there; use a folder that all nodes share"
            )
        if found != seen[0][2]:
            raise ConfigError(
                f"data.source: rank {rank} on {hostname} draws other prompts than rank 0 on {seen[0][0]}; "
                "give all nodes the same files"
            )


FILE = "data.json"


def check_and_write_fingerprints(folder: Path, facts: Mapping[str, str]) -> None:
    """Compare the fingerprints ``facts`` with those in a run's folder, then write them.

    Raises:
        UserError: they differ, or the file is damaged or cannot be written.
    """
    path = folder / FILE
    old = read_record(path, dict[str, str], "remove it to resume with the data as it is now") or {}
    for key in sorted(set(old) & set(facts)):
        # Once prompts were left out, they stay left out: otherwise draws would shift. The other way nothing shifts.
        if old[key] != facts[key] and (key, facts[key]) != ("data.overlong", "drop"):
            if key == MODEL:
                raise ConfigError(
                    f"{folder} holds a run that began with other files of its model, which it still needs (as the "
                    "reference, or below its adapters); restore them or give another run.name"
                )
            why = "prompts that it left out would shift all draws: " if key == "data.overlong" else ""
            raise ConfigError(
                f"{folder} holds a run whose {key} was another ({old[key][:12]} then, {facts[key][:12]} now); "
                f"{why}restore it or give another run.name"
            )
    write_json(path, dict(facts))


def digest_base_model(config: Config, model: Path) -> dict[str, str]:
    """Facts of the model that a run begins with, by name; none where its checkpoints hold all that it needs of it.

    Adapters are merged into that model, and it is the reference that a divergence is measured from: with another one a
    resumed run would learn something else, without a word.

    Raises:
        ValueError: a file of weights is missing, or cannot be read.
    """
    if config.lora.rank:
        weight_files(model)  # refuses what transformers alone can read, which adapters could not be merged into
    return {MODEL: weights_digest(model)} if config.lora.rank or config.algorithm.kl_coefficient else {}
