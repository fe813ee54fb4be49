"""The feature cache: what is appended is what is read, from the open file and the closed one; nothing half-written."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tlt_hpc.storage.feature_cache import Document, Documents, FeatureCache, FeatureCacheReader, FeatureCacheWriter
from tlt_hpc.storage.folder import RunFolder, part_of
from tlt_hpc.storage.hdf5 import DamagedFile

LAYERS, HIDDEN = 2, 8
Arrays = tuple[NDArray[np.int32], int, NDArray[np.uint16]]


def make_document(seed: int, num_tokens: int, num_missing: int = 1) -> Arrays:
    rng = np.random.default_rng([seed, num_tokens])
    tokens = rng.integers(0, 2**31 - 1, num_tokens, dtype=np.int32)
    num_features = max(0, num_tokens - num_missing)
    features = rng.integers(0, 2**16, (num_features, LAYERS, HIDDEN), dtype=np.uint16)
    return tokens, int(rng.integers(0, num_tokens + 1)), features


def open_writer(path: Path, **changes: int) -> FeatureCacheWriter:
    return FeatureCacheWriter(path, LAYERS, HIDDEN, step=4, weight_version=9, **changes)


def open_cache(path: Path, rank: int = 0, max_bytes: int = 10**9, num_ranks: int | None = None) -> FeatureCache:
    return FeatureCache(RunFolder(path), rank, LAYERS, HIDDEN, max_bytes, num_ranks)


def assert_holds(documents: Documents, expected: list[Arrays]) -> None:
    assert len(documents) == len(expected)
    assert documents.lengths.tolist() == [len(tokens) - prompt_length for tokens, prompt_length, _ in expected]
    for index in reversed(range(len(expected))):
        found, (tokens, prompt_length, features) = documents.read(index), expected[index]
        assert isinstance(found, Document) and found.prompt_length == prompt_length and found.weight_version == 9
        assert found.tokens.dtype == np.int32 and np.array_equal(found.tokens, tokens)
        assert found.features.dtype == np.uint16 and np.array_equal(found.features, features)


def run_step(cache: FeatureCache, step: int, num_tokens: int = 50) -> None:
    writer = cache.begin_step(step, weight_version=9)
    writer.append(*make_document(step, num_tokens))
    cache.end_step()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3)), max_size=30),
    buffer_bytes=st.sampled_from([0, 3_000, 20_000, 2**25]),
    flush_at=st.sets(st.integers(0, 30), max_size=3),
)
def test_open_and_closed_file_hold_what_was_appended(
    tmp_path: Path, shapes: list[tuple[int, int]], buffer_bytes: int, flush_at: set[int]
) -> None:
    expected = [make_document(index, *shape) for index, shape in enumerate(shapes)]
    writer = open_writer(tmp_path / "a.h5", buffer_bytes=buffer_bytes)
    for index, document in enumerate(expected):
        before = writer.documents()
        writer.append(*document)
        assert len(before) == index, "a view does not grow"
        if index in flush_at:
            writer.flush()
    assert_holds(writer.documents(), expected)
    assert writer.num_documents == len(expected)
    assert writer.num_tokens == sum(len(tokens) for tokens, _, _ in expected)
    assert writer.num_bytes == sum(tokens.nbytes + features.nbytes for tokens, _, features in expected)
    writer.close()
    with FeatureCacheReader(tmp_path / "a.h5") as reader:
        assert_holds(reader, expected)
        assert (reader.step, reader.weight_version, reader.num_tokens) == (4, 9, writer.num_tokens)
    (tmp_path / "a.h5").unlink()


def test_the_caller_may_reuse_its_arrays(tmp_path: Path) -> None:
    writer, (tokens, prompt_length, features) = open_writer(tmp_path / "a.h5"), make_document(0, 20)
    expected = (tokens.copy(), prompt_length, features.copy())
    writer.append(tokens, prompt_length, features)
    tokens[:], features[:] = 0, 0
    assert_holds(writer.documents(), [expected])
    writer.abandon()


def test_chunks_of_a_long_file_are_one_mebibyte(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "a.h5", buffer_bytes=2**21)
    expected = [make_document(index, 40_000) for index in range(4)]
    for document in expected:
        writer.append(*document)
    writer.close()
    with FeatureCacheReader(tmp_path / "a.h5") as reader:
        assert_holds(reader, expected)
    with h5py.File(tmp_path / "a.h5") as file:
        features = file["features"]
        assert features.attrs["dtype"] == b"bfloat16" and features.dtype == np.uint16
        assert np.prod(features.chunks) * 2 == 2**20 and features.compression is None


def test_lengths_need_no_features(tmp_path: Path) -> None:
    """The features' chunk is damaged, and the lengths are still there."""
    path = tmp_path / "a.h5"
    writer = open_writer(path)
    document = make_document(0, 500)
    writer.append(*document)
    writer.close()
    whole = path.read_bytes()
    flip(path, whole.index(document[2][100].tobytes()))
    with FeatureCacheReader(path) as reader:
        assert reader.lengths.tolist() == [500 - document[1]]
        with pytest.raises(DamagedFile, match=r"a\.h5: damaged feature cache: .*; delete it; the drafter"):
            reader.read(0)


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def read_all(path: Path) -> list[Arrays]:
    with FeatureCacheReader(path) as reader:
        found = [reader.read(index) for index in range(len(reader))]
    return [(document.tokens, document.prompt_length, document.features) for document in found]


