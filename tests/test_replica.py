"""Replicas of several ranks: what they agree on, that they leave a rollout together, and whole runs of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks
from test_resume import Silent
from test_run import SMALL, records, tokens_of

from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.mpi.replica import Replica, check_replicas_per_node
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import join_process_group, leave_process_group, make_replica_all_reduce
from tlt_hpc.train import run_training

TWO = "rollout.tensor_parallel=2"
SHORT = ["rollout.max_new_tokens=120"]


# -- mistakes -------------------------------------------------------------------------------------------------------


def test_a_replica_over_two_nodes_is_refused() -> None:
    check_replicas_per_node(["a", "a", "b", "b"], 2)
    check_replicas_per_node(["a", "b", "a"], 1)
    with pytest.raises(ConfigError) as caught:
        check_replicas_per_node(["a", "a", "a", "b", "b", "b"], 2)
    assert str(caught.value) == (
        "rollout.tensor_parallel = 2: ranks 2 to 3 decode together and are on a, b; start a multiple of 2 ranks on "
        "each node, one node after another (srun --distribution=block)"
    )


# -- agreement ------------------------------------------------------------------------------------------------------


def deal_and_agree() -> dict[str, Any]:
    world = World.connect()
    replica = Replica(world, 2)
    agreed = [replica.broadcast_from_first_rank(10 * world.rank + number) for number in range(3)]
    units = [unit for unit in range(8) if replica.generates_unit(unit) and replica.trains_on_unit(unit)]
    replica.mark = lambda: 5 + (world.rank == 3)
    try:
        replica.broadcast_from_first_rank(0)
        apart = ""
    except RuntimeError as error:
        apart = str(error)
    return {"agreed": agreed, "units": units, "apart": apart}


@pytest.mark.mpi
def test_the_first_rank_decides_and_each_unit_is_kept_once() -> None:
    ranks = run_on_ranks(4, deal_and_agree)
    assert [rank["agreed"] for rank in ranks] == [[0, 1, 2]] * 2 + [[20, 21, 22]] * 2
    assert sorted(unit for rank in ranks for unit in rank["units"]) == list(range(8))
    assert [len(rank["units"]) for rank in ranks] == [2] * 4
    assert [rank["apart"] for rank in ranks] == ["", "", "", (
        "rank 1 of replica 1 has decoded another text than its first rank: their devices do not compute alike; use "
        "nodes of one kind, or rollout.tensor_parallel = 1"
    )]  # fmt: skip


# -- runs -----------------------------------------------------------------------------------------------------------


def run_in_turn(folder: str, runs: list[list[str]]) -> list[str]:
    """Runs one after another in these ranks; the policies that they end with."""
    world, digests = World.connect(), []
    for changes in runs:
        config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={folder}", *SMALL, *SHORT, *changes])
        digests.append(run_training(config, world, Silent()).policy_sha256)
    leave_process_group()
    return digests


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_with_texts_generated_ahead_is_a_plain_run_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    """With refills and evaluations between the steps, and on four ranks as two replicas too."""
    same = ["run.num_steps=3", "speculation.mode=frozen", "algorithm.max_refills=1", "evaluation.every_steps=1"]
    same += ["evaluation.limit=2", "rollout.shard=sample", f"run.ranks={ranks}"]
    runs = [["run.name=plain", "speculation.mode=plain", *same], ["run.name=ahead", "speculation.ahead=on", *same]]
    runs += [["run.name=split", "speculation.ahead=on", *same, TWO]] * (ranks == 4)
    digests = run_on_ranks(ranks, run_in_turn, str(tmp_path), runs, timeout=280)[0]
    assert len(set(digests)) == 1
    for name in [words[0].partition("=")[2] for words in runs[1:]]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert sum(line["rollout/refills"] for line in lines) > 0
        if ranks > 1:  # a rank alone never waits
            assert all(line["ahead/tokens"] > 0 for line in lines[:-1]) and lines[-1]["ahead/tokens"] == 0
            assert all(line["ahead/accepted_drafts"] > 0 for line in lines[1:]) and lines[0]["ahead/drafts"] == 0


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_of_one_replica_is_a_run_of_whole_models_bit_for_bit(tmp_path: Path) -> None:
    """And continues with whole models, from the checkpoint and the log of a replica."""
    runs = [
        ["run.name=whole", "run.num_steps=2", "speculation.mode=plain"],
        ["run.name=split", "run.num_steps=1", TWO],
        ["run.name=split", "run.num_steps=2"],
    ]
    digests, others = run_on_ranks(2, run_in_turn, str(tmp_path), runs)
    assert digests == others and digests[2] == digests[0] != digests[1]
    for step in range(2):
        assert tokens_of(tmp_path / "split", step) == tokens_of(tmp_path / "whole", step)
    assert all(len(record.rollouts) == 8 for record in records(tmp_path / "split", 0)), "each rank keeps its half"


def sums_in_order() -> bool:
    """On each rank of a replica: each row's sum by itself is that of all rows, and that of the ranks in their order."""
    world = World.connect()
    join_process_group(world, "cpu")
    add = make_replica_all_reduce(world, world.size, in_order=True)
    own = [torch.randn(7, 96, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world.size)]
    mine = own[world.rank]
    by_row = torch.cat([add(mine[i : i + 1].clone()) for i in range(len(mine))])
    expected = own[0].float()
    for part in own[1:]:
        expected = expected + part.float()
    found = add(mine.clone())
    leave_process_group()
    return torch.equal(found, by_row) and torch.equal(found, expected.bfloat16())


@pytest.mark.mpi
def test_a_replicas_sum_in_order_is_the_same_for_each_row() -> None:
    assert run_on_ranks(3, sums_in_order) == [True] * 3
