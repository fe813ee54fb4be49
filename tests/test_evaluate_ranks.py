"""Ranks that do not see the same: data of an evaluation that differs by node, files that NFS shows late or never."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_sets import gcd_row, write_parquet
from fake_world import ThreadWorld
from safetensors.torch import save_file
from tiny import CPU, embedded_decoder, embedded_folder, embedded_tokenizer

from tlt_hpc import session as job
from tlt_hpc.checkpoint.manifest import Checkpoint, File, Stored, _index, write_manifest
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.evaluate import subject as subject_module
from tlt_hpc.evaluate.answering import first_number, see_all
from tlt_hpc.evaluate.evaluate import prepare
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.evaluate.subject import Subject, fingerprint_of, load_weights
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.piece import deal
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.sharding import Sharding

TINY = Path(__file__).parent.parent / "jobs" / "tiny.toml"


def on_two_ranks(function) -> list:
    """What a function of the world returns on each of two ranks, each a thread on a host of its own."""
    board, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: function(ThreadWorld(rank, 2, board, barrier)), range(2)))


def sources_by_rank(folder: Path) -> None:
    """Files of one name and of as many rows: nothing but their content differs."""
    for rank in range(2):
        (folder / str(rank)).mkdir()
        write_parquet(folder / str(rank) / "a.parquet", [gcd_row(n + rank) for n in (3, 4, 5)])


def source_of(folder: Path | str, rank: int) -> str:
    return f"evaluation.sources=['{folder}/{rank}/a.parquet']"


class Read:
    """Counts the elements that a rank's readers bring to memory, and the most at once."""

    def __init__(self) -> None:
        self.total = self.most = 0

    def counting(self, readers):
        for name, read in readers:
            yield name, partial(self.read, read)

    def read(self, read, cut):
        tensor = read(cut)
        self.total += tensor.numel()
        self.most = max(self.most, tensor.numel())
        return tensor


def checkpoint_of_three_ranks(folder: Path):
    """The embedded weights as a run's masters, each distributed over ranks in unequal pieces."""
    masters = {f"{name}.master": weight.float() for name, weight in folder_weights(embedded_folder())}
    files, stored = [], {}
    for rank in range(3):
        own = dict(deal(masters.items(), rank, 3))
        tensors = {
            name: Stored(name=name, shape=list(piece.shape), start=piece.start, stop=piece.stop)
            for name, piece in own.items()
        }
        save_file(
            {
                kept.key: own[name].values.reshape(kept.shape if kept.is_whole else -1).clone()
                for name, kept in tensors.items()
            },
            folder / str(rank),
        )
        files.append(File(part="policy", name=str(rank), size=1, digest="", tensors=list(tensors.values())))
        stored |= tensors
    write_manifest(folder / "state.json", 7, files, {})
    return Checkpoint(folder, 7, {}, _index(files))


@pytest.mark.parametrize("from_run", [False, True], ids=["a folder", "a run"])
def test_ranks_of_a_replica_read_their_part_of_each_weight_alone(tmp_path, monkeypatch, from_run):
    shape = read_shape(embedded_folder())
    checkpoint = checkpoint_of_three_ranks(tmp_path) if from_run else None
    subject = Subject(str(embedded_folder()), None, None, None)
    counts, readers = [Read(), Read()], subject_module._readers

    def load(world):
        monkeypatch.setattr(subject_module, "_readers", lambda *given: counts[mine.rank].counting(readers(*given)))
        mine.rank = world.rank
        decoder = Decoder(shape, torch.float32, CPU, Sharding(world.rank, 2))
        return load_weights(decoder, subject, checkpoint, "", world), decoder

    mine = threading.local()
    (first, one), (second, other) = on_two_ranks(load)
    whole = embedded_decoder()
    weights = dict(folder_weights(embedded_folder()))
    assert first == second == fingerprint_of(((n, w.float()) for n, w in weights.items()), shape.tied_head)
    for number, layer in enumerate(whole.layers):
        halves = [decoder.layers[number].down.weight for decoder in (one, other)]
        assert torch.equal(torch.cat(halves, 1), layer.down.weight)
    size = sum(weight.numel() for weight in weights.values())
    layers = sum(each.weight_bytes for each in whole.layers) // 4
    assert sum(read.total for read in counts) < 2 * size - 0.45 * layers, "of a layer one reads all, the other its half"
    assert max(read.most for read in counts) == max(weight.numel() for weight in weights.values())


def test_other_files_on_another_node_are_refused_on_all_ranks(tmp_path):
    sources_by_rank(tmp_path)
    tokenizer, engine = embedded_tokenizer(), SimpleNamespace(decoder=embedded_decoder())

    def prepared(world) -> str:
        config = load_config(TINY, ["evaluation.every_steps=2", source_of(tmp_path, world.rank)])
        with pytest.raises(ConfigError) as caught:
            prepare(SimpleNamespace(config=config, world=world, engine=engine, tokenizer=tokenizer))
        return str(caught.value)

    message = (
        "evaluation.sources: rank 1 on node1 reads another 'a' than rank 0 on node0; give all nodes the same files"
    )
    assert on_two_ranks(prepared) == [message, message]


def test_files_that_nfs_shows_late_are_waited_for(tmp_path):
    folder = EvaluationFolder(tmp_path)
    folder.responses.mkdir()
    (folder.responses / "000000.h5").touch()
    threading.Timer(0.4, (folder.responses / "000001.h5").touch).start()
    seen = on_two_ranks(lambda world: see_all(folder, [f"00000{world.rank}.h5"], world) or folder.next_number())
    assert seen == [2, 2]


def test_files_that_rank_0_never_sees_end_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "NFS_SECONDS", 0.2)

    def see(world) -> str:
        with pytest.raises(UserError) as caught:
            see_all(EvaluationFolder(tmp_path), ["000001.h5"] * world.rank, world)
        return str(caught.value)

    message = (
        f"{tmp_path}/responses: rank 0 on node0 does not see 000001.h5, which rank 1 on node1 has written; use a "
        "folder that all nodes share (run.folder, or --output)"
    )
    assert on_two_ranks(see) == [message, message]


def test_no_rank_overwrites_what_another_one_already_sees(tmp_path):
    def number(world) -> int:
        folder = EvaluationFolder(tmp_path / str(world.rank))  # rank 0's listing is an old one
        folder.responses.mkdir(parents=True)
        for count in range(3 * world.rank):
            (folder.responses / f"{count:06d}.h5").touch()
        return first_number(folder, world)

    assert on_two_ranks(number) == [3, 4]