def is_same(left: list[Arrays], right: list[Arrays]) -> bool:
    return len(left) == len(right) and all(
        a[1] == b[1] and np.array_equal(a[0], b[0]) and np.array_equal(a[2], b[2])
        for a, b in zip(left, right, strict=True)
    )


@pytest.fixture
def closed_file(tmp_path: Path) -> tuple[Path, list[Arrays]]:
    writer, expected = open_writer(tmp_path / "a.h5", buffer_bytes=2_000), [make_document(i, 30 + i) for i in range(9)]
    for document in expected:
        writer.append(*document)
    writer.close()
    return tmp_path / "a.h5", expected


def test_every_truncation_is_noticed(closed_file: tuple[Path, list[Arrays]]) -> None:
    path, expected = closed_file
    whole = path.read_bytes()
    assert is_same(read_all(path), expected)
    for length in [*range(0, 200), *range(200, len(whole), 197), *range(len(whole) - 50, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match=r"a\.h5: damaged feature cache"):
            read_all(path)


def test_a_flipped_bit_is_noticed_or_lies_in_unused_space(closed_file: tuple[Path, list[Arrays]]) -> None:
    path, expected = closed_file
    whole, rng, num_noticed = path.read_bytes(), random.Random(0), 0
    for place in rng.sample(range(len(whole)), 600):
        flip(path, place, rng.randrange(8))
        try:
            assert is_same(read_all(path), expected), f"a flip at byte {place} was read as data"
        except DamagedFile:
            num_noticed += 1
        path.write_bytes(whole)
    assert num_noticed > 200


def test_a_step_is_a_part_until_it_ends(tmp_path: Path) -> None:
    cache, path = open_cache(tmp_path), RunFolder(tmp_path).feature_cache(4, 0)
    cache.begin_step(4, 9).append(*make_document(0, 30))
    assert part_of(path).exists() and not path.exists()
    assert_holds(cache.own_documents(), [make_document(0, 30)])
    cache.end_step()
    assert path.exists() and not part_of(path).exists()


def test_an_abandoned_step_leaves_nothing(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.begin_step(4, 9).append(*make_document(0, 30))
    cache.abandon_step()
    cache.abandon_step()
    assert list(RunFolder(tmp_path).cache.rglob("*.h5*")) == []
    run_step(cache, 4)


def test_previous_step_of_all_ranks_but_the_unusable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caches = [open_cache(tmp_path, rank) for rank in range(4)]
    for cache in caches:
        run_step(cache, 0)
    odd = FeatureCache(RunFolder(tmp_path), 4, LAYERS, HIDDEN + 1, 10**9)
    odd.begin_step(0, 9)
    odd.end_step()
    damaged = RunFolder(tmp_path).feature_cache(0, 2)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    caches[1].begin_step(1, 9)
    usable = [RunFolder(tmp_path).feature_cache(0, rank) for rank in (0, 1, 3)]
    assert caches[1].previous_step_files() == caches[1].previous_step_files() == usable
    assert [str(damaged) in message for message in caplog.messages] == [True, False], "one warning line each"
    assert "features [layer, hidden] = (2, 9), but this run has (2, 8)" in caplog.messages[1]


def test_the_first_step_has_no_previous_files(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.begin_step(0, 0)
    assert cache.previous_step_files() == []


def test_this_step_and_the_last_are_kept(tmp_path: Path) -> None:
    cache, folder = open_cache(tmp_path), RunFolder(tmp_path)
    for step in range(4):
        run_step(cache, step)
    assert folder.cache_steps() == [2, 3]


def test_over_max_bytes_the_older_step_goes(tmp_path: Path) -> None:
    run_step(open_cache(tmp_path), 0)
    one_step = open_cache(tmp_path).num_bytes
    small, folder = open_cache(tmp_path, max_bytes=one_step * 3 // 2), RunFolder(tmp_path)
    for step in (1, 2, 3):
        run_step(small, step)
        assert folder.cache_steps() == [step] and small.num_bytes <= one_step * 3 // 2
    enough = open_cache(tmp_path, max_bytes=one_step * 2)
    run_step(enough, 4)
    assert folder.cache_steps() == [3, 4]


def test_documents_over_max_bytes_are_refused_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents = [make_document(index, 50) for index in range(5)]
    num_bytes = documents[0][0].nbytes + documents[0][2].nbytes
    writer = open_cache(tmp_path, max_bytes=2 * num_bytes).begin_step(0, 9)
    for document in documents:
        writer.append(*document)
    assert (writer.num_documents, writer.num_refused, writer.num_bytes) == (2, 3, 2 * num_bytes)
    assert len(caplog.messages) == 1 and "drafter.cache_bytes" in caplog.messages[0]
    assert_holds(writer.documents(), documents[:2])


def test_only_own_files_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in (0, 1, 4):
        run_step(open_cache(tmp_path, rank), 0)
        open_cache(tmp_path, rank).begin_step(1, 9)  # never ended: half-written
    assert open_cache(tmp_path, 1).recover() == 1
    run_step(open_cache(tmp_path, 1), 5)
    assert folder.feature_caches(0) == [folder.feature_cache(0, 0), folder.feature_cache(0, 4)]
    assert folder.cache_parts() == [part_of(folder.feature_cache(1, rank)) for rank in (0, 4)]


def test_files_of_ranks_that_are_gone_have_an_owner(tmp_path: Path) -> None:
    for rank in range(4):
        run_step(open_cache(tmp_path, rank), 0)
    for rank in range(2):
        run_step(open_cache(tmp_path, rank, num_ranks=2), 5)
    assert RunFolder(tmp_path).cache_steps() == [5]


def test_a_rewound_run_drops_its_later_steps_and_replaces_its_own(tmp_path: Path) -> None:
    cache, folder = open_cache(tmp_path), RunFolder(tmp_path)
    for step in range(5):
        run_step(cache, step)
    cache.begin_step(3, 9)
    assert folder.cache_steps() == [3]
    assert_holds(cache.own_documents(), [])
    cache.end_step()
    assert is_same(read_all(folder.feature_cache(3, 0)), [])


def test_recover_reports_a_damaged_file_and_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_step(open_cache(tmp_path), 0)
    path = RunFolder(tmp_path).feature_cache(0, 0)
    path.write_bytes(path.read_bytes()[:500])
    assert open_cache(tmp_path).recover() == 0
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0] and "\n" not in caplog.messages[0]


def test_killed_at_random_moments_keeps_what_was_committed(tmp_path: Path) -> None:
    folder, rng = RunFolder(tmp_path), random.Random(2)
    first = num_parts = 0
    for _ in range(40):
        first = kill_a_writer(folder, first, rng.uniform(0.0, 0.04))
        held = [step for step in folder.cache_steps() if folder.feature_caches(step)]
        assert first - 1 in held, "a step was reported and is lost"
        assert first == 1 or len({first - 2, first} & {*held}) > 0, "the step before goes only once the next is whole"
        for step in folder.cache_steps():
            for path in folder.feature_caches(step):
                assert is_same(read_all(path), [make_document(step * 100 + i, 40) for i in range(20)])
        num_now = len(folder.cache_parts())
        assert open_cache(tmp_path).recover() == num_now and folder.cache_parts() == []
        num_parts += num_now
    assert num_parts > 5 and first > 40, "the kills hit no open file, or the children got nothing done"


def kill_a_writer(folder: RunFolder, first: int, after_seconds: float) -> int:
    """Fork a child that writes steps from ``first``, kill it, and return the step after the last that it reported."""
    reader, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        cache = FeatureCache(folder, 0, LAYERS, HIDDEN, 10**9)
        for step in range(first, first + 1000):
            writer = cache.begin_step(step, 9)
            for i in range(20):
                writer.append(*make_document(step * 100 + i, 40))
                if i % 5 == 0:
                    writer.flush()
            cache.end_step()
            os.write(pipe, b".")
        os._exit(0)
    os.close(pipe)
    os.read(reader, 1)  # the first step is on disk
    time.sleep(after_seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as reports:
        return first + 1 + len(reports.read())


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from tlt_hpc.storage.feature_cache import FeatureCacheWriter
from tlt_hpc.storage.folder import WriteError
path = Path(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in [0, 1000, 5000, 100_000, 2**20, 3 * 2**20, 5 * 2**20]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        writer = FeatureCacheWriter(path, 1, 256, 0, 0, buffer_bytes=2**20)
        try:
            for _ in range(100):
                writer.append(np.zeros(100, np.int32), 10, np.ones((100, 1, 256), np.uint16))
            writer.close()
        finally:
            writer.abandon()
        sys.exit("it was written")
    except WriteError as error:
        assert "File too large" in str(error) and chr(10) not in str(error), error
    assert not list(path.parent.iterdir()), limit
    print("refused")
"""


def test_a_full_disk_is_one_error_and_nothing_is_published(tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-c", FULL_DISK, str(tmp_path / "a.h5")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 7


def test_appending_is_cheap_enough_for_the_decode_path(tmp_path: Path) -> None:
    """At the embedded model's size, flushes included; the bound is loose since tests share their machine."""
    writer = FeatureCacheWriter(tmp_path / "a.h5", 1, 128, 0, 0)
    tokens, features = np.zeros(80, np.int32), np.ones((79, 1, 128), np.uint16)
    start = time.process_time()
    for _ in range(4000):  # 82 MB: two flushes
        writer.append(tokens, 12, features)
    seconds = (time.process_time() - start) / 4000
    writer.abandon()
    assert seconds < 3e-4, f"{seconds * 1e6:.0f} us an append"
