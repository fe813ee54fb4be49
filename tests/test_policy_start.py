"""A policy at ZeRO stage 3 starts from rank 0's weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks
from tiny import embedded_folder

from tlt_hpc.config import load_config
from tlt_hpc.models.folder import (
    empty_policy_model,
    load_policy_all_ranks,
    load_policy_model,
    read_config,
    read_folder_weights,
)
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import join_process_group, leave_process_group
from tlt_hpc.rl.policy import Policy


def start_from_rank_0(given: str) -> dict[str, Any]:
    config = load_config(ROOT / "jobs" / "tiny.toml", ["optimizer.zero_stage=3", "algorithm.kl_coefficient=0"])
    world = World.connect()
    join_process_group(world, "cpu")
    device, node = torch.device("cpu"), world.node_group
    model = load_policy_all_ranks(Path(given), "float32", device, is_sharded=True, rank=world.rank, node=node)
    if world.rank > 0:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(7)  # what the memory held
    policy = Policy(model, config, world)
    stored = dict(read_folder_weights(Path(given)))
    weights = {name: bool(torch.equal(weight, stored[name].float())) for name, weight in policy.gather_named_weights()}
    buffers = [float(buffer.double().sum()) for buffer in policy.engine.module.buffers()]
    policy.close()
    leave_process_group()
    return {"weights": weights, "buffers": buffers}


@pytest.mark.mpi
def test_ranks_without_weights_get_those_of_rank_0() -> None:
    loaded = load_policy_model(embedded_folder(), "float32")
    expected = [float(buffer.double().sum()) for buffer in loaded.buffers()]
    for rank in run_on_ranks(2, start_from_rank_0, str(embedded_folder())):
        assert len(rank["weights"]) == len(list(loaded.parameters())) and all(rank["weights"].values())
        assert rank["buffers"] == expected and expected


def tensors_of(model: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]


def test_an_empty_model_has_the_loaded_ones_tensors() -> None:
    loaded = load_policy_model(embedded_folder(), "float32")
    empty = empty_policy_model(read_config(embedded_folder()), "float32")
    assert tensors_of(empty) == tensors_of(loaded)
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight
