"""The checkpoint store: what comes back, and what killed runs, full disks and flipped bits do to it.

Ranks are threads here: the store needs of a world only ``rank``, ``size``, ``hostname`` and ``allgather``.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tlt_hpc.checkpoint import store as store_module
from tlt_hpc.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore

STATE = {"cursor": {"epoch": 1, "position": 7}, "tuner": [0.1, 2.5e-17], "name": "ü"}


class ThreadWorld:
    """One rank of several that are threads of this process."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.hostname = rank, size, f"node{rank}"
        self._board, self._barrier = board, barrier

    def allgather(self, item: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(item)
        self._barrier.wait(60)
        items = [pickle.loads(each) for each in self._board]
        self._barrier.wait(60)
        return items


def on_threads(size: int, function: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What ``function`` returns on each rank, or the CheckpointError that it raised."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            return function(ThreadWorld(rank, size, board, barrier))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def make_shards(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    policy = {f"layer{rank}.weight": torch.full((3, 2), float(step + rank)), f"layer{rank}.bias": torch.arange(4)}
    return {"policy": policy, "drafter": {"fc": torch.randn(2, 2).bfloat16()} if rank == 0 else {}}


def save(store: CheckpointStore, step: int, size: int = 2) -> list[Any]:
    return on_threads(size, lambda world: store.save(step, world, make_shards(world.rank, step), STATE))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def newest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.newest()
    assert checkpoint is not None
    return checkpoint


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- in good order ---


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_was_saved_comes_back(store: CheckpointStore, folder: Path, size: int) -> None:
    assert save(store, 10, size) == [folder / "step-000010"] * size
    checkpoint = pickle.loads(pickle.dumps(newest(store)))  # one rank finds it and broadcasts it
    assert checkpoint.step == 10 and checkpoint.state == STATE
    assert checkpoint.names("policy") == sorted(f"layer{r}.{k}" for r in range(size) for k in ("weight", "bias"))
    for rank in range(size):
        for name, tensor in make_shards(rank, 10)["policy"].items():
            read = checkpoint.read("policy", name)
            assert torch.equal(read, tensor) and read.dtype == tensor.dtype
    assert checkpoint.read("drafter", "fc").dtype == torch.bfloat16
    assert checkpoint.names("reference") == []


def test_one_file_per_rank_and_part_in_safetensors(store: CheckpointStore, folder: Path) -> None:
    save(store, 10)
    expected = ["drafter-00000-of-00002", "policy-00000-of-00002", "policy-00001-of-00002"]
    assert names_in(folder / "step-000010") == [f"{name}.safetensors" for name in expected] + ["state.json"]
    with safe_open(folder / "step-000010" / "policy-00001-of-00002.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["layer1.bias", "layer1.weight"]


def test_the_newest_are_kept(store: CheckpointStore, folder: Path) -> None:
    for step in (2, 4, 10, 1_000_000):
        save(store, step)
    assert names_in(folder) == ["step-000010", "step-1000000"]
    assert newest(store).step == 1_000_000


def test_no_folder_and_no_checkpoint_is_none(store: CheckpointStore, folder: Path) -> None:
    assert store.newest() is None
    folder.mkdir()
    (folder / "notes.txt").write_text("not a checkpoint")
    assert store.newest() is None


def test_a_tensor_that_is_not_there_is_named(store: CheckpointStore) -> None:
    save(store, 10)
    with pytest.raises(CheckpointError, match=r"no tensor 'other' in its part 'policy'.*choose another run.name"):
        newest(store).read("policy", "other")


def test_a_step_in_good_order_is_left_as_it_is(store: CheckpointStore, folder: Path) -> None:
    save(store, 10)
    before = (folder / "step-000010" / "state.json").stat().st_mtime_ns
    assert save(store, 10) == [folder / "step-000010"] * 2
    assert (folder / "step-000010" / "state.json").stat().st_mtime_ns == before


# --- killed runs and damage ---


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def replace_digit(path: Path) -> None:
    text = path.read_text()
    assert '"position": 7' in text
    path.write_text(text.replace('"position": 7', '"position": 8'))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("policy-00001-of-00002.safetensors", flip_last_byte, "changed since it was written"),
        ("drafter-00000-of-00002.safetensors", truncate, "bytes, of"),
        ("policy-00000-of-00002.safetensors", Path.unlink, "No such file"),
        ("state.json", truncate, "state.json: invalid json"),
        ("state.json", replace_digit, "state.json: changed since it was written"),
        ("state.json", Path.unlink, "state.json: No such file"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(
    store: CheckpointStore,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    save(store, 4)
    save(store, 6)
    damage(folder / "step-000006" / file)
    with caplog.at_level(logging.WARNING):
        assert newest(store).step == 4
    (warning,) = caplog.messages
    assert "step-000006" in warning and reason in warning and "\n" not in warning


def test_a_checkpoint_of_another_program_is_skipped(
    store: CheckpointStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 4)
    foreign = folder / "step-000005"
    foreign.mkdir()
    (foreign / "state.json").write_text('{"format": "theirs", "step": 5}')
    assert newest(store).step == 4
    assert len(caplog.messages) == 1 and "step-000005" in caplog.messages[0]


def test_a_renamed_checkpoint_is_skipped(store: CheckpointStore, folder: Path) -> None:
    save(store, 4)
    save(store, 6)
    (folder / "step-000006").rename(folder / "step-000009")
    assert newest(store).step == 4


def test_nothing_but_damaged_ones_is_an_error(store: CheckpointStore, folder: Path) -> None:
    save(store, 4)
    truncate(folder / "step-000004" / "state.json")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* remove them all to start afresh"):
        store.newest()


def test_what_a_killed_run_left_is_removed_at_the_next_save(store: CheckpointStore, folder: Path) -> None:
    save(store, 4)
    for name in ("step-000006.part", "step-000002.part"):
        (folder / name).mkdir()
        (folder / name / "policy-00000-of-00002.safetensors").write_bytes(b"half")
    assert newest(store).step == 4
    save(store, 6)
    assert names_in(folder) == ["step-000004", "step-000006"]
    assert newest(store).step == 6


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(store: CheckpointStore, folder: Path) -> None:
    save(store, 4)
    flip_last_byte(folder / "step-000004" / "policy-00000-of-00002.safetensors")
    save(store, 4)
    assert newest(store).step == 4
    save(store, 5)
    assert names_in(folder) == ["step-000004", "step-000005"]


def test_a_later_damaged_checkpoint_takes_no_place_of_a_good_one(store: CheckpointStore, folder: Path) -> None:
    for step in (4, 9):
        save(store, step)
    truncate(folder / "step-000009" / "state.json")
    save(store, 5)
    assert names_in(folder) == ["step-000004", "step-000005", "step-000009"]


class Killed(BaseException):
    """Stands for the end of the process: nobody catches it."""


@pytest.mark.parametrize("moment", ["_write_shards", "_write_manifest", "sync"])
def test_a_run_killed_while_saving_leaves_the_earlier_one(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save(store, 4, size=1)

    def die(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store_module, moment, die)
        with pytest.raises(Killed):
            save(store, 6, size=1)
    assert names_in(folder) == ["step-000004", "step-000006.part"]
    assert newest(store).step == 4
    save(store, 6, size=1)
    assert newest(store).step == 6


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    save(store, 4)
    write = store_module.save_file

    def full_disk(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        if path.name.startswith(f"policy-{failing_rank:05d}"):
            raise OSError(28, "No space left on device")
        write(dict(tensors), path)

    monkeypatch.setattr(store_module, "save_file", full_disk)
    errors = save(store, 6)
    assert len({str(error) for error in errors}) == 1
    for expected in (f"rank {failing_rank} on node{failing_rank}", f"policy-{failing_rank:05d}", "No space left"):
        assert all(isinstance(error, CheckpointError) and expected in str(error) for error in errors), errors
    assert newest(store).step == 4


def test_a_folder_that_cannot_be_made_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    errors = save(CheckpointStore(tmp_path / "file" / "checkpoints", keep=1), 4)
    assert all(isinstance(error, CheckpointError) and "rank 0" in str(error) for error in errors), errors


def test_the_manifest_fails_on_all(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_write_manifest", full_disk)
    assert all("No space left" in str(error) for error in save(store, 4))
    assert store.newest() is None


# --- the digest of large files ---


def test_the_digest_covers_all_of_a_small_file_and_both_ends_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MEBIBYTE", 8)
    monkeypatch.setattr(store_module, "MOST_BLOCKS", 4)
    for size, covered in [(32, range(32)), (7, range(7)), (33, (0, 7, 25, 32)), (1000, (0, 7, 335, 992, 999))]:
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        digests = {store_module._digest(path)}
        for place in covered:
            content = bytearray(size)
            content[place] = 1
            path.write_bytes(content)
            digests.add(store_module._digest(path))
        assert len(digests) == len(covered) + 1, size
