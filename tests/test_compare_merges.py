"""The tool that compares merges: who takes part when, and that its rules are what they are called."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).parents[1] / "tools" / "compare_merges.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("compare_merges", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["compare_merges"] = module
    specification.loader.exec_module(module)
    return module


def test_who_takes_part_and_what_sums_cost(tool: ModuleType) -> None:
    tail = tool.Tail((0.0, 0.25, 1.0), 1.0)
    assert [tail.num_micro_steps(rank, 0.1) for rank in range(3)] == [10, 7, 0]
    free = tail.groups(0.1, 0.0)
    assert free == [[0]] * 3 + [[0, 1]] * 7, "the second joins at the next micro-step"
    dear = tail.groups(0.1, 0.1)
    assert dear == [[0]] * 3 + [[0, 1]] * 3, "0.3 alone, 0.3 with the weights for whoever joins, then 0.2 each"


@pytest.mark.slow
def test_a_tool_run_ends_in_a_table(tmp_path: Path) -> None:
    small = ["--replicas", "3", "--starts", "random", "--steps", "1", "--judge-every", "1", "--micro-steps", "1"]
    small += ["--responses", "12", "--judged", "4", "--allreduce-seconds", "0.01", "--tokens", "300"]
    done = subprocess.run([sys.executable, TOOL, *small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.splitlines()[-2:]
    assert header.split() == ["replicas", "start", "apart", "mean", "weights", "allreduce", "free"]
    assert line.split()[:2] == ["3", "random"] and all(float(cell) >= 1 for cell in line.split()[2:])


def test_summed_gradients_of_all_are_one_step_of_the_group(tool: ModuleType, tmp_path: Path) -> None:
    """All members hold the same weights afterwards; under "weights" the moments stay each replica's own."""
    from tiny import embedded_decoder, gcd_requests

    options = tool.parse(["--tokens", "300"])
    bench = tool.Bench(embedded_decoder(), options, {2: 0.0})
    caches = [tool.FeatureCache(tool.RunFolder(tmp_path), rank, 1, 128, 10**8) for rank in range(2)]
    arms = {rule: tool.Arm(bench, rule, "random", caches, 0) for rule in ("free", "weights", "mean")}
    for rank, cache in enumerate(caches):
        sink = cache.begin_step(0, 0).append
        bench.roll_out(gcd_requests(2, 2, rank), tool.OFF, arms["free"].leader, sink)
    for arm in arms.values():
        arm.train(0, tool.Tail((0.0, 0.0), 2 * options.micro_step_seconds))
    weights = {rule: [r.drafter.state_dict()["fc"] for r in arm.replicas] for rule, arm in arms.items()}
    assert all(torch.equal(*pair) for pair in weights.values())
    assert arms["free"].leader.num_steps == 2
    moments = {rule: [r.state()["fc.exp_avg"] for r in arms[rule].replicas] for rule in ("weights", "mean")}
    assert torch.equal(*moments["mean"]) and not torch.equal(*moments["weights"])
