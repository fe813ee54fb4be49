"""The checkpoint store: what comes back, what is written meanwhile, and what kills, full disks and flipped bits do.

Ranks are threads here: the store needs of a world only its ranks' places and ``allgather``.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_world import OneRank, ThreadWorld, on_threads
from safetensors import safe_open
from safetensors.torch import save_file

from tlt_hpc.checkpoint import save as save_module
from tlt_hpc.checkpoint import store as store_module
from tlt_hpc.checkpoint.manifest import Checkpoint, CheckpointError, File, FlatRange, ListedFile, Placed, write_manifest
from tlt_hpc.checkpoint.save import HostBuffer, Save
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common import files
from tlt_hpc.common.errors import UserError
from tlt_hpc.common.host_memory import available_bytes
from tlt_hpc.models import weight_files
from tlt_hpc.models.piece import Cut, Piece, own_tensor_pieces
from tlt_hpc.run.saving import begin_drafter_save_if_due
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import best_evaluated_step

STATE = {"cursor": {"epoch": 1, "position": 7}, "tuner": [0.1, 2.5e-17], "name": "ü"}


def make_shards(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    policy = {f"layer{rank}.weight": torch.full((3, 2), float(step + rank)), f"layer{rank}.bias": torch.arange(4)}
    return {"policy": policy, "drafter": {"fc": torch.randn(2, 2).bfloat16()} if rank == 0 else {}}


Stores = list[CheckpointStore]
"""Each rank's store of one folder."""


def open_stores(folder: Path) -> Stores:
    return [CheckpointStore(folder, keep=2) for _ in range(4)]


def save(stores: Stores, step: int, size: int = 2) -> list[Any]:
    def save_on(world: ThreadWorld) -> Any:
        return stores[world.rank].save(step, world, make_shards(world.rank, step), STATE)

    return on_threads(size, save_on)


