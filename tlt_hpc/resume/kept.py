"""The finished responses of a step that is under way: written as they come, taken up by the next start.

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
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from tlt_hpc.checkpoint.manifest import digest_of
from tlt_hpc.checkpoint.save import found_in
from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.config import Config
from tlt_hpc.look.metrics import PROBS_DIFF, SCORE, TRAINED_TOKENS
from tlt_hpc.models.folder import find_model
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder, WriteError
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.kept_responses import KeptFile, count_kept, merged, read_kept, write_kept
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

_NAMING = (SCORE, TRAINED_TOKENS, PROBS_DIFF, "timing_s/gen")
"""What of a step's line names the weights after it; the clock's share tells a step from its repetition."""


class Keeper:
    """Writes what this rank has finished of one step.

    Where the disk refuses, nothing more of the step is kept, which is warned of: a kill then costs the whole step.
    """

    def __init__(self, folder: RunFolder, step: int, rank: int, origin: str, every_seconds: float) -> None:
        self._folder, self._step, self._rank, self._origin = folder, step, rank, origin
        self._every_seconds = every_seconds
        self._num_kept = 0
        self._written_at = time.monotonic()
        self._is_open = True

    def skip(self, count: int) -> None:
        """The next so many of what is finished are on disk already; what came before them has been kept."""
        self._num_kept += count

    def is_due(self, finished: Sequence[Rollout]) -> bool:
        """Whether it is time to write again, and there is something to write."""
        return (
            self._is_open
            and bool(self._every_seconds)
            and len(finished) > self._num_kept
            and time.monotonic() - self._written_at >= self._every_seconds
        )

    def keep(self, finished: Sequence[Rollout], durable: bool = False) -> None:
        """Write what has been finished since the last time, to a file of its own.

        Args:
            finished: all of the step so far, in the order in which they ended.
            durable: wait until it would outlive the machine, too.
        """
        new = sorted(finished[self._num_kept :], key=lambda rollout: rollout.key)
        if not self._is_open or not new:
            return
        path = self._folder.next_kept_part(self._step, self._rank)
        try:
            write_kept(path, KeptFile(self._origin, tuple(new)), durable)
        except WriteError as error:
            logger.warning("step %d: finished responses are not kept until it ends: %s", self._step, error.fact)
            self._is_open = False
        self._num_kept, self._written_at = len(finished), time.monotonic()


def open_keeper(config: Config, folder: RunFolder, world: World, step: int) -> tuple[Keeper, dict[SampleKey, Rollout]]:
    """What keeps this rank's responses of the step, and all ranks' of an earlier start; collective."""
    origin, paths = world.once(lambda: (find_origin(config, folder, step), folder.kept_parts(step)))
    keeper = Keeper(folder, step, world.rank, origin, config.checkpoint.keep_responses_seconds)
    if not paths:
        return keeper, {}
    # sharded over the ranks, however many wrote them
    files = [file for path in paths[world.rank :: world.size] if (file := _read(path)) is not None]
    every = [file for files in world.allgather(files) for file in files]
    foreign = sum(file.origin != origin for file in every)
    if foreign and world.rank == 0:
        logger.warning(
            "%d files of kept responses of step %d are of other weights than the run's, and are not used",
            foreign, step,
        )  # fmt: skip
    return keeper, {rollout.key: rollout for rollout in merged(every, origin)}


def describe_progress(config: Config) -> str:
    """How far a run has come, in words: the steps that its next start has no more to do, and what it takes up of the
    step after them. Kept responses of other weights, or in damaged files, are none of it. For rank 0."""
    folder = RunFolder(config.folder)
    step = max(read_lines(folder.metrics), default=-1) + 1
    if not config.checkpoint.replay:  # begins from a checkpoint, whatever was done after it
        step = max((saved for saved, _ in found_in(folder.checkpoints)), default=0)
    counted = [_count(path) for path in folder.kept_parts(step)]
    own = find_origin(config, folder, step) if counted else ""
    return f"step {step} and {sum(count for origin, count in counted if origin == own)} of the next one's responses"


def _count(path: Path) -> tuple[str, int]:
    try:
        return count_kept(path)
    except (DamagedFile, OSError):  # named by the start that meets it
        return "", 0


def _read(path: Path) -> KeptFile | None:
    try:
        return read_kept(path)
    except (DamagedFile, OSError) as error:
        logger.warning("%s; its responses are generated again", error)
        return None


def find_origin(config: Config, folder: RunFolder, step: int) -> str:
    """Names the weights that a step's responses are made with; where their line is lost, like no others."""
    if step == 0:
        return origin_of_start(find_model(config.model.path))
    line = read_lines(folder.metrics).get(step - 1)
    return uuid4().hex if line is None else origin_of(line)


def origin_of(line: Line) -> str:
    """Names the weights after the step that a line commits."""
    return hashlib.sha256(json.dumps([line.get(name) for name in _NAMING]).encode()).hexdigest()[:32]


def origin_of_start(model: Path) -> str:
    """Names the weights of a model's folder."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.bin")])
    named = [(file.name, digest_of(file)) for file in files]
    return hashlib.sha256(repr(named).encode()).hexdigest()[:32]


def drop_kept(folder: RunFolder) -> None:
    """Remove all that is kept: a step has been committed, so it belongs to the past. For one rank.

    What cannot be removed is of other weights from now on, and is not taken up.
    """
    if folder.kept.is_dir():
        shutil.rmtree(folder.kept, onerror=_warn)


def _warn(function: object, path: str, error: tuple[object, BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        logger.warning("cannot remove %s, which is of no use any more: %s", path, error[1])
