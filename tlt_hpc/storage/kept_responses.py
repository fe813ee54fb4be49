"""Responses of a step that is not committed yet, one HDF5 file for each time that a rank wrote what it had finished.

Schema 2: attributes kind, schema, origin, committed; /rollouts/ has the columns of the rollout log, without rewards and
advantages. ``origin`` names the weights that the responses are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlt_hpc.common.records import Rollout
from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, put_attributes, replacing
from tlt_hpc.storage.rollout_log import check_counts, put_arrays, read_rollouts, rollout_columns

KIND = FileKind("kept responses", schema=2, remedy="they are generated again")


def write_kept(path: Path, origin: str, rollouts: Sequence[Rollout], durable: bool) -> None:
    """Write finished responses: beside, closed, renamed; ``durable``: so that they outlive the machine as well.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    with replacing(path, KIND, len(rollouts), durable) as root:
        put_attributes(root, {"origin": origin})
        put_arrays(root.create_group("rollouts"), rollout_columns(rollouts))


def read_kept(path: Path) -> tuple[str, tuple[Rollout, ...]]:
    """Origin and responses, as ``write_kept`` was given them.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        check_counts(file)
        return file.text("origin"), read_rollouts(file)
