"""Judged responses of an evaluation: HDF5 files of some responses each, written as they come.

Schema 1 (N responses ordered by key):

    /responses/  seed, stream, step, draw, sample [N] int64: the key; finish_reason [N] int8 (0 EOS, 1 LENGTH, 2 STOP);
                 num_target_passes [N] int64; rewards [N] float32; failures [N] UTF-8 bytes, empty where it was judged;
                 response_tokens [sum R] int32; response_ends [N] int64: where each one ends

``committed`` is the number of responses, as in the rollout log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason, SampleKey
from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, replacing
from tlt_hpc.storage.rollout_log import KEY_COLUMNS, flat, key_columns, put_arrays, read_keys

KIND = FileKind("evaluation log", schema=1, remedy="delete it, and its responses are generated again")
_COLUMNS = ("finish_reason", "num_target_passes", "rewards", "failures")


@dataclass(frozen=True)
class JudgedResponse:
    """A response with its verdict: ``tokens`` [R] int32; ``failure`` says why it was not judged, empty where it was."""

    key: SampleKey
    tokens: NDArray[np.int32]
    finish_reason: FinishReason
    num_target_passes: int
    reward: float
    failure: str = ""


def write_responses(path: Path, responses: Sequence[JudgedResponse]) -> None:
    """Write a file of responses: beside, closed, renamed.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    ordered = sorted(responses, key=lambda response: response.key)
    with replacing(path, KIND, len(ordered)) as root:
        put_arrays(root.create_group("responses"), _columns(ordered))


def read_responses(path: Path) -> list[JudgedResponse]:
    """Read back what ``write_responses`` was given, ordered by key.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        for name in (*KEY_COLUMNS, *_COLUMNS, "response_ends"):
            if (count := file.size(f"responses/{name}")) != file.committed:
                raise ValueError(f"{count} entries of {name}, but {file.committed} were committed")
        column = {name: file.array(f"responses/{name}").tolist() for name in _COLUMNS}
        tokens = np.split(file.array("responses/response_tokens"), file.array("responses/response_ends"))
        return [
            JudgedResponse(
                key=key,
                tokens=tokens[i],
                finish_reason=FinishReason(column["finish_reason"][i]),
                num_target_passes=column["num_target_passes"][i],
                reward=column["rewards"][i],
                failure=column["failures"][i].decode(),
            )
            for i, key in enumerate(read_keys(file, "responses"))
        ]


def _columns(responses: Sequence[JudgedResponse]) -> dict[str, NDArray[Any]]:
    tokens, ends = flat([response.tokens for response in responses], np.int32)
    return key_columns([response.key for response in responses]) | {
        "finish_reason": np.array([r.finish_reason for r in responses], np.int8),
        "num_target_passes": np.array([r.num_target_passes for r in responses], np.int64),
        "rewards": np.array([r.reward for r in responses], np.float32),
        "failures": np.array([r.failure.encode() for r in responses], np.bytes_),
        "response_tokens": tokens,
        "response_ends": ends,
    }
