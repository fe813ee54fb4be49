"""Ranks that do not see the same: data of an evaluation that differs by node, files that NFS shows late or never."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_sets import gcd_row, write_parquet
from fake_world import on_threads
from tiny import CPU, embedded_decoder, embedded_folder, embedded_tokenizer

from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.evaluate import subject as subject_module
from tlt_hpc.evaluate.between_steps import read_exam_all_ranks
from tlt_hpc.evaluate.exam import agree_first_file_number, wait_for_files_all_ranks
from tlt_hpc.evaluate.folder import EvaluationFolder, digest_weights
from tlt_hpc.evaluate.subject import Subject, load_weights_all_ranks
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.sharding import Sharding
from tlt_hpc.storage import folder as storage_folder

TINY = Path(__file__).parent.parent / "jobs" / "tiny.toml"


def sources_by_rank(folder: Path) -> None:
    """Files of one name and of as many rows: nothing but their content differs."""
    for rank in range(2):
        (folder / str(rank)).mkdir()
        write_parquet(folder / str(rank) / "a.parquet", [gcd_row(n + rank) for n in (3, 4, 5)])


def source_of(folder: Path | str, rank: int) -> str:
    return f"evaluation.sources=['{folder}/{rank}/a.parquet']"


def test_ranks_of_a_replica_load_their_parts_and_agree_on_the_fingerprint(monkeypatch):
    shape, subject = read_shape(embedded_folder()), Subject(str(embedded_folder()), None, None, None)
    config = load_config(TINY)
    reads, true_readers = list[str](), subject_module._weight_readers

    def counted(name, read, cut):
        reads.append(name)
        return read(cut)

    monkeypatch.setattr(
        subject_module, "_weight_readers", lambda *of: ((n, partial(counted, n, read)) for n, read in true_readers(*of))
    )

    def load(world):
        decoder = Decoder(shape, torch.float32, CPU, Sharding(world.rank, 2))
        return load_weights_all_ranks(decoder, subject, None, config, world), decoder

    (first, one), (second, other) = on_threads(2, load)
    weights = dict(read_folder_weights(embedded_folder()))
    assert first == second == digest_weights(((n, w.float()) for n, w in weights.items()), shape.tied_head)
    assert set(Counter(reads).values()) == {2}, "each of two nodes reads each weight once"
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    assert first != digest_weights(weights.items(), shape.tied_head)
    for number, layer in enumerate(embedded_decoder().layers):
        halves = [decoder.layers[number].mlp.down.weight for decoder in (one, other)]
        assert torch.equal(torch.cat(halves, 1), layer.mlp.down.weight)


def test_weights_are_rounded_as_in_training_where_a_cpu_computes_with_more_digits(monkeypatch):
    """Or the evaluation of a run's own checkpoint would be one of other weights."""
    shape, subject = read_shape(embedded_folder()), Subject(str(embedded_folder()), None, None, None)
    weights = {name: weight.float() * 1.001 for name, weight in read_folder_weights(embedded_folder())}
    monkeypatch.setattr(
        subject_module, "_weight_readers", lambda *of: ((n, lambda cut, n=n: weights[n]) for n in weights)
    )
    decoder, config = Decoder(shape, torch.float32, CPU), load_config(TINY, ["model.dtype=bfloat16"])
    (found,) = on_threads(1, lambda world: load_weights_all_ranks(decoder, subject, None, config, world))
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert found == digest_weights(rounded.items(), shape.tied_head) != digest_weights(weights.items(), shape.tied_head)
    assert torch.equal(decoder.final_norm.weight, rounded["model.norm.weight"].float())


def test_other_files_on_another_node_are_refused_on_all_ranks(tmp_path):
    sources_by_rank(tmp_path)

    def prepared(world) -> str:
        world.node_group = SimpleNamespace(size=1, run_first_and_broadcast=lambda read: read())
        config = load_config(TINY, ["evaluation.every_steps=2", source_of(tmp_path, world.rank)])
        with pytest.raises(ConfigError) as caught:
            read_exam_all_ranks(config, world, embedded_decoder().shape, embedded_tokenizer())
        return str(caught.value)

    message = (
        "evaluation.sources: rank 1 on node1 reads another 'a' than rank 0 on node0; give all nodes the same files"
    )
    assert on_threads(2, prepared) == [message, message]


def test_files_that_nfs_shows_late_are_waited_for(tmp_path):
    folder = EvaluationFolder(tmp_path)
    folder.responses.mkdir()
    (folder.responses / "000000.h5").touch()
    threading.Timer(0.4, (folder.responses / "000001.h5").touch).start()
    seen = on_threads(
        2, lambda world: wait_for_files_all_ranks(folder, [f"00000{world.rank}.h5"], world) or folder.next_number()
    )
    assert seen == [2, 2]


def test_files_that_rank_0_never_sees_end_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_folder, "NFS_SECONDS", 0.2)

    def see(world) -> str:
        with pytest.raises(UserError) as caught:
            wait_for_files_all_ranks(EvaluationFolder(tmp_path), ["000001.h5"] * world.rank, world)
        return str(caught.value)

    message = (
        f"{tmp_path}/responses: rank 0 on node0 does not see 000001.h5, which rank 1 on node1 wrote; use "
        "a folder that all nodes share (run.folder, or --output)"
    )
    assert on_threads(2, see) == [message, message]


def test_no_rank_overwrites_what_another_one_already_sees(tmp_path):
    def number(world) -> int:
        folder = EvaluationFolder(tmp_path / str(world.rank))  # rank 0's listing is an old one
        folder.responses.mkdir(parents=True)
        for count in range(3 * world.rank):
            (folder.responses / f"{count:06d}.h5").touch()
        return agree_first_file_number(folder, world)

    assert on_threads(2, number) == [3, 4]
