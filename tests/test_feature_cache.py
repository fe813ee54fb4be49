"""The feature cache: what is appended is what is read, from the open file and the closed one; nothing half-written."""

import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from damaged import assert_damage_is_noticed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tlt_hpc.storage import feature_writer, hdf5
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.feature_file import Document, FeatureCacheReader, contiguous_slices
from tlt_hpc.storage.feature_writer import FeatureCacheWriter, OpenDocuments, row_capacity
from tlt_hpc.storage.folder import RunFolder, WriteError, part_path

LAYERS, HIDDEN = 2, 8
Arrays = tuple[NDArray[np.int32], int, NDArray[np.uint16]]


def make_document(seed: int, num_response: int, num_prompt: int = 12, prompt_seed: int | None = None) -> Arrays:
    """Tokens, prompt length and features; one ``prompt_seed`` gives one prompt."""
    rng, prompt_rng = (np.random.default_rng([s, num_prompt]) for s in (seed, 10**6 + (prompt_seed or seed)))
    tokens = rng.integers(0, 2**31 - 1, num_prompt + num_response, dtype=np.int32)
    features = rng.integers(0, 2**16, (len(tokens) - 1, LAYERS, HIDDEN), dtype=np.uint16)
    tokens[:num_prompt] = prompt_rng.integers(0, 2**31 - 1, num_prompt)
    features[: num_prompt - 1] = prompt_rng.integers(0, 2**16, (num_prompt - 1, LAYERS, HIDDEN))
    return tokens, num_prompt, features


def open_writer(path: Path, max_bytes: int = 10**6) -> FeatureCacheWriter:
    return FeatureCacheWriter(path, LAYERS, HIDDEN, step=4, weight_version=9, max_bytes=max_bytes)


def open_cache(path: Path, rank: int = 0, max_bytes: int = 10**6, num_ranks: int = 9) -> FeatureCache:
    return FeatureCache(RunFolder(path), rank, LAYERS, HIDDEN, max_bytes, num_ranks)


def set_block_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(feature_writer, "BLOCK_BYTES", count)


def assert_same(found: Document | None, expected: Arrays) -> None:
    tokens, prompt_length, features = expected
    assert isinstance(found, Document) and found.prompt_length == prompt_length and found.weight_version == 9
    assert found.tokens.dtype == np.int32 and np.array_equal(found.tokens, tokens)
    assert found.features.dtype == np.uint16 and np.array_equal(found.features, features)


def assert_holds(documents: OpenDocuments | FeatureCacheReader, expected: list[Arrays]) -> None:
    assert len(documents) == len(expected)
    assert documents.lengths.tolist() == [len(tokens) - prompt_length for tokens, prompt_length, _ in expected]
    assert documents.prompt_lengths.tolist() == [prompt_length for _, prompt_length, _ in expected]
    for index, (tokens, prompt_length, features) in reversed(list(enumerate(expected))):
        assert_same(documents.read(index), expected[index])
        start, count = index % len(tokens), 5 * index % 40
        window = np.zeros_like(features)
        window[start : start + count] = features[start : start + count]
        assert_same(documents.read(index, start, count), (tokens, prompt_length, window))


def assert_file_holds(path: Path, expected: list[Arrays]) -> None:
    with closing(FeatureCacheReader(path)) as reader:
        assert_holds(reader, expected)


def run_step(cache: FeatureCache, step: int, num_response: int = 50) -> None:
    writer = cache.begin_step(step, weight_version=9)
    writer.append(*make_document(step, num_response))
    cache.end_step()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20), st.integers(1, 5)), max_size=30),
    block_bytes=st.sampled_from([0, 3_000, 20_000, 2**25]),
    piece_bytes=st.sampled_from([100, 2**20]),
    flush_at=st.sets(st.integers(0, 30), max_size=3),
)
def test_open_and_closed_file_hold_what_was_appended(tmp_path, shapes, block_bytes, piece_bytes, flush_at):
    """Prompts come in groups; the first of a group brings the prompt's features, the others may bring them too."""
    expected = [make_document(i, length, prompt, seed) for i, (length, prompt, seed) in enumerate(shapes)]
    feature_writer.BLOCK_BYTES, feature_writer.PIECE_BYTES = block_bytes, piece_bytes
    writer = open_writer(tmp_path / "a.h5", max_bytes=10**9)
    seen = set[tuple[int, int]]()
    for index, (tokens, prompt_length, features) in enumerate(expected):
        before = OpenDocuments(writer)
        first = prompt_length - 1 if shapes[index][1:] in seen and index % 3 else 0
        seen.add(shapes[index][1:])
        writer.append(tokens, prompt_length, features[first:], first)
        assert len(before) == index and not before.is_current, "a view does not grow, and says so"
        if index in flush_at:
            writer.flush()
    assert OpenDocuments(writer).is_current
    assert_holds(OpenDocuments(writer), expected)
    writer.close()
    assert_file_holds(tmp_path / "a.h5", expected)
    with h5py.File(tmp_path / "a.h5") as file:
        assert len(file["response_tokens"]) == sum(length for length, _, _ in shapes)
        assert len(file["prompt_tokens"]) == sum(length for length, _ in seen), "a group's prompt is there once"
    (tmp_path / "a.h5").unlink()


