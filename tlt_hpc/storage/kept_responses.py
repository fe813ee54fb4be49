"""Responses of a step that is not committed yet, one HDF5 file for each time that a rank wrote what it had finished.

Schema 1: attributes kind, schema, origin, committed; /rollouts/ has the columns of the rollout log but for rewards and
advantages. ``origin`` names the weights that the responses are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.common.records import Rollout
from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, put_attributes, replacing
from tlt_hpc.storage.rollout_log import check_counts, put_arrays, read_rollouts, rollout_columns

KIND = FileKind("kept responses", schema=1, remedy="they are generated again")


@dataclass(frozen=True)
class KeptFile:
    """What one file has."""

    origin: str
    rollouts: tuple[Rollout, ...]


def write_kept(path: Path, kept: KeptFile, durable: bool) -> None:
    """Write finished responses: beside, closed, renamed; ``durable``: so that they outlive the machine as well.

    Raises:
        WriteError: the disk refused; ``path`` is as before.
    """
    with replacing(path, KIND, len(kept.rollouts), durable) as root:
        # bytes of fixed length: HDF5 keeps text of variable length in a heap that has no checksum
        put_attributes(root, {"origin": kept.origin})
        put_arrays(root.create_group("rollouts"), rollout_columns(kept.rollouts))


def read_kept(path: Path) -> KeptFile:
    """Read back what ``write_kept`` was given.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        check_counts(file)
        return KeptFile(file.text("origin"), read_rollouts(file))


def count_kept(path: Path) -> tuple[str, int]:
    """Origin of a file, and how many responses it has, by its head alone.

    Raises:
        DamagedFile, FileNotFoundError: as ``read_kept``.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        return file.text("origin"), file.committed


def merged(files: Sequence[KeptFile], origin: str) -> list[Rollout]:
    """The responses of the files of one origin, each key once, ordered by key."""
    found = {rollout.key: rollout for file in files if file.origin == origin for rollout in file.rollouts}
    return [found[key] for key in sorted(found)]
