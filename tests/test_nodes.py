"""What a job looks at on every node: the odd one is named in one line, on all ranks, before anything is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import ROOT, run_on_ranks

from tlt_hpc.cluster.launcher import launched_rank
from tlt_hpc.config import UserError, load_config
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.mpi import world as world_module
from tlt_hpc.plan import nodes
from tlt_hpc.plan.nodes import NodeFacts, NodeReport, find_difference, refuse_errors

FACTS: NodeFacts = {
    "python": "3.11.7",
    "packages": "torch 2.13.0, numpy 2.4.6",
    "source": "tlt_hpc 0.1.0 (abc)",
    "mpi": "MPICH Version: 5.0.2",
    "gpus": "4 x NVIDIA A100",
    "run folder": "is there",
    "model": "123abc",
}


def cluster(**odd: dict[str, str]) -> dict[str, NodeFacts]:
    """Four nodes, of which some have other facts."""
    return {name: FACTS | odd.get(name, {}) for name in ("n1", "n2", "n3", "n4")}


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_that_differs_is_named_with_both_values(name: str) -> None:
    assert find_difference(cluster()) == find_difference({"n1": FACTS}) == ""
    line = find_difference(cluster(n3={name: "other"}))
    assert line.startswith(f"node n3: {name} other, where 3 other nodes have {FACTS[name]}; ")


def test_the_majority_is_right_and_of_a_draw_the_first() -> None:
    most = {name: {"packages": "torch 2.13.0, numpy 2.4.5"} for name in ("n1", "n3", "n4")}
    line = "node n2: packages numpy 2.4.6, where 3 other nodes have numpy 2.4.5; start all"
    assert find_difference(cluster(**most)).startswith(line)
    draw = {name: {"python": "3.12.1"} for name in ("n3", "n4")}
    assert "nodes n3, n4: python 3.12.1, where 2 other nodes have 3.11.7;" in find_difference(cluster(**draw))
    two = {"n1": FACTS, "n2": FACTS | {"python": "3.12.1"}}
    assert "node n2: python 3.12.1, where 1 other node has 3.11.7;" in find_difference(two)


def test_an_error_of_one_rank_has_its_node_and_one_of_all_stands_as_it_is() -> None:
    refuse_errors([NodeReport("n1", FACTS), NodeReport("n1", None)])
    with pytest.raises(UserError, match=r"^rank 1 on n2: no data; copy it$"):
        refuse_errors([NodeReport("n1", FACTS), NodeReport("n2", None, "no data; copy it")])
    with pytest.raises(UserError, match=r"^no data; copy it$"):
        refuse_errors([NodeReport("n1", None, "no data; copy it"), NodeReport("n2", None, "no data; copy it")])


def test_a_node_with_gpus_and_without_a_c_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would end the job with a traceback, at its first kernel."""
    config = load_config(ROOT / "jobs" / "tiny.toml", ["model.device=cpu"])
    place = tmp_path / "gpus" / "0000:01:00.0"
    on_gpus = load_config(ROOT / "jobs" / "tiny.toml", ["model.device=auto"]).model
    monkeypatch.setattr(nodes, "_DRIVER", tmp_path)
    nodes.check_compiler(on_gpus, {"CC": "no-such-cc"})  # no GPU
    place.mkdir(parents=True)
    (place / "information").write_text("Model: NVIDIA A100\n")
    with pytest.raises(UserError, match=r"^this node has no C compiler \(CC=no-such-cc\), which Triton needs .*conda"):
        nodes.check_compiler(on_gpus, {"CC": "no-such-cc"})
    nodes.check_compiler(config.model, {"CC": "no-such-cc"})
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(UserError, match=rf"^this node has no {tmp_path}/Python.h, which"):
        nodes.check_compiler(on_gpus, {"CC": "sh"})
    (tmp_path / "Python.h").touch()
    nodes.check_compiler(on_gpus, {"CC": "sh"})


def test_a_models_digest_follows_its_files(tmp_path: Path) -> None:
    model = shutil.copytree(package_asset_folder("tiny"), tmp_path / "model")
    found = {nodes.model_digest(model)}
    os.truncate(model / "model.safetensors", 1000)
    found.add(nodes.model_digest(model))
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert len(found | {nodes.model_digest(model)}) == 3


# --- on ranks ---


def check_as_nodes() -> list[Any]:
    """What each rank raised, and how often it gathered: on a node of its own, where one has another numpy, or lacks a
    file, or has failed before; then two a node."""
    rank = launched_rank(os.environ) or 0
    version, gather, calls, found = nodes.installed_version, nodes.read_node_facts, [], list[Any]()
    nodes.read_node_facts = lambda config, world: calls.append(1) or gather(config, world)
    nodes.installed_version = lambda name: "1" if name == "numpy" and (rank, case) == (1, "odd") else version(name)

    def look() -> None:
        if (rank, case) == (2, "lacks"):
            raise UserError("no data; copy it")

    for case in ("odd", "lacks", "fails", "alike"):
        world_module.socket.gethostname = lambda: f"node{rank // 2 if case == 'alike' else rank}"  # noqa: B023
        world = world_module.World.connect()
        calls.clear()
        try:
            if (rank, case) == (2, "fails"):
                nodes.broadcast_error(world, UserError("no data; copy it"))
            nodes.check_nodes(world, load_config(ROOT / "jobs" / "tiny.toml"), look)
            found.append("")
        except UserError as caught:
            found.append(str(caught).partition(", where")[0])
        world.barrier()
    return [*found, len(calls)]


@pytest.mark.mpi
def test_all_ranks_meet_the_same_error_and_one_rank_a_node_gathers() -> None:
    """Where one node has no data: before, its rank ended without a word."""
    lacks = "rank 2 on node2: no data; copy it"
    odd = "node node1: packages numpy 1"
    assert run_on_ranks(4, check_as_nodes) == [[odd, lacks, lacks, "", calls] for calls in (1, 0, 1, 0)]