def test_rows_are_cut_where_one_is_left_out():
    assert list(contiguous_slices(np.array([0, 1, 3, 4, 9]))) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_damage_is_noticed(tmp_path, monkeypatch):
    set_block_bytes(monkeypatch, 2_000)
    expected = [make_document(i, 18 + i, prompt_seed=i // 3) for i in range(9)]
    writer = open_writer(tmp_path / "a.h5", max_bytes=200_000)
    for document in expected:
        writer.append(*document)
    writer.close()
    check = partial(assert_file_holds, tmp_path / "a.h5", expected)
    assert_damage_is_noticed(tmp_path / "a.h5", check, r"a\.h5: damaged feature cache")


def test_previous_step_of_all_ranks_but_the_unusable(tmp_path, caplog):
    caches = [open_cache(tmp_path, rank) for rank in range(4)]
    for cache in caches:
        run_step(cache, 0)
    odd = FeatureCache(RunFolder(tmp_path), 4, LAYERS, HIDDEN + 1, 10**6, 9)
    odd.begin_step(0, 9)
    odd.end_step()
    damaged = RunFolder(tmp_path).feature_cache(0, 2)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    caches[1].begin_step(1, 9)
    files = [RunFolder(tmp_path).feature_cache(0, rank) for rank in (1, 0, 2, 3, 4)]
    assert caches[1].previous_step_files() == files, "own first"
    readers = [caches[1].open_file(path) for path in files]
    assert [reader is None for reader in readers] == [False, False, True, False, True]
    assert [str(damaged) in message for message in caplog.messages] == [True, False], "one warning line each"
    assert "features [layer, hidden] = (2, 9), this run has (2, 8)" in caplog.messages[1]
    assert caches[1].previous_step_files() == [files[0], files[1], files[3]]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(1, 900), st.integers(1, 60), st.integers(1, 4)), max_size=60), max_size=4
    ),
    max_bytes=st.integers(0, 400_000),
)
def test_own_files_never_exceed_max_bytes(tmp_path, steps, max_bytes):
    cache = open_cache(tmp_path, max_bytes=max_bytes)
    for step, shapes in enumerate(steps):
        writer = cache.begin_step(step, 9)
        expected = [make_document(i, length, prompt, seed) for i, (length, prompt, seed) in enumerate(shapes)]
        by_tokens, seen = dict[bytes, Arrays](), set[tuple[int, int]]()
        for (tokens, prompt, features), shape in zip(expected, shapes, strict=True):
            first = prompt - 1 if shape[1:] in seen else 0
            seen.add(shape[1:])
            writer.append(tokens, prompt, features[first:], first)
            writer.flush()
            assert size_on_disk(tmp_path) <= max(max_bytes, EMPTY_FILES)
            by_tokens[tokens.tobytes()] = (tokens, prompt, features)
            # or after the prompt's last token alone, if the prompt was evicted before
            by_tokens[tokens[prompt - 1 :].tobytes()] = (tokens[prompt - 1 :], 1, features[prompt - 1 :])
        kept = OpenDocuments(writer)
        found = [kept.read(index) for index in range(len(kept))]
        assert len(kept) + writer.kept.num_evicted == len(expected)
        for document in found:
            assert_same(document, by_tokens[document.tokens.tobytes()])
        cache.end_step()
        assert size_on_disk(tmp_path) <= max(max_bytes, EMPTY_FILES)
        closed = [(document.tokens, document.prompt_length, document.features) for document in found]
        assert_file_holds(RunFolder(tmp_path).feature_cache(step, 0), closed)
    cache.begin_step(100, 9)
    cache.abandon_step()


