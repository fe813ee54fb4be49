"""What the drafter trains on, whatever it is read from: a prompt with its response and the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Document:
    """A prompt and its response, ``tokens`` [T] int32, with ``features`` [T - 1, layer, hidden] uint16 (bits of bf16).

    ``features[i]`` are the target's at position i: the last token was never fed.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    features: NDArray[np.uint16]
    weight_version: int

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.features.nbytes


class Documents(Protocol):
    """What the drafter's pool reads from: a closed file, or the own open one."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]; reads no features."""

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths [N]; reads no features."""

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document | None:
        """One document; None where it was evicted since.

        With ``start`` and ``count`` the features of those positions alone are read, and the others are zeros that
        take no memory.

        Raises:
            DamagedFile: the file's data do not match their checksum.
        """


class NoDocuments:
    """A ``Documents`` without any, for ever."""

    is_current = True

    def __len__(self) -> int:
        return 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document | None:
        raise AssertionError(f"document {index} of none")
