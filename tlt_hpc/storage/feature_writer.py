"""The writer of a file of the HDF5 rollout cache, and what can be read of it while it is open.

Appending hands arrays over; a thread of the writer's own puts them into the file (schema in ``feature_file``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage import hdf5
from tlt_hpc.storage.documents import Document
from tlt_hpc.storage.feature_file import KIND, read_extents, window
from tlt_hpc.storage.folder import make_folder, part_of, publish
from tlt_hpc.storage.retention import Retention, Span, StoredResponse
from tlt_hpc.storage.row_space import Extent
from tlt_hpc.storage.write_behind import WriteBehind

BLOCK_BYTES = 4 * 2**20
"""What is handed to the writing thread at a time: enough that its calls cost nothing, and ``close`` is short."""
PIECE_BYTES = 2**20
"""What is written in one call of h5py, whose lock a reader of the open file waits for."""
QUEUE_BYTES = 256 * 2**20
"""How far the writing thread may fall behind; one response alone may be more."""

_UINT16 = np.dtype(np.uint16)
# Of a row, beside its features: at worst a prompt and a response of one row each, an extent each, and checksums.
_BYTES_BESIDE_ROW = 100
_BYTES_OF_TABLES = 48 * 2**10

Piece = tuple[Extent, NDArray[np.uint16]]


def row_capacity(max_bytes: int, num_layers: int, hidden_size: int) -> int:
    """Rows of features with which a file is at most ``max_bytes`` long, whatever the responses' lengths."""
    row = 2 * num_layers * hidden_size
    unfilled = min(hdf5.CHUNK_BYTES, max_bytes // 32)  # of the last chunk
    return max(0, (max_bytes - _BYTES_OF_TABLES - unfilled) // (row + _BYTES_BESIDE_ROW))


class FeatureCacheWriter:
    """One rank's open file of one step; not valid for any other reader until ``close``.

    All methods are for one thread. With ``max_bytes`` the file is never longer than that; what does not
    fit gives way as ``Retention`` says. Memory: what was not yet handed to the thread (``block_bytes``), what the
    thread is behind with (``queue_bytes``, or one response that is larger), and all tokens.
    """

    def __init__(
        self,
        path: Path,
        num_layers: int,
        hidden_size: int,
        step: int,
        weight_version: int,
        max_bytes: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.path, self.step, self.weight_version = path, step, weight_version
        self._row, self._block_bytes = (num_layers, hidden_size), block_bytes
        capacity = 2**62 if max_bytes is None else row_capacity(max_bytes, num_layers, hidden_size)
        self._most_chunk_rows = max(1, capacity // 32)
        self._kept = Retention(capacity)
        self._pending: list[Span] = []
        self._num_pending_bytes = 0
        self._features: hdf5.Dataset | None = None
        self.num_appended = 0
        """Responses, kept or not: a view of the open file is out of date once this has changed."""
        self.is_open = True
        make_folder(path.parent)
        self._file = hdf5.NewFile(part_of(path), KIND)
        attributes = {"step": step, "weight_version": weight_version, "num_layers": num_layers}
        hdf5.put_attributes(self._file.root, {**attributes, "hidden_size": hidden_size, "compression": "none"})
        self._thread = WriteBehind(queue_bytes)

    @property
    def num_documents(self) -> int:
        return self._kept.num_responses

    @property
    def num_tokens(self) -> int:
        """Of the kept prompts and responses, a shared prompt counted once."""
        return sum(len(span.tokens) for span in (*self._kept.prompts, *self._kept.responses))

    @property
    def num_evicted(self) -> int:
        """Responses that did not fit into ``max_bytes``, or gave way to longer ones."""
        return self._kept.num_evicted

    @property
    def num_waits(self) -> int:
        """Appends that waited for the thread."""
        return self._thread.num_waits

    @property
    def waited_seconds(self) -> float:
        """What these waits took together."""
        return self._thread.waited_seconds

    def append(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> None:
        """Add a prompt with its response; the arrays are handed over, and nobody may write to them again.

        ``tokens`` [T] int32, of which ``prompt_length`` P are the prompt's, 1 <= P < T; ``features`` [T - 1 - first,
        layer, hidden] uint16 of the positions from ``first`` on. ``first`` is 0, or P - 1 where the prompt's own
        features came with an earlier response to it; where these are not kept, the response is, after the prompt's
        last token alone. Waits where the thread is too far behind, which is counted.

        Raises:
            WriteError: a write did not reach the disk, now or before; the file can only be abandoned.
        """
        assert tokens.dtype == np.int32 and features.dtype == np.uint16
        assert features.shape == (len(tokens) - 1 - first, *self._row), f"features are [T - 1 - first, *{self._row}]"
        assert 1 <= prompt_length < len(tokens) and first in (0, prompt_length - 1)
        self._thread.check()
        self.num_appended += 1
        for span in self._kept.add(tokens, prompt_length, features, first):
            self._note(span)
        if self._num_pending_bytes >= self._block_bytes:
            self._hand_over()

    def documents(self) -> OpenDocuments:
        """What is kept so far, read from memory and this handle; usable until the file is closed."""
        return OpenDocuments(self, self._kept.responses)

    def read(self, response: StoredResponse, start: int = 0, count: int | None = None) -> Document:
        """A kept response with its prompt, whether in the file or still in memory; as ``Documents.read``.

        Raises:
            WriteError: a write did not reach the disk.
        """
        self._thread.check()
        prompt = response.prompt
        parts = [(span.num_rows, partial(self._read_rows, span)) for span in (prompt, response)]
        features = window(parts, self._row, start, count)
        tokens = np.concatenate([prompt.tokens, response.tokens])
        return Document(tokens, len(prompt.tokens), features, self.weight_version)

    def flush(self) -> None:
        """Wait until all that was appended is in the file.

        Raises:
            WriteError: the disk refused; the file can only be abandoned.
        """
        self._hand_over()
        self._thread.drain()

    def close(self) -> None:
        """Wait for the thread, write the tables, commit, close, rename.

        Raises:
            WriteError: the disk refused; nothing is published and the part is removed.
        """
        try:
            self.flush()
            self._put_tables()
            self._file.commit(self.num_documents)
            publish(self.path, durable=False)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the thread, close without publishing and remove the part; does nothing after ``close``."""
        self.is_open = False
        self._thread.close()
        self._file.close()
        part_of(self.path).unlink(missing_ok=True)

    def _note(self, span: Span) -> None:
        if span.features is not None:
            self._pending.append(span)
            self._num_pending_bytes += span.features.nbytes

    def _hand_over(self) -> None:
        if self._pending:
            self._thread.put(partial(self._write, self._pending), self._num_pending_bytes)
            self._pending, self._num_pending_bytes = [], 0

    def _read_rows(self, span: Span, first: int, out: NDArray[np.uint16]) -> None:
        features = span.features  # the thread lets go of it once it is in the file
        if features is not None:
            out[:] = features[first : first + len(out)]
            return
        assert self._features is not None, "what is not in memory is in the file"
        read_extents(self._features, span.extents, first, out)

    # -- on the thread ------------------------------------------------------------------------------------------

    def _write(self, spans: Sequence[Span]) -> None:
        """Put spans into the file, but those that were evicted: others may have their rows, and come later."""
        held = [(span, span.features) for span in spans]
        most = max(1, PIECE_BYTES // (2 * self._row[0] * self._row[1]))
        pieces = [piece for span, rows in held if rows is not None for piece in _cut(span.extents, rows, most)]
        if pieces and self._features is None:
            self._features = self._make_array(sum(extent.count for extent, _ in pieces))
        for first, parts in _runs(pieces, most):
            assert self._features is not None
            hdf5.write_rows(self._features, first, parts[0] if len(parts) == 1 else np.concatenate(parts))
        self._file.check()
        for span, _ in held:
            span.features = None

    def _make_array(self, num_rows: int) -> hdf5.Dataset:
        """The array of features, for a first block of so many rows."""
        # A small file does not reserve whole chunks; one that fills a block gets chunks of full size.
        rows = min(self._most_chunk_rows, max(64, num_rows))
        features = hdf5.growing_array(self._file.root, "features", _UINT16, self._row, rows)
        hdf5.put_attributes(features, {"dtype": hdf5.BFLOAT16})
        return features

    # -- at the end ---------------------------------------------------------------------------------------------

    def _put_tables(self) -> None:
        prompts, responses = self._kept.prompts, self._kept.responses
        if self._features is None:
            self._features = self._make_array(0)
        number = {id(prompt): index for index, prompt in enumerate(prompts)}
        extents = [[(e.first, e.count) for e in span.extents] for span in (*prompts, *responses)]
        tables: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
            "prompt_tokens": _joined([prompt.tokens for prompt in prompts]),
            "prompt_ends": _ends(len(prompt.tokens) for prompt in prompts),
            "response_tokens": _joined([response.tokens for response in responses]),
            "response_ends": _ends(len(response.tokens) for response in responses),
            "prompt_of": np.array([number[id(response.prompt)] for response in responses], np.int64),
            "extents": np.array([pair for pairs in extents for pair in pairs], np.int64).reshape(-1, 2),
            "extent_ends": _ends(len(pairs) for pairs in extents),
        }
        for name, table in tables.items():
            hdf5.put_array(self._file.root, name, table, None)


class OpenDocuments:
    """The documents that the own open file held at one moment; a ``Documents``."""

    def __init__(self, writer: FeatureCacheWriter, responses: Sequence[StoredResponse]) -> None:
        self._writer, self._responses, self._num_appended = writer, responses, writer.num_appended

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_current(self) -> bool:
        """Whether nothing was appended since, and the file is still open."""
        return self._writer.is_open and self._num_appended == self._writer.num_appended

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(response.tokens) for response in self._responses], np.int64)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        return np.array([len(response.prompt.tokens) for response in self._responses], np.int64)

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document | None:
        response = self._responses[index]
        return self._writer.read(response, start, count) if response.is_kept and self._writer.is_open else None


def _cut(extents: Iterable[Extent], rows: NDArray[np.uint16], most: int) -> Iterator[Piece]:
    """Rows with where they belong, at most so many at a time."""
    offset = 0
    for extent in extents:
        for start in range(0, extent.count, most):
            count = min(most, extent.count - start)
            yield Extent(extent.first + start, count), rows[offset : offset + count]
            offset += count


def _runs(pieces: Iterable[Piece], most: int) -> Iterator[tuple[int, list[NDArray[np.uint16]]]]:
    """Pieces that lie one after another as one, of at most so many rows: the first row, and what follows from it."""
    first, end, parts = 0, 0, list[NDArray[np.uint16]]()
    for extent, rows in pieces:
        if parts and (extent.first != end or extent.end - first > most):
            yield first, parts
            parts = []
        if not parts:
            first = extent.first
        parts.append(rows)
        end = extent.end
    if parts:
        yield first, parts


def _joined(tokens: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(tokens) if tokens else np.zeros(0, np.int32)


def _ends(counts: Iterable[int]) -> NDArray[np.int64]:
    return np.cumsum(np.fromiter(counts, np.int64))
