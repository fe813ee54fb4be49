"""The HDF5 rollout cache that the drafter trains from: one rank's view of it over the steps, bounded in bytes.

Independent of drafters and ranks' states. One file per rank and step; only its writer reads it while it is open. The
cache can be made again, so a file is renamed at the release without waiting for the disk: after a power failure a
file may be damaged, which its checksums show.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.documents import Document as Document
from tlt_hpc.storage.documents import Documents as Documents
from tlt_hpc.storage.documents import NoDocuments
from tlt_hpc.storage.feature_file import FeatureCacheReader as FeatureCacheReader
from tlt_hpc.storage.feature_writer import FeatureCacheWriter as FeatureCacheWriter
from tlt_hpc.storage.feature_writer import OpenDocuments
from tlt_hpc.storage.folder import RunFolder, WriteError, rank_of
from tlt_hpc.storage.hdf5 import DamagedFile

_log = logging.getLogger(__name__)
_LONG_SECONDS = 0.05
"""Waiting for the disk that is worth a word, in a step."""


class FeatureCache:
    """One rank's view of the cache over the steps: its open file, everybody's closed ones, and what to drop.

    A rank owns the files of its own number and, where ``num_ranks`` is given, those that an earlier run with more
    ranks left (rank q's go to rank q % num_ranks); it never touches another rank's.

    Own files do not take more than ``max_bytes`` of disk, at any moment.
    While step s is rolled out there are its open file and the closed one of step s - 1, half of the bytes each: steps
    before go first, as step s begins; inside a step the shortest responses give way (see ``Retention``).
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        num_layers: int,
        hidden_size: int,
        max_bytes: int,
        num_ranks: int | None = None,
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._shape, self._max_bytes = (num_layers, hidden_size), max_bytes
        self._writer: FeatureCacheWriter | None = None
        self._step = -1
        self._unusable: set[Path] = set()
        self._has_warned = False

    def begin_step(self, step: int, weight_version: int) -> FeatureCacheWriter:
        """Open this rank's file of a step; own files but those of the step before go.

        Raises:
            WriteError: the disk refused.
        """
        assert self._writer is None, "the step before has ended"
        self._step = step
        self._unusable.clear()
        self._drop(other for other in self._folder.cache_steps() if other not in (step - 1, step))
        self._trim(step - 1, self._max_bytes // 2)
        self._trim(step, 0)
        path = self._folder.feature_cache(step, self._rank)
        self._writer = FeatureCacheWriter(path, *self._shape, step, weight_version, self._max_bytes // 2)
        return self._writer

    def look_back(self, step: int) -> bool:
        """Read a step that is over, as the one before that is not begun yet; False where none of its files is seen."""
        assert self._writer is None, "the step before has ended"
        self._step = step + 1
        return bool(self.previous_step_files())

    def end_step(self) -> None:
        """Close and rename the open file, most of which is on disk by now; nothing where it was given up.

        Raises:
            WriteError: the disk refused; the step's file is not published.
        """
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close()
        self._report(writer)

    def abandon_step(self) -> None:
        """Drop the open file, where there is one, unpublished (the run stops inside a rollout, or fails)."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.abandon()

    def append(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> None:
        """``FeatureCacheWriter.append`` to the open file, but that a disk that refuses ends the file, not the run."""
        if self._writer is not None:
            with self.giving_up():
                self._writer.append(tokens, prompt_length, features, first)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Go without the step's file where the disk refuses it inside: it is never worth a run."""
        try:
            yield
        except WriteError as error:
            self.give_up(error)

    def give_up(self, error: WriteError) -> None:
        """Drop the step's file, with a warning; the next step tries again."""
        self.abandon_step()
        text = (
            "%s; step %d continues without this rank's features for the drafter; make room there, lower "
            "drafter.cache_bytes = %d, or set drafter.cache_folder to another file system"
        )
        _log.warning(text, error.fact, self._step, self._max_bytes)

    def own_documents(self) -> OpenDocuments | NoDocuments:
        """This step's documents so far, from the own open file; none where it was given up."""
        return NoDocuments() if self._writer is None else self._writer.documents()

    def previous_step_files(self) -> list[Path]:
        """Closed files of the step before this one that this rank can see, own ones first, then by rank.

        Those that ``open_file`` found unusable are left out.
        """
        usable = [path for path in self._folder.feature_caches(self._step - 1) if path not in self._unusable]
        return sorted(usable, key=lambda path: not self._owns(path))

    def open_file(self, path: Path) -> FeatureCacheReader | None:
        """A closed file; None, with one warning, where it is damaged or of another feature shape, or gone."""
        try:
            reader = FeatureCacheReader(path)
        except FileNotFoundError:  # its owner dropped it between the listing and now
            return None
        except DamagedFile as error:
            self._refuse(path, str(error))
            return None
        found = (reader.num_layers, reader.hidden_size)
        if found != self._shape:
            reader.close()
            self._refuse(path, f"{path}: features [layer, hidden] = {found}, this run has {self._shape}; not used")
            return None
        return reader

    def recover(self) -> int:
        """At start: delete own half-written files, warn of own damaged ones; returns how many were deleted."""
        parts = [path for path in self._folder.cache_parts() if self._owns(path)]
        for path in parts:
            path.unlink()
        for step in self._folder.cache_steps():
            for path in self._own_files(step):
                if reader := self.open_file(path):
                    reader.close()
        return len(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of own closed files on disk."""
        return sum(path.stat().st_size for step in self._folder.cache_steps() for path in self._own_files(step))

    def _owns(self, path: Path) -> bool:
        rank = rank_of(path)
        return (rank if self._num_ranks is None else rank % self._num_ranks) == self._rank

    def _own_files(self, step: int) -> list[Path]:
        return [path for path in self._folder.feature_caches(step) if self._owns(path)]

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            for path in self._own_files(step):
                path.unlink()
            if step != self._step:  # where another rank has just made this step's folder and no file in it yet
                self._folder.remove_cache_step(step)

    def _trim(self, step: int, room: int) -> None:
        """Keep of a step's own files those that so many bytes hold: this rank's first, then those it inherited.

        The step's folder stays, in which another rank may be about to open its file.
        """
        for path in self._own_files(step):
            size = path.stat().st_size
            if size > room:
                path.unlink()
            else:
                room -= size

    def _refuse(self, path: Path, reason: str) -> None:
        _log.warning("%s", reason)
        self._unusable.add(path)

    def _report(self, writer: FeatureCacheWriter) -> None:
        """Say what a step's file lacks and what it cost: as a warning once, later for those who look closer."""
        level = logging.INFO if self._has_warned else logging.WARNING
        if writer.num_evicted:
            text = "%s: no room for %d responses, the shortest, of %d; raise drafter.cache_bytes = %d to keep all"
            _log.log(level, text, writer.path, writer.num_evicted, writer.num_appended, self._max_bytes)
            self._has_warned = True
        if writer.waited_seconds > _LONG_SECONDS:
            text = "%s: decoding waited %.2f s, %d times, for the disk; give a faster one as drafter.cache_folder"
            _log.log(level, text, writer.path, writer.waited_seconds, writer.num_waits)
            self._has_warned = True