@pytest.fixture
def store(folder: Path) -> Stores:
    return open_stores(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """Have ``act`` called with the path of each file of tensors before it is written."""
    write = save_module.write_safetensors_file
    monkeypatch.setattr(save_module, "write_safetensors_file", lambda path, tensors: (act(path), write(path, tensors)))


def newest(store: Stores) -> Checkpoint:
    checkpoint = store[0].open_newest()
    assert checkpoint is not None
    return checkpoint


def assert_holds_shards(checkpoint: Checkpoint, size: int) -> None:
    wanted = {name: t for rank in range(size) for name, t in make_shards(rank, checkpoint.step)["policy"].items()}
    assert checkpoint.tensor_names("policy") == sorted(wanted)
    for name, tensor in wanted.items():
        read = checkpoint.read_tensor("policy", name)
        assert torch.equal(read, tensor) and read.dtype == tensor.dtype, name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- in good order ---


@pytest.mark.parametrize("size", [1, 4])
def test_what_was_saved_comes_back(store, folder, size):
    assert save(store, 10, size) == [folder / "step-000010"] * size
    checkpoint = pickle.loads(pickle.dumps(newest(store)))  # one rank finds it and broadcasts it
    assert checkpoint.step == 10 and checkpoint.state == STATE
    assert_holds_shards(checkpoint, size)
    assert checkpoint.read_tensor("drafter", "fc").dtype == torch.bfloat16
    assert checkpoint.tensor_names("reference") == []
    with pytest.raises(CheckpointError, match=r"no tensor 'other' in its part 'policy'.*choose another run.name"):
        checkpoint.read_tensor("policy", "other")
    with safe_open(folder / "step-000010" / f"policy-{size - 1:05d}-of-{size:05d}.safetensors", "pt") as file:
        assert sorted(file.keys()) == [f"layer{size - 1}.bias", f"layer{size - 1}.weight"]
    before = (folder / "step-000010" / "state.json").stat().st_mtime_ns
    save(store, 10, size)
    assert (folder / "step-000010" / "state.json").stat().st_mtime_ns == before, "in good order, so left as it is"


def test_the_newest_are_kept(store, folder, monkeypatch):
    for step in (2, 4, 10, 1_000_000):
        save(store, step)
    assert names_in(folder) == ["step-000010", "step-1000000"] and newest(store).step == 1_000_000
    monkeypatch.setattr(save_module.shutil, "rmtree", Mock(side_effect=Killed))
    with pytest.raises(Killed):
        save(store, 1_000_001, size=1)
    assert names_in(folder) == ["step-000010.part", "step-1000000", "step-1000001"], "no half of one has a final name"


class Killed(BaseException):
    """Stands for the end of the process: no code catches it."""


# --- killed runs and damage ---


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


replace_digit = partial(replace, old='"position": 7', new='"position": 8')


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("policy-00001-of-00002.safetensors", flip_last_byte, "changed since it was written"),
        ("drafter-00000-of-00002.safetensors", truncate, "bytes, of"),
        ("state.json", truncate, "state.json: invalid json"),
        ("state.json", replace_digit, "state.json: changed since it was written"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(store, folder, caplog, file, damage, reason):
    save(store, 4)
    save(store, 6)
    damage(folder / "step-000006" / file)
    with caplog.at_level(logging.WARNING):
        assert newest(store).step == 4
    (warning,) = caplog.messages
    assert "step-000006" in warning and reason in warning and "\n" not in warning
    save(store, 5)
    assert names_in(folder) == ["step-000004", "step-000005", "step-000006"], "it takes no place of a good one"
    save(store, 6)
    assert newest(store).step == 6, "it is replaced"
    for step in (5, 6):
        truncate(folder / f"step-{step:06d}" / "state.json")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* remove them all to start afresh"):
        store[0].open_newest()


@pytest.mark.parametrize("name", ["state.json", "policy-00001-of-00002.safetensors"])
def test_one_that_the_disk_refuses_to_read_is_not_called_damaged(store, folder, monkeypatch, caplog, name):
    """Nor is an earlier one taken in its place: its steps would be generated again."""
    for step in (4, 6):
        save(store, step)
    refused, true_open = folder / "step-000006" / name, os.open

    def refuse(path: Any, *how: int) -> int:
        if Path(path) == refused:
            raise OSError(116, "Stale file handle", str(path))
        return true_open(path, *how)

    monkeypatch.setattr(os, "open", refuse)
    for look in (store[0].open_newest, partial(store[0].open_step, 6), partial(store[0].open_checkpoints_within, 1, 9)):
        with pytest.raises(UserError, match=rf"^{refused}: Stale file handle; .* start again; nothing was changed$"):
            look()
    assert not caplog.records
    monkeypatch.undo()
    assert newest(store).step == 6


def test_a_renamed_one_is_skipped(store, folder):
    save(store, 4)
    save(store, 6)
    (folder / "step-000006").rename(folder / "step-000009")
    assert newest(store).step == 4


def test_leftovers_that_cannot_be_removed_are_named_on_all_ranks(store, folder, monkeypatch):
    left = folder / "step-000002.part"
    left.mkdir(parents=True)
    stale = OSError(116, "Stale file handle", str(left))
    monkeypatch.setattr(save_module.shutil, "rmtree", Mock(side_effect=stale))
    wanted = f"cannot remove leftovers: {left}: Stale file handle; remove {folder}/*.part"
    assert [str(error) for error in save(store, 4)] == [wanted] * 2


@pytest.mark.parametrize("moment", ["write_safetensors_file", "write_manifest", "sync"])
def test_a_run_killed_while_saving_leaves_the_earlier_one(store, folder, monkeypatch, moment):
    save(store, 4, size=1)
    with monkeypatch.context() as patch:
        patch.setattr(save_module, moment, Mock(side_effect=Killed))
        with pytest.raises(Killed):
            save(store, 6, size=1)
    assert names_in(folder) == ["step-000004", "step-000006.part"]
    again = open_stores(folder)  # of the run that continues
    assert newest(again).step == 4
    (folder / "step-000002.part").mkdir()
    save(again, 6, size=1)
    assert newest(again).step == 6 and names_in(folder) == ["step-000004", "step-000006"]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all(store, folder, monkeypatch, failing_rank):
    save(store, 4)

    def full_disk(path: Path) -> None:
        if path.name.startswith(f"policy-{failing_rank:05d}"):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        before_writing(patch, full_disk)
        errors = save(store, 6)
    assert len({str(error) for error in errors}) == 1
    said = rf"rank {failing_rank} on node{failing_rank}.*policy-{failing_rank:05d}.*No space left"
    assert all(isinstance(error, CheckpointError) and re.search(said, str(error)) for error in errors), errors
    assert newest(store).step == 4
    save(store, 6)
    assert newest(store).step == 6 and names_in(folder) == ["step-000004", "step-000006"]


# --- the digest of large files ---


def test_the_digest_covers_all_of_a_small_file_and_both_ends_of_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MEBIBYTE", 8)
    monkeypatch.setattr(files, "_MAX_BLOCKS", 4)
    for size, covered in [(32, range(32)), (33, (0, 7, 25, 32)), (1000, (0, 7, 335, 992, 999))]:
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        digests = {files.sampled_digest(path)}
        for place in covered:
            content = bytearray(size)
            content[place] = 1
            path.write_bytes(content)
            digests.add(files.sampled_digest(path))
        assert len(digests) == len(covered) + 1, size


# --- in the background ---


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until the event is set."""
    go = threading.Event()

    def wait(path: Path) -> None:
        assert go.wait(60)

    before_writing(monkeypatch, wait)
    yield go
    go.set()


def test_what_is_saved_is_the_state_at_begin(tmp_path, disk):
    store = CheckpointStore(tmp_path, keep=1)
    weight, steps, state = torch.randn(300, 70), torch.tensor(7), {"tuner": [1.0]}
    wanted = weight.clone()
    store.begin_save_all_ranks(5, OneRank(), {"policy": {"weight": weight, "steps": steps}}, state)
    weight.mul_(-1), steps.add_(1), state["tuner"].append(2.0)
    disk.set()
    store.wait_for_save(OneRank())
    checkpoint = store.open_step(5)
    assert torch.equal(checkpoint.read_tensor("policy", "weight"), wanted)
    assert checkpoint.read_tensor("policy", "steps") == 7 and checkpoint.state == {"tuner": [1.0]}


def evaluated(step: int, **scores: float) -> str:
    """The line of the step that so many steps end with; a data set's mean over samples, or its greedy answers'."""
    figures = {f"val-core/{name.replace('_', '/acc/')}".replace("mean4", "mean@4"): scores[name] for name in scores}
    return json.dumps({"training/global_step": float(step)} | figures) + "\n"


def test_the_best_evaluated_step_is_by_the_mean_over_data_sets(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        evaluated(10, gcd_mean4=0.9, gcd_greedy=0.1),  # of other data sets than the newest evaluation
        evaluated(20, gcd_mean4=0.4, gcd_greedy=0.9, math_mean4=0.6),
        evaluated(30, gcd_mean4=0.8, gcd_greedy=0.1, math_mean4=0.3),
        evaluated(40, gcd_mean4=0.3, gcd_greedy=0.1, math_mean4=0.8),
        evaluated(50),
        evaluated(60, gcd_mean4=0.3, gcd_greedy=0.9, math_mean4=0.3),
    ]
    path.write_text("".join(lines))
    assert best_evaluated_step(path, range(10, 70, 10)) == 40, "0.55, as after 30 steps, and later"
    assert best_evaluated_step(path, [20, 60]) == 20 and best_evaluated_step(path, [50]) is None
    path.write_text("".join(evaluated(n, gcd_greedy=n / 7 % 1) for n in (5, 6, 8)))
    assert best_evaluated_step(path, [5, 6, 8]) == 6 and best_evaluated_step(tmp_path / "none", [5]) is None


def test_the_best_checkpoint_stays_beside_the_newest_through_kills_and_resumes(tmp_path):
    """What is best is read from the lines whenever old ones are removed: a kill before that loses nothing."""
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    scores = {10: 0.2, 20: 0.5, 30: 0.4, 40: 0.3, 50: 0.6, 60: 0.0, 70: 0.0}
    there = {}
    for step, score in scores.items():
        store = CheckpointStore(folder, 2, partial(best_evaluated_step, path))  # another start each time
        with pytest.MonkeyPatch.context() as killed:
            if step == 40:  # killed as the new one is there and the old ones are not removed
                killed.setattr(Save, "_remove_old_checkpoints", lambda self: None)
            store.save(step, OneRank(), {"policy": {"weight": torch.ones(2)}}, {})
        there[step] = [int(name[5:]) for name in names_in(folder)]
        with path.open("a") as file:
            file.write(evaluated(step, gcd_mean4=score))
    assert there[40] == [20, 30, 40] and there[50] == [20, 40, 50] and there[70] == [50, 60, 70]
    assert CheckpointStore(folder, 2).open_newest().step == 70


def test_no_step_waits_for_the_drafters_own_saves(tmp_path, disk, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    spot = SimpleNamespace(trained=SimpleNamespace(live_state=lambda: {"fc.weight": torch.zeros(3)}))
    job: Any = SimpleNamespace(
        drafting=SimpleNamespace(checkpoints=store, spot=spot, warned=[]), world=OneRank(), folder=RunFolder(tmp_path),
        config=SimpleNamespace(speculation=SimpleNamespace(trains_drafter=True)),
        engine=SimpleNamespace(chooser=SimpleNamespace(acceptance=SimpleNamespace(state=dict))),
    )  # fmt: skip
    for step in (2, 4, 6):
        begin_drafter_save_if_due(job, step)
    (warning,) = caplog.messages
    assert "step 4: the drafter of an earlier step is still being written to" in warning and store.is_saving
    disk.set()
    store.wait_for_save(OneRank())
    assert names_in(tmp_path) == ["step-000002"], "those that found the disk busy were left out"
    begin_drafter_save_if_due(job, 8)
    store.wait_for_save(OneRank())
    assert names_in(tmp_path) == ["step-000008"]


def test_what_a_killed_run_has_listed_is_not_taken_for_ours(store, folder, monkeypatch):
    lists = {}
    seal = save_module.Save._finalise_checkpoint

    def remember(self: save_module.Save, files: Any) -> None:
        lists.update({path.name: path.read_bytes() for path in self._part.glob("*.list")})
        seal(self, files)

    with monkeypatch.context() as patched:
        patched.setattr(save_module.Save, "_finalise_checkpoint", remember)
        save(store, 5)
    killed = (folder / "step-000005").rename(folder / "step-000006.part")
    for name, content in lists.items():
        (killed / name).write_bytes(content)
    write_late(monkeypatch, "policy-00001")
    again = open_stores(folder)
    save(again, 6)
    assert_holds_shards(newest(again), 2)


def write_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before_writing(monkeypatch, lambda path: time.sleep(0.1 * path.name.startswith(name)))


def test_a_save_ends_on_all_ranks_in_the_same_step(store, monkeypatch):
    """Of main loops that ask once a step."""
    write_late(monkeypatch, "policy-00001")

    def step_until_saved(world: ThreadWorld) -> int:
        own = store[world.rank]
        own.begin_save_all_ranks(5, world, make_shards(world.rank, 5), STATE)
        for steps in range(10_000):
            reports = world.allgather(own.poll_save_state())
            own.end_save_if_all_done(reports)
            if reports[0] is None:
                return steps
            time.sleep(0.001)
        raise AssertionError("never done")

    assert len(set(on_threads(3, step_until_saved))) == 1
    assert_holds_shards(newest(store), 3)


def test_no_room_for_the_copy_is_found_before_the_first_step_on_all_ranks(store, monkeypatch):
    no_memory = RuntimeError("not enough memory: you tried to allocate 16777216 bytes.\nStack")
    monkeypatch.setattr(save_module.torch, "empty", Mock(side_effect=no_memory))
    errors = on_threads(
        2, lambda world: store[world.rank].reserve_copy_memory_all_ranks(world, world.rank * 5, pinned=False)
    )
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "no room in host memory" in str(errors[0]) and "\n" not in str(errors[0])


def begin(stores: Stores, value: float = 0.0, size: int = 2) -> list[str]:
    """The errors of ranks that begin to save step 6, rank 1 with this value among its weights."""

    def begin_on(world: ThreadWorld) -> None:
        shards = make_shards(world.rank, 6)
        shards["policy"][f"layer{world.rank}.weight"][2, 1] = value if world.rank == 1 else 0.0
        stores[world.rank].begin_save_all_ranks(6, world, shards, STATE)

    return [str(error) for error in on_threads(size, begin_on)]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_reaches_no_checkpoint(store, value):
    """The earlier one stays, and is what the next start takes."""
    save(store, 5)
    said = "'policy/layer1.weight' holds values that are not finite, so no checkpoint was written; a resume would"
    assert [error.startswith(said) for error in begin(store, value)] == [True] * 2
    assert newest(store).step == 5 and not any(each.is_saving for each in store)


def test_no_room_for_a_save_ends_it_on_all_ranks(store, monkeypatch):
    no_memory = CheckpointError("no room in host memory")
    monkeypatch.setattr(store[1]._copy, "copy_tensor", Mock(side_effect=no_memory))
    assert begin(store, size=3) == ["no room in host memory"] * 3
    assert not any(each.is_saving for each in store)


MEMORY_FILES = {
    "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n",
    "sys/fs/cgroup/job/step/memory.stat": "inactive_file 500\n",
    "sys/fs/cgroup/job/step/memory.max": "max",
    "sys/fs/cgroup/job/memory.max": "4000000",
    "sys/fs/cgroup/job/memory.current": "3000000",
    "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 500\n",
    "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "2000000",
    "sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes": "1000000",
    "sys/fs/cgroup/memory/slurm/job/memory.stat": "cache 1\ntotal_inactive_file 700\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("cgroup", "available"),
    [
        ("0::/\n", 5000 * 1024),
        ("0::/job/step\n", 4000000 - 3000000 + 500),
        ("3:cpu:/\n2:memory:/slurm/job\n", 2000000 - 1000000 + 700),
    ],
)
def test_room_is_what_is_left_of_the_machine_and_of_the_limits_of_cgroups(tmp_path, cgroup, available):
    for name, text in (MEMORY_FILES | {"proc/self/cgroup": cgroup}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == available
    assert available_bytes(tmp_path / "nowhere") == sys.maxsize
    assert 0 < available_bytes() < 2**50


def test_a_node_that_is_too_small_for_its_ranks_is_named(store, monkeypatch):
    monkeypatch.setattr(store_module, "available_bytes", lambda: 3_000_000_000)
    monkeypatch.setattr(HostBuffer, "reserve", lambda self, num_bytes, pinned: None)

    def reserve(world: ThreadWorld, num_nodes: int) -> None:
        world.node = world.rank % num_nodes
        store[world.rank].reserve_copy_memory_all_ranks(world, 2 * 10**9, pinned=False)

    text = "node0 has 3.0 GB of host memory left, and to save a checkpoint its ranks copy 4.0 GB"
    errors = on_threads(2, lambda world: reserve(world, 1))
    assert all(isinstance(error, CheckpointError) and text in str(error) for error in errors), errors
    assert on_threads(2, lambda world: reserve(world, 2)) == [None, None]


# --- pieces ---


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_shares_of_all_ranks_are_the_whole(tmp_path, num_ranks):
    tensors = {
        "wide": torch.randn(5, 37),
        "half": torch.randn(4, 3, 2).bfloat16(),
        "count": torch.tensor(41),
        "none": torch.zeros(0, 4),
        "mask": torch.arange(9) % 2 == 0,
    }

    def save_shares(world: ThreadWorld) -> int:
        own = list(own_tensor_pieces(tensors.items(), world.rank, world.size))
        CheckpointStore(tmp_path, keep=1).save(3, world, {"drafter": iter(own)}, {})
        return sum(piece.values.numel() for _, piece in own)

    counts = on_threads(num_ranks, save_shares)
    assert max(counts) - min(counts) <= 1
    checkpoint = CheckpointStore(tmp_path, keep=1).open_step(3)
    assert checkpoint.tensor_names("drafter") == sorted(tensors)
    for name, wanted in tensors.items():
        read = checkpoint.read_tensor("drafter", name)
        assert read.dtype == wanted.dtype and torch.equal(read, wanted), name
    for name, slices in (
        ("wide", (slice(1, 4),)), ("wide", (slice(None), slice(9, 30))), ("wide", (slice(2, 3), slice(0, 5))),
        ("half", (slice(2, 4),)), ("mask", (slice(3, 8),)), ("wide", ()),
    ):  # fmt: skip
        part, wanted = (
            checkpoint.read_tensor("drafter", name, Cut(tuple(tensors[name].shape), slices)),
            tensors[name][slices],
        )
        assert part.dtype == wanted.dtype and torch.equal(part, wanted), (name, slices)
    with pytest.raises(ValueError, match=r"weight 'wide' has shape \[5, 37\], config.json asks for \[5, 36\]"):
        checkpoint.read_tensor("drafter", "wide", Cut((5, 36), (slice(1, 2),)))


def test_a_range_of_a_tensor_is_read_from_the_files_that_have_it(tmp_path, monkeypatch):
    """As at ZeRO stage 3, where to open a file takes longer than to read a piece of it."""
    layer, size, opened = torch.randn(8, 64), 8, []

    def save_slices(world: ThreadWorld) -> None:
        own = Piece(layer[world.rank], 64 * world.rank, (8, 64))
        CheckpointStore(tmp_path, keep=1).save(3, world, {"policy": {"layer": own}.items()}, {})

    on_threads(size, save_slices)
    monkeypatch.setattr(weight_files, "safe_open", lambda file, **kind: opened.append(file) or safe_open(file, **kind))
    checkpoint = CheckpointStore(tmp_path, keep=1).open_step(3)
    # a rank's own share, and one of twice as many ranks or of fewer
    for first, last, num_files in ((128, 192, 1), (160, 192, 1), (100, 300, 4), (0, 512, 8)):
        opened.clear()
        with checkpoint.open_tensor_reader("policy") as read:
            found = read("layer", span=FlatRange(first, last, (8, 64)))
        assert torch.equal(found, layer.flatten()[first:last]) and len(set(opened)) == num_files
    for shape in ((8, 63), (9, 64), (64, 8)):  # of another model, whose elements it would take for its own
        with (
            checkpoint.open_tensor_reader("policy") as read,
            pytest.raises(CheckpointError, match=r"\[8, 64\], the model with"),
        ):
            read("layer", span=FlatRange(0, 8, shape))


def test_a_checkpoint_of_another_version_is_neither_skipped_nor_called_damaged(store, folder):
    save(store, 4)
    old = {"part": "policy", "name": "policy-00000-of-00001.safetensors", "size": 8, "digest": "0"}
    tensors = [{"name": "w", "shape": [2], "start": 0, "stop": 2}]
    document = {"format": "tlt_hpc checkpoint", "version": 2, "step": 6, "files": [old | {"tensors": tensors}]}
    (folder / "step-000006").mkdir()
    (folder / "step-000006" / "state.json").write_text(json.dumps(document | {"state": {}, "digest": "0"}))
    for read in (lambda: newest(store), lambda: store[0].open_step(6), lambda: store[0].open_checkpoints_within(5, 7)):
        with pytest.raises(CheckpointError, match=r"step-000006 is of version '2', this program reads 3: use the"):
            read()


@pytest.mark.parametrize("stored", [[torch.zeros(1)], [torch.zeros(2, 3, 1)], [torch.zeros(4), torch.zeros(1)]])
def test_a_file_that_holds_another_shape_than_the_list_says_is_damaged(tmp_path, stored):
    """Torch would broadcast one element into a parameter."""
    stops, keys = ([6], ["w"]) if len(stored) == 1 else ([4, 6], ["w[0:4]", "w[4:6]"])
    save_file(dict(zip(keys, stored, strict=True)), tmp_path / "a.safetensors")
    placed = Placed(shape=(2, 3), files=[0] * len(stops), stops=stops)
    with pytest.raises(CheckpointError, match=r"a\.safetensors has another 'w.*' than state\.json says"):
        Checkpoint(tmp_path, 1, {}, ["a.safetensors"], {"p": {"w": placed}}).read_tensor("p", "w")


def test_a_list_that_names_a_file_elsewhere_is_not_read():
    with pytest.raises(ValueError, match="pattern"):
        File(part="p", name="../../private.safetensors", size=1, digest="")


@pytest.mark.parametrize("bounds", [[(0, 4), (5, 6)], [(0, 4), (3, 6)], [(0, 4)], [(0, 6), (0, 6)]])
def test_ranks_that_hold_too_little_or_too_much_are_found(tmp_path, bounds):
    values = torch.arange(6.0)
    listed = []
    for rank, (start, stop) in enumerate(bounds):
        about = {"part": "p", "name": f"{rank}.safetensors", "size": 1, "digest": ""}
        listed.append(ListedFile(**about, tensors=[("w", (2, 3), start, stop)]))
        assert Piece(values[start:stop], start, (2, 3)).stop_index == stop
    with pytest.raises(CheckpointError, match="hold other elements of w than each once"):
        write_manifest(tmp_path / "state.json", 1, listed, {})


# --- a step's own ---


def test_the_checkpoint_of_a_step(store, folder):
    with pytest.raises(CheckpointError, match=r"no such checkpoint in .*checkpoints, which has none"):
        store[0].open_step(4)
    save(store, 4)
    save(store, 6)
    assert store[0].open_step(4).step == 4
    with pytest.raises(CheckpointError, match="which has steps 4, 6; use one that is there"):
        store[0].open_step(5)
    flip_last_byte(folder / "step-000006" / "policy-00000-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"step-000006 is damaged \(policy-00000.*changed.*use another one"):
        store[0].open_step(6)
