"""A feature cache whose readers only ever see the run's first step: the control against training on fresh rollouts.

The files of the first step stand a second time (hard links where the file system has them) in ``first/`` of the run's
folder, out of reach of what the cache drops, for as long as the run's folder stays.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from tlt_hpc.storage.documents import NoDocuments
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.feature_writer import FeatureCacheWriter, OpenDocuments
from tlt_hpc.storage.folder import RunFolder, WriteError, make_folder, part_of, publish

FIRST_STEP = 0


class FirstRollouts(FeatureCache):
    """Fills like any feature cache; what is read is the first step's, whatever the step."""

    def begin_step(self, step: int, weight_version: int) -> FeatureCacheWriter:
        kept = first_file(self._folder, self._rank)
        if step <= FIRST_STEP:
            kept.unlink(missing_ok=True)  # of a run that was rewound: the step is written anew
        elif not kept.exists():
            self._keep(kept)
        return super().begin_step(step, weight_version)

    def own_documents(self) -> OpenDocuments | NoDocuments:
        """This step's so far while it is the first; later the first step is read from its files."""
        return super().own_documents() if self._step == FIRST_STEP else NoDocuments()

    def previous_step_files(self) -> list[Path]:
        """The first step's files, of all ranks that this one can see; none in the first step itself."""
        if self._step == FIRST_STEP:
            return []
        files = sorted(first_file(self._folder, 0).parent.glob("rank-*.h5"))
        return sorted((path for path in files if path not in self._unusable), key=lambda path: not self._owns(path))

    def _keep(self, kept: Path) -> None:
        """Have the closed file of the first step stand a second time; a rank that was not there has none.

        Raises:
            WriteError: the disk refused.
        """
        original = self._folder.feature_cache(FIRST_STEP, self._rank)
        if not original.exists():
            return
        make_folder(kept.parent)
        part_of(kept).unlink(missing_ok=True)
        with suppress(OSError):  # a file system without hard links
            part_of(kept).hardlink_to(original)
        if not part_of(kept).exists():
            try:
                shutil.copyfile(original, part_of(kept))
            except OSError as error:
                raise WriteError(kept, error) from error
        publish(kept, durable=False)


def first_file(folder: RunFolder, rank: int) -> Path:
    """Where a rank's file of the first step is kept."""
    return folder.path / "first" / f"rank-{rank:04d}.h5"