EMPTY_FILES = 2 * 16 * 2**10
"""What two files take that hold nothing: a budget below it is no budget."""


def size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("rank-*"))


def test_the_shortest_of_a_step_give_way(tmp_path, caplog):
    max_bytes = 4 * 60_000
    room = row_capacity(max_bytes // 2, LAYERS, HIDDEN)
    tail = [make_document(100 + index, room // 4, 1) for index in range(3)]
    cache = open_cache(tmp_path, max_bytes=max_bytes)
    writer = cache.begin_step(0, 9)
    for document in [*[make_document(index, 40, 1) for index in range(20)], *tail, make_document(200, 39, 1)]:
        writer.append(*document)
    kept = OpenDocuments(writer)
    assert 3 < len(kept) < 23 and set(kept.lengths) == {40, room // 4}
    for place in (-3, -2, -1):
        assert_same(kept.read(len(kept) + place), tail[place])
    cache.end_step()
    (message,) = caplog.messages
    assert "drafter.cache_bytes" in message and f"no room for {24 - len(kept)} responses" in message


def test_inherited_files_over_the_bytes_are_removed(tmp_path):
    for rank in range(4):
        run_step(open_cache(tmp_path, rank), 0)
    folder = RunFolder(tmp_path)
    size = folder.feature_cache(0, 0).stat().st_size
    for room, kept in ((5, [0, 1]), (3, [0])):
        cache = open_cache(tmp_path, 0, max_bytes=size * room, num_ranks=1)
        cache.begin_step(1, 9)
        assert cache.previous_step_files() == [folder.feature_cache(0, rank) for rank in kept]
        cache.abandon_step()


def test_only_own_files_are_removed(tmp_path):
    folder = RunFolder(tmp_path)
    for rank in (0, 1, 4):
        run_step(open_cache(tmp_path, rank), 0)
        open_cache(tmp_path, rank).begin_step(1, 9)  # never ended: half-written
    open_cache(tmp_path, 1).remove_parts()
    run_step(open_cache(tmp_path, 1), 5)
    assert folder.feature_caches(0) == [folder.feature_cache(0, 0), folder.feature_cache(0, 4)]
    assert folder.cache_parts() == [part_path(folder.feature_cache(1, rank)) for rank in (0, 4)]


def test_a_run_that_goes_back_drops_its_later_steps_and_replaces_its_own(tmp_path):
    cache, folder = open_cache(tmp_path), RunFolder(tmp_path)
    for step in range(5):
        run_step(cache, step)
    cache.begin_step(3, 9)
    assert folder.cache_steps() == [3] and not folder.feature_cache(3, 0).exists()
    assert len(cache.own_documents()) == 0
    cache.end_step()
    assert_file_holds(folder.feature_cache(3, 0), [])


def test_no_rank_takes_away_the_folder_that_another_is_about_to_use(tmp_path, monkeypatch):
    folder, removed = RunFolder(tmp_path), list[int]()
    monkeypatch.setattr(RunFolder, "remove_cache_step", lambda self, step: removed.append(step))
    for step in (0, 2, 3, 5):  # the other rank has made the folder of step 3, and not yet its file
        folder.feature_cache(step, 1).parent.mkdir(parents=True)
    run_step(open_cache(tmp_path), 3)
    assert removed == [0, 5]


# -- the writing thread ----------------------------------------------------------------------------------------------


class HeldDisk:
    """Stands in for ``write_rows``: writes as often as ``may`` is released, and remembers who called."""

    def __init__(self) -> None:
        self.callers, self._write, self.may = list[int](), hdf5.write_rows, threading.Semaphore(0)

    def __call__(self, dataset: h5py.Dataset, first: int, rows: NDArray[np.uint16]) -> None:
        assert self.may.acquire(timeout=60)
        self.callers.append(threading.get_ident())
        self._write(dataset, first, rows)


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what a test sets."""
    for name in ("BLOCK_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(feature_writer, name, getattr(feature_writer, name))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    """Every row is handed to it at once."""
    set_block_bytes(monkeypatch, 0)
    held = HeldDisk()
    monkeypatch.setattr(hdf5, "write_rows", held)
    return held


def test_the_caller_writes_nothing_and_does_not_wait(tmp_path, disk):
    writer = open_writer(tmp_path / "a.h5")
    documents = [make_document(index, 40) for index in range(20)]
    for document in documents:
        writer.append(*document)
    assert not disk.callers
    disk.may.release(20)
    assert_holds(OpenDocuments(writer), documents)
    writer.close()
    assert len(disk.callers) == 20 and threading.get_ident() not in disk.callers
    assert_file_holds(tmp_path / "a.h5", documents)


def test_a_caller_too_far_ahead_waits_and_the_time_is_told(tmp_path, disk, monkeypatch, caplog):
    true_take, waits = feature_writer.WriteBehind._take_first, list[int]()

    def take_first(thread: feature_writer.WriteBehind) -> None:
        waits.append(thread.num_bytes)
        disk.may.release()
        true_take(thread)

    monkeypatch.setattr(feature_writer.WriteBehind, "_take_first", take_first)
    documents = [make_document(index, 40) for index in range(12)]
    size = documents[0][2].nbytes
    monkeypatch.setattr(feature_writer, "QUEUE_BYTES", 3 * size)
    cache = open_cache(tmp_path)
    writer = cache.begin_step(4, 9)
    for document in documents:
        writer.append(*document)
        assert writer._thread.num_bytes <= 3 * size
    assert waits == [3 * size] * 9 and writer.waited_seconds > 0
    writer._thread.waited_seconds = 3.0
    cache.end_step()
    assert "decoding waited 3.00 s" in caplog.text
    assert_file_holds(RunFolder(tmp_path).feature_cache(4, 0), documents)


def test_rows_that_are_used_again_while_the_thread_is_behind(tmp_path, disk):
    """Evicted documents wait to be written when longer ones get their rows, in pieces."""
    writer = open_writer(tmp_path / "a.h5", max_bytes=120_000)
    documents = [make_document(index, length, 3) for index, length in enumerate([*[10, 40] * 9, 100, 60])]
    for document in documents[:-2]:
        writer.append(*document)
    old = OpenDocuments(writer)
    for document in documents[-2:]:
        writer.append(*document)
    disk.may.release(10_000)
    responses = {response.tokens.tobytes() for response in writer.kept.responses}
    kept = [document for document in documents if document[0][3:].tobytes() in responses]
    assert [len(tokens) - 3 for tokens, _, _ in kept] == [*[40] * 8, 100, 60]
    assert_holds(OpenDocuments(writer), kept)
    assert old.read(0) is None, "an old view says what was evicted"
    assert_same(old.read(len(old) - 1), kept[-3])
    writer.close()
    with h5py.File(tmp_path / "a.h5") as file:
        assert len(file["extents"]) > 2 * len(kept) + 5, "the longest lies in pieces"
    assert_file_holds(tmp_path / "a.h5", kept)


def test_abandoning_does_not_write_what_is_pending(tmp_path, disk):
    writer = open_writer(tmp_path / "a.h5")
    for index in range(40):
        writer.append(*make_document(index, 40))
    threading.Timer(0.1, disk.may.release, [40]).start()
    writer.abandon()
    writer.abandon()
    assert len(disk.callers) <= 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("notices", ["append", "end"])
def test_a_full_disk_ends_the_steps_file_and_not_the_run(tmp_path, notices, caplog, monkeypatch):
    set_block_bytes(monkeypatch, 0)
    cache = open_cache(tmp_path)
    run_step(cache, 0)
    writer = cache.begin_step(1, 9)
    writer._file._bytes.error = OSError(28, "No space left on device")
    view = cache.own_documents()
    for index in range(3 if notices == "append" else 1):
        cache.append(*make_document(index, 40))
        with suppress(WriteError):
            writer._thread.drain()
    with cache.tolerating_write_errors():
        cache.end_step()
    assert len(caplog.messages) == 1 and "rank-0000.h5.part: No space left on device;" in caplog.messages[0]
    assert "drafter.cache_folder" in caplog.messages[0] and "run.folder" not in caplog.messages[0]
    cache.append(*make_document(9, 40))
    assert not view.is_current and len(cache.own_documents()) == 0 and len(cache.previous_step_files()) == 1
    run_step(cache, 2)
    assert_file_holds(RunFolder(tmp_path).feature_cache(2, 0), [make_document(2, 50)])  # the next step tries again
