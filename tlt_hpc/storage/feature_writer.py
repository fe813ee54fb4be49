"""The writer of a file of the HDF5 rollout cache, and what can be read of it while it is open.

Appending hands arrays over; a thread of the writer's own puts them into the file (schema in ``feature_file``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.storage import hdf5
from tlt_hpc.storage.feature_file import KIND, Document, Span, contiguous_slices, read_document
from tlt_hpc.storage.folder import make_folder, part_path, publish_part

BLOCK_BYTES = 4 * 2**20
"""Bytes handed to the writing thread at a time: enough that its calls cost nothing, and ``close`` is short."""
PIECE_BYTES = 2**20
"""Bytes written in one call of h5py, whose lock a reader of the open file waits for."""
QUEUE_BYTES = 256 * 2**20
"""Bytes by which the writing thread may fall behind; one response alone may be more."""

# Of a row, beside its features: at worst a prompt and a response of one row each, an extent each, and checksums.
_BYTES_BESIDE_ROW = 100
_BYTES_OF_TABLES = 48 * 2**10


def row_capacity(max_bytes: int, num_layers: int, hidden_size: int) -> int:
    """Rows of features with which a file is at most ``max_bytes`` long, whatever the responses' lengths."""
    row = 2 * num_layers * hidden_size
    unfilled = min(hdf5.CHUNK_BYTES, max_bytes // 32)  # of the last chunk
    return max(0, (max_bytes - _BYTES_OF_TABLES - unfilled) // (row + _BYTES_BESIDE_ROW))


# -- what is kept ------------------------------------------------------------------------------------------------------
#
# The shortest responses are evicted first. The rows of a prompt are stored once for all its responses. The tail of a
# rollout comes last and matters most, so a response that needs room takes it from shorter ones, never from one as long.
# The rows of a prompt come with its first response only, so they stay when its responses are evicted, for a longer one
# that may follow, until the rows are needed: the oldest such prompt is evicted first. A response that comes later still
# is kept after the prompt's last token alone, which takes no rows.


@dataclass(eq=False)
class StoredResponse(Span):
    """A response of R tokens with R features: of the prompt's last token, then of its own but the last."""

    prompt: Span = field(kw_only=True)


class RowSpace:
    """``num_free`` rows to hand out. Freed rows are used first, so the file has no more rows than were held at once."""

    def __init__(self, capacity: int) -> None:
        self.num_free = capacity
        self.high_water = 0
        self._holes = np.zeros(0, np.int64)

    def allocate_rows(self, count: int) -> NDArray[np.int64]:
        """The numbers of so many rows, the lowest free ones, in ascending order."""
        assert 0 <= count <= self.num_free
        self.num_free -= count
        reused, self._holes = self._holes[:count], self._holes[count:]
        start, self.high_water = self.high_water, self.high_water + count - len(reused)
        return np.concatenate([reused, np.arange(start, self.high_water)])

    def free_rows(self, rows: NDArray[np.int64]) -> None:
        """Free rows that were taken."""
        self.num_free += len(rows)
        self._holes = np.sort(np.concatenate([self._holes, rows]))


class Retention:
    """The prompts and responses of one step, within ``capacity`` rows."""

    def __init__(self, capacity: int) -> None:
        self.space = RowSpace(capacity)
        self.responses: list[StoredResponse] = []
        """The kept responses, in order of arrival."""
        self.num_evicted = 0
        """Responses that were evicted, or not taken."""
        self._prompts: dict[bytes, Span] = {}

    @property
    def prompts(self) -> list[Span]:
        """Prompts of the kept responses, in order of arrival."""
        used = {response.prompt for response in self.responses}
        return [prompt for prompt in self._prompts.values() if prompt in used]

    def store_response(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> list[Span]:
        """Store a response, with its prompt if that is new; the arguments are those of ``FeatureCacheWriter.append``.

        Returns what was stored: nothing if only responses that are as long could make room for it.
        """
        key = tokens[:prompt_length].tobytes()
        prompt = self._prompts.get(key)
        if prompt is None and first:
            return self.store_response(tokens[first:], prompt_length - first, features)
        split = prompt_length - 1 - first
        num_rows = len(features) - (split if prompt else 0)
        if not self._evict_until_free(num_rows, len(features) - split, prompt):
            self.num_evicted += 1
            return []
        added: list[Span] = []
        if prompt is None:
            prompt = self._prompts[key] = Span(
                tokens[:prompt_length], self.space.allocate_rows(split), features[:split]
            )
            added.append(prompt)
        rows = self.space.allocate_rows(len(features) - split)
        self.responses.append(StoredResponse(tokens[prompt_length:], rows, features[split:], prompt=prompt))
        return [*added, self.responses[-1]]

    def _evict_until_free(self, num_rows: int, length: int, own: Span | None) -> bool:
        """Evict until ``num_rows`` are free: unused prompts but ``own``, then the shortest responses below ``length``.

        A prompt whose last response is evicted follows when no shorter response is left. Nothing is evicted, and False
        returned, where all of them would not do.
        """
        if self.space.num_free >= num_rows:
            return True
        shorter = [response for response in self.responses if len(response.rows) < length]
        used = {own, *(response.prompt for response in self.responses)}
        needed = {own, *(response.prompt for response in self.responses if len(response.rows) >= length)}
        unused = [prompt for prompt in self._prompts.values() if prompt not in used]
        last = [prompt for prompt in self._prompts.values() if prompt in used - needed]
        room, victims = self.space.num_free, set[Span]()
        for span in [*unused, *sorted(shorter, key=lambda response: len(response.rows)), *last]:
            if room >= num_rows:
                break
            victims.add(span)
            room += len(span.rows)
        if room < num_rows:
            return False
        self.num_evicted += sum(response in victims for response in self.responses)
        self.responses = [response for response in self.responses if response not in victims]
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if prompt not in victims}
        for span in victims:
            span.is_kept, span.features = False, None
            self.space.free_rows(span.rows)
        return True


# -- the file ----------------------------------------------------------------------------------------------------------


class WriteBehind:
    """A thread that executes writes one after another; a caller that is ``QUEUE_BYTES`` ahead of it waits.

    All methods are for one thread. At exit Python waits for the thread to finish what it was given.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._under_way: deque[tuple[Future[None], int]] = deque()
        self.num_bytes = 0
        """Bytes handed over and not known to be written."""
        self.waited_seconds = 0.0

    def submit_write(self, write: Callable[[], None], num_bytes: int) -> None:
        """Hand over a write of so many bytes.

        Raises:
            whatever an earlier write raised: the first failure, at every call after it.
        """
        self.raise_write_error()
        began = time.perf_counter()
        while self._under_way and self.num_bytes + num_bytes > QUEUE_BYTES:
            self._take_first()
        self.waited_seconds += time.perf_counter() - began
        self._under_way.append((self._thread.submit(write), num_bytes))
        self.num_bytes += num_bytes

    def raise_write_error(self) -> None:
        """Raises whatever a write raised."""
        while self._under_way and self._under_way[0][0].done():
            self._take_first()

    def drain(self) -> None:
        """Wait until all is written; raises whatever a write raised."""
        while self._under_way:
            self._take_first()

    def close(self) -> None:
        """End the thread after the current write; writes that have not begun are dropped. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._under_way.clear()
        self.num_bytes = 0

    def _take_first(self) -> None:
        future, num_bytes = self._under_way[0]
        future.result()  # a failure stays first in line
        self._under_way.popleft()
        self.num_bytes -= num_bytes


class FeatureCacheWriter:
    """One rank's open file of one step; not valid for any other reader until ``close``.

    All methods are for one thread. The file is never longer than ``max_bytes``; what does not fit is evicted as
    ``Retention`` says. Memory: up to ``BLOCK_BYTES`` and ``QUEUE_BYTES`` of features, and all tokens.
    """

    def __init__(
        self, path: Path, num_layers: int, hidden_size: int, step: int, weight_version: int, max_bytes: int
    ) -> None:
        self.path, self.weight_version = path, weight_version
        capacity, row = row_capacity(max_bytes, num_layers, hidden_size), (num_layers, hidden_size)
        self.kept = Retention(capacity)
        self.num_appended = 0
        """Responses, kept or not: a view of the open file is out of date once this has changed."""
        self.is_open = True
        self._pending: list[Span] = []
        self._num_pending_bytes = 0
        make_folder(path.parent)
        self._file = hdf5.NewFile(part_path(path), KIND)
        attributes = {"step": step + FIRST_STEP, "weight_version": weight_version, "num_layers": num_layers}
        hdf5.put_attributes(self._file.root, {**attributes, "hidden_size": hidden_size, "compression": "none"})
        # a chunk takes its space whole: a file of few bytes has small ones
        chunk_rows = max(1, capacity // 32)
        self._features = hdf5.create_growing_array(self._file.root, "features", np.dtype(np.uint16), row, chunk_rows)
        hdf5.put_attributes(self._features, {"dtype": hdf5.BFLOAT16})
        self._thread = WriteBehind()

    @property
    def waited_seconds(self) -> float:
        """Seconds that appends waited for the thread."""
        return self._thread.waited_seconds

    def append(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> None:
        """Add a prompt with its response; the caller must not write to the arrays again.

        ``tokens`` [T] int32, of which ``prompt_length`` P are the prompt's, 1 <= P < T; ``features`` [T - 1 - first,
        layer, hidden] uint16 of the positions from ``first`` on. ``first`` is 0, or P - 1 if the prompt's own
        features came with an earlier response to it; if those have been evicted, the response is stored after the
        prompt's last token alone.

        Raises:
            WriteError: a write did not reach the disk, now or before; the file can only be abandoned.
        """
        assert tokens.dtype == np.int32 and features.dtype == np.uint16
        assert features.shape == (len(tokens) - 1 - first, *self._features.shape[1:]), "[T - 1 - first, layer, hidden]"
        assert 1 <= prompt_length < len(tokens) and first in (0, prompt_length - 1)
        self._thread.raise_write_error()
        self.num_appended += 1
        for span in self.kept.store_response(tokens, prompt_length, features, first):
            assert span.features is not None
            self._pending.append(span)
            self._num_pending_bytes += span.features.nbytes
        if self._num_pending_bytes >= BLOCK_BYTES:
            self._submit_pending()

    def read(self, response: StoredResponse, start: int = 0, count: int | None = None) -> Document:
        """A kept response with its prompt, whether in the file or still in memory; as ``FeatureCacheReader.read``.

        Raises:
            WriteError: a write did not reach the disk.
        """
        self._thread.raise_write_error()
        return read_document(self._features, response.prompt, response, self.weight_version, start, count)

    def flush(self) -> None:
        """Wait until all that was appended is in the file.

        Raises:
            WriteError: the disk refused; the file can only be abandoned.
        """
        self._submit_pending()
        self._thread.drain()

    def close(self, durable: bool = False) -> None:
        """Wait for the thread, write the tables, commit, close, rename.

        Args:
            durable: wait until it would outlive the machine, too.

        Raises:
            WriteError: the disk refused; nothing is published and the part is removed.
        """
        try:
            self.flush()
            self._put_tables()
            self._file.commit(len(self.kept.responses))
            publish_part(self.path, durable)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the thread, close without publishing and remove the part; does nothing after ``close``."""
        self.is_open = False
        self._thread.close()
        self._file.close()
        part_path(self.path).unlink(missing_ok=True)

    def _submit_pending(self) -> None:
        if self._pending:
            self._thread.submit_write(partial(self._write_spans, self._pending), self._num_pending_bytes)
            self._pending, self._num_pending_bytes = [], 0

    def _write_spans(self, spans: Sequence[Span]) -> None:
        """Put spans into the file, except those that were evicted: others may have their rows, and come later.

        Called on the thread.
        """
        held = [(span, features) for span in spans if (features := span.features) is not None]
        small = [(span.rows, features) for span, features in held if features.nbytes < PIECE_BYTES]
        blocks = [(span.rows, features) for span, features in held if features.nbytes >= PIECE_BYTES]
        if small:  # joined for few calls; a long response is not, as it may have gigabytes
            blocks.append((np.concatenate([rows for rows, _ in small]), np.concatenate([part for _, part in small])))
        for rows, features in blocks:
            most = max(1, PIECE_BYTES // max(1, features[:1].nbytes))
            for run in contiguous_slices(rows):
                for start in range(run.start, run.stop, most):
                    hdf5.write_rows(self._features, int(rows[start]), features[start : min(start + most, run.stop)])
        self._file.check_writes()
        for span, _ in held:
            span.features = None

    def _put_tables(self) -> None:
        prompts, responses = self.kept.prompts, self.kept.responses
        number = {prompt: index for index, prompt in enumerate(prompts)}
        extents = [
            [(int(span.rows[run.start]), run.stop - run.start) for run in contiguous_slices(span.rows)]
            for span in (*prompts, *responses)
        ]
        tables: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
            "prompt_tokens": _joined(prompts),
            "prompt_ends": _ends(len(prompt.tokens) for prompt in prompts),
            "response_tokens": _joined(responses),
            "response_ends": _ends(len(response.tokens) for response in responses),
            "prompt_of": np.array([number[response.prompt] for response in responses], np.int64),
            "extents": np.array([pair for pairs in extents for pair in pairs], np.int64).reshape(-1, 2),
            "extent_ends": _ends(len(pairs) for pairs in extents),
        }
        for name, table in tables.items():
            hdf5.put_array(self._file.root, name, table, None)


class OpenDocuments:
    """The documents that a rank's own open file held at one moment; none where there is no file."""

    def __init__(self, writer: FeatureCacheWriter | None) -> None:
        self._writer = writer
        self._responses = list(writer.kept.responses) if writer else []
        self._num_appended = writer.num_appended if writer else 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_current(self) -> bool:
        """True if nothing was appended since, and the file is still open."""
        return self._writer is None or (self._writer.is_open and self._num_appended == self._writer.num_appended)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]."""
        return np.array([len(response.tokens) for response in self._responses], np.int64)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths [N]."""
        return np.array([len(response.prompt.tokens) for response in self._responses], np.int64)

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document | None:
        """One document, as ``FeatureCacheReader.read``; None if it was evicted since.

        Raises:
            WriteError: a write did not reach the disk.
        """
        response = self._responses[index]
        if self._writer is None or not self._writer.is_open or not response.is_kept:
            return None
        return self._writer.read(response, start, count)


def _joined(spans: Iterable[Span]) -> NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int32), *(span.tokens for span in spans)])


def _ends(counts: Iterable[int]) -> NDArray[np.int64]:
    return np.cumsum(np.fromiter(counts, np.int64))
