"""The HDF5 rollout cache that the drafter trains from: one rank's view of it over the steps, bounded in bytes.

Independent of drafters and ranks' states. One file per rank and step; only its writer reads it while it is open. The
cache can be made again, so a file is renamed at the release without waiting for the disk: after a power failure a
file may be damaged, which its checksums show.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.feature_writer import FeatureCacheWriter, OpenDocuments
from tlt_hpc.storage.folder import RunFolder, WriteError, rank_of
from tlt_hpc.storage.hdf5 import DamagedFile

_log = logging.getLogger(__name__)
_LONG_SECONDS = 0.05
"""Waiting for the disk in one step, from which on the user is warned."""


class FeatureCache:
    """One rank's view of the cache over the steps: its open file, everybody's closed ones, and what to drop.

    A rank owns the files of its own number and those that an earlier run with more ranks left (rank q's belong to rank
    q % num_ranks); it never changes another rank's.

    Own files do not take more than ``max_bytes`` of disk, at any moment.
    While step s is rolled out there are its open file and the closed one of step s - 1, half of the bytes each: files
    of earlier steps are removed as step s begins; inside a step the shortest responses are evicted (``Retention``).
    """

    def __init__(
        self, folder: RunFolder, rank: int, num_layers: int, hidden_size: int, max_bytes: int, num_ranks: int
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._shape, self._max_bytes = (num_layers, hidden_size), max_bytes
        self._writer: FeatureCacheWriter | None = None
        self._step = -1
        self._unusable: set[Path] = set()
        self._has_warned = False

    def begin_step(self, step: int, weight_version: int) -> FeatureCacheWriter:
        """Open this rank's file of a step; own files except those of the step before are removed.

        Raises:
            WriteError: the disk refused.
        """
        assert self._writer is None, "the step before has ended"
        self._step = step
        self._unusable.clear()
        try:
            self._delete_old_files(step)
        except OSError as error:
            raise WriteError(self._folder.cache, error) from error
        path = self._folder.feature_cache(step, self._rank)
        self._writer = FeatureCacheWriter(path, *self._shape, step, weight_version, self._max_bytes // 2)
        return self._writer

    def _delete_old_files(self, step: int) -> None:
        room = self._max_bytes // 2
        for other in self._folder.cache_steps():
            for path in filter(self._owns, self._folder.feature_caches(other)):
                size = path.stat().st_size
                if other == step - 1 and size <= room:
                    room -= size  # of several, this rank's first: the rest was inherited
                else:
                    path.unlink()
            if other not in (step - 1, step):  # another rank may have made this step's folder and no file in it yet
                self._folder.remove_cache_step(other)

    def set_previous_step(self, step: int) -> bool:
        """Make a completed step the one that ``previous_step_files`` lists; False if none of its files is visible."""
        assert self._writer is None, "the step before has ended"
        self._step = step + 1
        return bool(self.previous_step_files())

    def end_step(self, durable: bool = False) -> None:
        """Close and rename the open file, if there is one; most of it is on disk by now.

        Args:
            durable: wait until it would outlive the machine, too.

        Raises:
            WriteError: the disk refused; the step's file is not published.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close(durable)
            self._warn_about_file(writer)

    def abandon_step(self) -> None:
        """Drop the open file, if there is one, unpublished (the run stops inside a rollout, or fails)."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.abandon()

    def append(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> None:
        """``FeatureCacheWriter.append`` to the open file; if the disk refuses, the file ends, not the run."""
        if self._writer is not None:
            with self.tolerating_write_errors():
                self._writer.append(tokens, prompt_length, features, first)

    @contextmanager
    def tolerating_write_errors(self) -> Iterator[None]:
        """Continue without the step's file if the disk refuses it inside: the cache is never worth a run."""
        try:
            yield
        except WriteError as error:
            self.drop_file_with_warning(error)

    def drop_file_with_warning(self, error: WriteError) -> None:
        """Drop the step's file, with a warning; the next step tries again."""
        self.abandon_step()
        text = (
            "%s; step %d continues without this rank's features for the drafter; make room there, lower "
            "drafter.cache_bytes = %d, or set drafter.cache_folder to another file system"
        )
        _log.warning(text, error.fact, self._step + 1, self._max_bytes)

    def own_documents(self) -> OpenDocuments:
        """This step's documents so far, from the own open file; none if it was given up."""
        return OpenDocuments(self._writer)

    def previous_step_files(self) -> list[Path]:
        """Closed files of the step before this one that this rank can see, own ones first, then by rank.

        Those that ``open_file`` found unusable are left out.
        """
        usable = [path for path in self._folder.feature_caches(self._step - 1) if path not in self._unusable]
        return sorted(usable, key=lambda path: not self._owns(path))

    def open_file(self, path: Path) -> FeatureCacheReader | None:
        """A closed file; None, with one warning, if it is damaged or of another feature shape, or gone."""
        try:
            reader = FeatureCacheReader(path)
        except FileNotFoundError:  # its owner dropped it between the listing and now
            return None
        except DamagedFile as error:
            self._mark_unusable(path, str(error))
            return None
        if reader.shape != self._shape:
            reader.close()
            self._mark_unusable(path, f"{path}: features [layer, hidden] = {reader.shape}, this run has {self._shape}")
            return None
        return reader

    def remove_parts(self) -> None:
        """Remove the own files that an earlier start left half-written."""
        for path in self._folder.cache_parts():
            if self._owns(path):
                path.unlink()

    def _owns(self, path: Path) -> bool:
        return rank_of(path) % self._num_ranks == self._rank

    def _mark_unusable(self, path: Path, reason: str) -> None:
        _log.warning("%s; it is not used", reason)
        self._unusable.add(path)

    def _warn_about_file(self, writer: FeatureCacheWriter) -> None:
        """Warn, once in a run, of what a step's file lacks and of the time that it took."""
        troubles = []
        if writer.kept.num_evicted:
            troubles.append(
                f"no room for {writer.kept.num_evicted} responses, the shortest, of {writer.num_appended}; raise "
                f"drafter.cache_bytes = {self._max_bytes} to keep all"
            )
        if writer.waited_seconds > _LONG_SECONDS:
            troubles.append(
                f"decoding waited {writer.waited_seconds:.2f} s for the disk; give a faster one as drafter.cache_folder"
            )
        for trouble in troubles if not self._has_warned else ():
            _log.warning("%s: %s", writer.path, trouble)
        self._has_warned |= bool(troubles)
