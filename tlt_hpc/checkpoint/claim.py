"""Claims a run's folder at its start: one start, one configuration and the same data on all ranks, or none."""

from __future__ import annotations

from hashlib import sha256
from uuid import uuid4

from tlt_hpc.checkpoint.policy_weights import start_facts
from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.cluster.watch.record import warn_of_last
from tlt_hpc.config import Config, ConfigError, check_resumable, to_toml
from tlt_hpc.data.claim import claim_data
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder, hidden_files, writing_beside
from tlt_hpc.storage.records import Environment, add_environment


def claim_folder(
    folder: RunFolder,
    config: Config,
    world: World,
    prompts: PromptSource | None = None,
    environment: Environment | None = None,
) -> None:
    """Save configuration and fingerprints of the data with the run, or check them against what is there; collective.

    ``environment``: on rank 0, what is to be noted of this start.

    Raises:
        UserError: on all ranks, where the folder holds a run of another configuration, cannot be written, or is not
            seen by all of them.
    """
    probe = folder.path / f"shared-{uuid4().hex}"

    def write_claim() -> tuple[str, str]:
        check_resumable(folder.config, config)
        folder.create()
        claim_owner(folder.status, BEAT.start)
        warn_of_last(folder.status, BEAT.start)
        with writing_beside(folder.config) as path:
            path.write_text(to_toml(config), encoding="utf-8")
        if prompts is not None:
            claim_data(folder.path, {**prompts.fingerprints(), **start_facts(config, find_model(config.model.path))})
        if environment is not None:
            add_environment(folder.environment, environment)
        probe.touch()
        return probe.name, world.hostname

    name, writer = world.once(write_claim)
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
    drawn = [] if prompts is None else prompts.batch(0)
    digest = sha256(b"".join(prompt.tokens.tobytes() + prompt.answer.encode() for prompt in drawn)).digest()
    hidden = world.all_or_none(lambda: hidden_files(config.folder, {name}))
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
