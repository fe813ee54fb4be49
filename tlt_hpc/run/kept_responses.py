"""The finished responses of a step in progress: written as they come, and used by the next start.

They are worth a minute of the machine each, and a step has them long before its update is over and its log written.
A response is the same whenever it is generated, so a step that begins with some of them ends as it would have. They
belong to the weights that made them, which are named by the line of the step before in ``metrics.jsonl``, or at the
start by the model's files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np

from tlt_hpc.common.files import sampled_digest
from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.config import Config, ModelSection
from tlt_hpc.look.metrics import PROBS_DIFF, SCORE, TRAINED_TOKENS
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder, WriteError
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_kept_responses, write_kept_responses
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

_NAMING = (SCORE, TRAINED_TOKENS, PROBS_DIFF, "timing_s/gen")
"""What of a step's line names the weights after it; the clock's share tells a step from its repetition."""


EVERY_SECONDS = 300.0
"""Interval at which finished responses are written in a rollout, beside its end."""


class Keeper:
    """Writes what this rank has finished of one step.

    If the disk refuses, nothing more of the step is kept, with a warning: a kill then costs the whole step.
    """

    def __init__(self, folder: RunFolder, step: int, rank: int, origin: str) -> None:
        self._folder, self._step, self._rank, self._origin = folder, step, rank, origin
        self._num_kept = 0
        self._written_at = time.monotonic()
        self._is_open = True

    def count_as_written(self, count: int) -> None:
        """Count the next ``count`` finished responses as written: they are on disk already."""
        self._num_kept += count

    def is_due(self, finished: Sequence[Rollout]) -> bool:
        """Return True if it is time to write again, and there is something to write."""
        is_time = time.monotonic() - self._written_at >= EVERY_SECONDS
        return self._is_open and is_time and len(finished) > self._num_kept

    def write_new_responses(self, finished: Sequence[Rollout], durable: bool = False) -> None:
        """Write what has been finished since the last time, to a file of its own.

        Args:
            finished: all of the step so far, in the order in which they ended.
            durable: wait until it would outlive the machine, too.
        """
        new = sorted(finished[self._num_kept :], key=lambda rollout: rollout.key)
        if not self._is_open or not new:
            return
        try:
            write_kept_responses(
                self._folder.next_kept_responses_path(self._step, self._rank), self._origin, new, durable
            )
        except WriteError as error:
            logger.warning("step %d: finished responses are not kept until it ends: %s", self._step + 1, error.fact)
            self._is_open = False
        self._num_kept, self._written_at = len(finished), time.monotonic()


def open_keeper_all_ranks(
    config: Config, folder: RunFolder, world: World, step: int
) -> tuple[Keeper, dict[SampleKey, Rollout]]:
    """Collective. Open the keeper of this rank's responses of the step, and read all ranks' of earlier starts."""
    origin, paths = world.run_first_and_broadcast(
        lambda: (read_weights_origin(config.model, folder, step), folder.kept_responses_paths(step))
    )
    keeper = Keeper(folder, step, world.rank, origin)
    if not paths:
        return keeper, {}
    # sharded over the ranks, however many wrote them
    files = [file for path in paths[world.rank :: world.size] if (file := _read_kept_or_warn(path)) is not None]
    every = [file for files in world.allgather(files) for file in files]
    return keeper, {rollout.key: rollout for found, rollouts in every if found == origin for rollout in rollouts}


def find_excluded_token_text(rollouts: Iterable[Rollout], excluded: Sequence[int]) -> str:
    """The first token of a stored response that is never sampled now, in words; empty: there is none.

    The update gives such a token no probability: one would make its loss, and the gradient, useless.
    """
    for rollout in rollouts:
        found = rollout.response_tokens[np.isin(rollout.response_tokens, excluded)]
        if found.size:
            return f"a response of step {rollout.key.step + 1} with the token id {found[0]}, which is never sampled now"
    return ""


def describe_progress(config: Config) -> str:
    """Return a run's progress in words: the committed steps, and the size of the responses kept of the step after
    them. For rank 0."""
    folder = RunFolder(config.folder)
    step = max(read_lines(folder.metrics), default=-1) + 1
    num_bytes = sum(path.stat().st_size for path in folder.kept_responses_paths(step))
    return f"step {step} and {num_bytes} bytes of the next one's responses"


def _read_kept_or_warn(path: Path) -> tuple[str, tuple[Rollout, ...]] | None:
    try:
        return read_kept_responses(path)
    except (DamagedFile, OSError) as error:
        logger.warning("%s; its responses are generated again", error)
        return None


def read_weights_origin(model: ModelSection, folder: RunFolder, step: int) -> str:
    """Names the weights that a step's responses are made with; a new name if their line is lost."""
    if step == 0:
        return digest_folder_weights(find_model(model.path))
    line = read_lines(folder.metrics, step - 1).get(step - 1)
    return uuid4().hex if line is None else weights_origin_of_line(line)


def weights_origin_of_line(line: Line) -> str:
    """Names the weights after the step that a line commits."""
    return hashlib.sha256(json.dumps([line.get(name) for name in _NAMING]).encode()).hexdigest()[:32]


def digest_folder_weights(model: Path) -> str:
    """Names the weights of a model's folder."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.bin")])
    named = [(file.name, sampled_digest(file)) for file in files]
    return hashlib.sha256(repr(named).encode()).hexdigest()[:32]


def remove_kept_responses(folder: RunFolder) -> None:
    """Remove all that is kept, once its step has been committed. For one rank.

    What cannot be removed is of other weights from now on, and is not used.
    """
    shutil.rmtree(folder.kept, ignore_errors=True)
    if folder.kept.exists():
        logger.warning("cannot remove all of %s, which is of no use any more", folder.kept)
