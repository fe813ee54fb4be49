"""What is evaluated: the policy and drafter that a user names, and where the evaluation is written. Generates nothing.

A run's folder has its checkpoints, of which the newest good one is taken unless a step is named; a Hugging Face folder
has weights of its own.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.checkpoint.policy_weights import policy_readers
from tlt_hpc.checkpoint.store import CheckpointStore, find_requested_step
from tlt_hpc.config import EMBEDDED_MODEL, Config, UserError, load_saved_config
from tlt_hpc.data.evaluation_sets import longest_response_tokens
from tlt_hpc.evaluate.folder import digest_of_samples, digest_sampled_elements, step_folder
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import DTYPES, folder_readers
from tlt_hpc.models.piece import ReadCut, read_and_broadcast_parts
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.scorer import without_reward_parts
from tlt_hpc.storage.folder import RunFolder, no_run_message

SUFFIX = "-evaluation"


@dataclass(frozen=True)
class Subject:
    """The policy to evaluate, in words and as a place."""

    place: str
    """A Hugging Face folder, or ``embedded:tiny``; the run's folder where there is one."""
    run: RunFolder | None
    step: int | None
    """Of the checkpoint that was asked for, or found."""
    out: Path | None

    @property
    def name(self) -> str:
        """The place, with the step of a run's checkpoint."""
        return self.place if self.step is None else f"{self.place}, step {self.step}"

    @property
    def reads_model_weights(self) -> bool:
        """True if the model folder's weights are read: the policy's, or those that its adapters are merged into.

        Raises:
            ConfigError: the run's configuration cannot be read.
        """
        return self.run is None or bool(load_saved_config(self.run.config).lora.rank)

    def folder(self, config: Config) -> Path:
        """The folder that the evaluation is written to."""
        if self.out is not None:
            return self.out
        if self.run is not None:
            assert self.step is not None
            return step_folder(self.run, self.step)
        name = "tiny" if self.place == EMBEDDED_MODEL else Path(self.place).resolve().name
        return Path(config.run.folder) / (config.run.name + SUFFIX) / name

    def log_file(self, config: Config) -> Path:
        """The file that lists finished evaluations, a line each."""
        place = self.run.path if self.run is not None and self.out is None else self.folder(config).parent
        return place / "evaluations.jsonl"


def find_subject(place: str, step: int | str | None = None, out: Path | None = None) -> Subject:
    """The subject that the user names by a place, a checkpoint's step (None: the newest) and a folder to write to.

    A checkpoint is not opened yet.

    Raises:
        UserError: nothing of the kind is there, or ``out`` holds something else.
    """
    if out is not None and (out.is_file() or (out / "config.toml").exists()):
        raise UserError(f"--output {out} is a file, or the folder of a run; give a folder of its own")
    path = Path(place)
    if (path / "config.toml").is_file():
        return Subject(str(path), RunFolder(path), find_requested_step(RunFolder(path), step), out)
    if step is not None:
        raise UserError(f"--step {step}: {place} is no run's folder; leave --step out")
    if place != EMBEDDED_MODEL and not path.exists():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob("*/")], n=1)
        remedy = f"did you mean {path.parent / near[0]}?" if near else f"give a run's or a model's, or {EMBEDDED_MODEL}"
        raise UserError(f"no folder {place}", remedy)
    if place != EMBEDDED_MODEL and not (path / "config.json").is_file():
        raise UserError(
            f"{place}: neither a run's folder (config.toml) nor a model's (config.json); give one of them, or "
            f"{EMBEDDED_MODEL}; {no_run_message(path, 'config.toml')}"
        )
    return Subject(place, None, None, out)


def evaluation_config(config: Config, subject: Subject) -> Config:
    """The job's configuration with the subject's model, room for the responses, and no reward for their form.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    path = config.model.path if subject.run is not None else subject.place
    if subject.run is not None:
        theirs = load_saved_config(subject.run.config).model.path
        path = theirs if theirs == EMBEDDED_MODEL or Path(theirs).is_dir() else path
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": path}),
            "reward": without_reward_parts(config.reward),
            "rollout": config.rollout.model_copy(
                update={"max_new_tokens": longest_response_tokens(config), "top_k": 0}
            ),
        }
    )


def open_checkpoint_all_ranks(subject: Subject, world: World) -> tuple[Subject, Checkpoint | None]:
    """The checkpoint, found by one rank, and the subject with its step; None for a model's folder. Collective.

    Raises:
        UserError: on all ranks, where there is none.
    """
    if subject.run is None:
        return subject, None
    store = CheckpointStore(subject.run.checkpoints, keep=1)
    found = world.run_first_and_broadcast(
        lambda: store.open_newest() if subject.step is None else store.open_step(subject.step)
    )
    if found is None:
        raise UserError(f"{subject.run.path} has no checkpoint yet; train on until it has saved one")
    return replace(subject, step=found.step), found


def load_weights_all_ranks(
    decoder: Decoder, subject: Subject, checkpoint: Checkpoint | None, config: Config, world: World
) -> str:
    """Have the decoder read its part of each of the policy's weights; returns their fingerprint. Collective.

    They are rounded as training rounds them, though a decoder on a CPU computes with more digits.

    The first rank of each node reads each weight once. The fingerprint is one of whole weights, of which every rank
    takes an equal share: a rank that is alone on its node reads those whole, one at a time.

    Raises:
        UserError: they cannot be read, or are not those of ``config``'s folder, by which the decoder was made.
    """
    model = config.model.path
    samples, cuts, dtype = dict[str, str](), decoder.weight_cuts(), DTYPES[config.model.dtype]

    def read_parts_and_keep_samples() -> Iterator[tuple[str, Tensor]]:
        for number, (name, read) in enumerate(
            read_and_broadcast_parts(world.node_group, _weight_readers(subject, checkpoint, model))
        ):
            cut = cuts.get(name)  # None: the decoder refuses it, or has it in the embedding
            if cut is None or number % world.size != world.rank:
                yield name, read(cut).to(dtype)
            else:
                whole = read(None).to(dtype)
                cut.check(name, whole.shape)
                samples[name] = digest_sampled_elements(whole)
                yield name, whole[cut.slices]

    try:
        decoder.load_weights(read_parts_and_keep_samples(), 0, are_cut=True)
    except UserError:  # files that cannot be read, whatever they hold
        raise
    except ValueError as error:
        raise UserError(f"{subject.name} does not fit model.path = {model!r}: {error}") from None
    return digest_of_samples(ChainMap(*world.allgather(samples)), decoder.shape.tied_head)


def _weight_readers(subject: Subject, checkpoint: Checkpoint | None, model: str) -> Iterator[tuple[str, ReadCut]]:
    """The policy's weights under their Hugging Face names, each to be read before the next is asked for."""
    if checkpoint is None or subject.run is None:
        yield from folder_readers(find_model(subject.place))
    else:
        config = load_saved_config(subject.run.config)
        yield from policy_readers(subject.run, config, checkpoint, find_model(model))
