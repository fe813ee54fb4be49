"""The memory plan, compared with the engine's own figures and with runs; its savings, its command and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import LAUNCH_ENVIRONMENT, launch, mpiexec

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.config import load_config
from tlt_hpc.extras.preflight import system_checks
from tlt_hpc.extras.preflight.planned_job import PlannedJob
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.sharding import Sharding
from tlt_hpc.plan.memory import summary
from tlt_hpc.plan.memory.engine import PlannedEngine
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryLimits, MemoryPlan
from tlt_hpc.plan.memory.savings import find_memory_savings
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.memory.situation import Situation, total_bytes
from tlt_hpc.plan.memory.training import training_state_bytes
from tlt_hpc.rollout.engine import RolloutEngine

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "jobs"
TOOL = str(ROOT / "tools" / "check_memory_plan.py")


def situation(job: str = "tiny", *overrides: str, ranks: int = 8, device: Any = "cuda", model: str = "") -> Situation:
    config = load_config(JOBS / f"{job}.toml", overrides)
    return Situation(config, find_shape(config.model.path, model or None), ranks, ranks, device)


def bytes_of(plan: MemoryPlan, phase: str, part: str) -> int:
    (found,) = (p for p in plan.phases if p.name == phase)
    return found.parts.get(part, 0)


# --- compared with a run ---


STAGE_3 = (
    "optimizer.zero_stage=3 optimizer.gradient_checkpointing=true optimizer.micro_batch_tokens=448 "
    "rollout.max_live=2 drafter.form=eagle3 drafter.init=random"
)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        pytest.param(2, "", marks=pytest.mark.ci),
        pytest.param(2, STAGE_3, marks=pytest.mark.slow),
        pytest.param(2, "rollout.tensor_parallel=2", marks=pytest.mark.slow),
        pytest.param(1, "model.dtype=bfloat16 optimizer.zero_stage=2", marks=pytest.mark.slow),
    ],
    ids=["the embedded job", "stage 3 on 2 ranks", "a replica of 2 ranks", "bfloat16"],
)
def test_every_phase_is_within_15_percent_of_what_a_run_takes(num_ranks: int, settings: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    status, out, err = launch(num_ranks, [TOOL, *settings.split(), "--json", str(path)], timeout=240)
    assert path.exists(), f"{out}\n{err}"
    figures = json.loads(path.read_text())
    trains = num_ranks > 1 and "tensor_parallel" not in settings
    assert set(figures) == {"start", "rollout", *(["tail"] if trains else []), "update", "save"}
    assert all(0.85 < row["ratio"] < 1.15 for row in figures.values()) and status == 0, out


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", ["", "Qwen3-30B-A3B", "gemma-3-270m"])
def test_the_planned_engine_holds_what_a_real_one_of_its_sizes_does(form: str, model: str) -> None:
    settings = f"drafter.form={form}", "drafter.vocabulary=16", "rollout.tensor_parallel=2", "rollout.max_live=2"
    given, cpu = situation("tiny", *settings, device="cpu", model=model), torch.device("cpu")
    few = {"vocab_size": 600, "hidden_size": 512, "num_layers": 7, "max_positions": 1024, "local_layers": (True,) * 7}
    if given.shape.num_experts:
        few |= {"num_experts": 4, "expert_size": 64, "local_layers": ()}
    given = replace(given, shape=replace(given.shape, **few if model else {}))
    planned = PlannedEngine(given)
    decoder = Decoder(given.shape, given.decoding_dtype, cpu, Sharding(1, 2))
    decoder.load_weights(((name, torch.zeros(cut.sizes)) for name, cut in decoder.weight_cuts().items()), 0)
    ids = torch.arange(16)
    drafter = make_drafter(given.shape, 0, given.decoding_dtype, cpu, None if form == "eagle" else ids)
    drafter.set_sharding(decoder.sharding)
    if isinstance(drafter, Eagle):
        drafter.set_draft_vocabulary(ids)
    engine = RolloutEngine(decoder, planned.settings, drafter)
    assert planned.table == engine.memory_table()
    packs = given.decoding_bytes_per_number == 4 and bool(model)
    assert bool(planned.table["packed weights"]) == packs, "the embedded model's matrices are too small"
    assert planned.part == decoder.part != given.shape
    on_gpu = PlannedEngine(replace(given, device="cuda"))
    assert not on_gpu.table["packed weights"] and on_gpu.part == planned.part


# --- shapes ---


def test_known_shapes_have_the_published_number_of_parameters() -> None:
    published = {"Qwen2.5-7B": 7_615_616_512, "Qwen3-8B": 8_190_735_360, "Llama-3.3-70B-Instruct": 70_553_706_496}
    published |= {"Qwen3-30B-A3B": 30_532_122_624, "Mistral-7B-v0.3": 7_248_023_552}
    published |= {"gemma-3-270m": 268_098_176, "gemma-3-1b-it": 999_885_952}
    assert {name: find_shape("nowhere", name).num_parameters for name in published} == published


# --- what the plan says ---


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "resident", "held", "stepping"),
    [  # bytes a parameter: weights, then masters, moments and gradients as far as they stay; gradients; of the step
        ("float32", 0, 2, 12.0, 4, 4),
        ("float32", 1, 2, 4 + 12 / 2, 4, 12 / 2),
        ("bfloat16", 1, 2, 6 + 12 / 2, 2, 2 + 8 / 2),
        ("bfloat16", 2, 4, 2 + 12 / 4, 4 / 4, 12 / 4),
        ("bfloat16", 3, 64, 18 / 64, 0, 12 / 64),
    ],
)
def test_training_state_by_stage(
    dtype: str, stage: int, ranks: int, resident: float, held: float, stepping: float
) -> None:
    settings = f"model.dtype={dtype}", f"optimizer.zero_stage={stage}", "optimizer.offload=false"
    given = situation("qwen7b", *settings, ranks=ranks)
    state = training_state_bytes(given)
    found = total_bytes(state.resident) - state.resident.get("bucket of gradients", 0)
    count = given.shape.num_parameters
    gradients = sum(num_bytes for name, num_bytes in state.held.items() if name.startswith("gradients"))
    by_parameter = found / count, gradients / count, state.stepping / count
    assert by_parameter == pytest.approx((resident, held, stepping), rel=2e-3)
    assert state.host == 0


def test_offload_takes_20_bytes_a_parameter_and_pinned_memory_in_powers_of_two() -> None:
    given = situation("qwen7b", ranks=4)  # offloads
    own = -(-given.shape.num_parameters // 4)
    assert 10**9 < own < 2 * 10**9, "two groups are stepped one after the other"
    assert training_state_bytes(given).host == 12 * own + 2**33 + 2 * 2**32
    moved = training_state_bytes(
        replace(given, config=load_config(JOBS / "qwen7b.toml", ["optimizer.offload=parameters"]))
    )
    assert moved.host == training_state_bytes(given).host + 2**32


def test_each_group_of_ranks_has_a_communicator() -> None:
    changes = "", "rollout.tensor_parallel=2", "rollout.tensor_parallel=2 optimizer.sequence_parallel=2"
    plans = [plan_memory(situation("qwen7b", *settings.split())) for settings in changes]
    plans.append(plan_memory(situation("qwen7b", ranks=1)))
    found = [bytes_of(plan, "save", "CUDA, NCCL (assumed)") for plan in plans]
    assert found == [1_500_000_000 + 700_000_000 * count for count in (2, 3, 4, 1)]


def test_a_reference_is_sharded_at_stage_3_only() -> None:
    kept = "algorithm.kl_coefficient=0.1"
    none, sharded, offloaded, whole = (
        plan_memory(situation("qwen7b", *settings))
        for settings in ((), (kept,), (kept, "optimizer.offload=parameters"), (kept, "optimizer.zero_stage=2"))
    )
    share = 2 * named_parameters() / 8
    assert bytes_of(whole, "update", "reference") == 2 * named_parameters()
    assert bytes_of(sharded, "update", "reference") == pytest.approx(share, rel=1e-2)
    assert bytes_of(offloaded, "update", "reference") < 0.01 * share < bytes_of(sharded, "update", "gathered reference")
    assert not any("reference" in name for phase in none.phases for name in phase.parts)
    assert offloaded.host["reference (offload)"] == pytest.approx(share) and "reference (offload)" not in sharded.host


def test_a_checkpoint_counts_masters_moments_and_the_drafter() -> None:
    changes = "checkpoint.keep=3", "algorithm.kl_coefficient=0.1"
    plan = plan_memory(situation("tiny", *changes, ranks=2))
    saved = 12 * plan.situation.shape.num_parameters + 16 * plan.engine.num_drafter_parameters
    disk, host = plan.disk, plan.host
    assert disk["checkpoints"] == 4 * saved, "the next is written before one is removed"
    assert disk["features"] == 2 * plan.situation.config.drafter.cache_bytes
    alone = 16 * plan.engine.num_drafter_parameters
    assert disk["the drafter's between them"] == 3 * alone, "two are kept"
    assert host["copy for checkpoints"] == (-(-saved // (2 << 24)) + -(-alone // (2 << 24))) << 24
    without = plan_memory(situation("tiny", *changes, "speculation.mode=frozen", ranks=2))
    assert "the drafter's between them" not in without.disk


def test_tensor_parallelism_divides_the_engine_and_no_training_state() -> None:
    whole, divided = (plan_memory(situation("qwen32b", f"rollout.tensor_parallel={n}", ranks=64)) for n in (1, 4))
    shape = whole.situation.shape
    ends = 2 * 2 * shape.vocab_size * shape.hidden_size
    layers = bytes_of(whole, "rollout", "rollout weights") - ends
    assert bytes_of(divided, "rollout", "rollout weights") - ends == pytest.approx(layers / 4, rel=1e-4)
    assert bytes_of(divided, "rollout", "drafter in use") > bytes_of(whole, "rollout", "drafter in use")
    for phase, part in (("tail", "drafter in training"), ("tail", "drafter's activations"), ("update", "activations"),
                        ("tail", "policy"), ("update", "policy"), ("tail", "noise and rows")):  # fmt: skip
        assert bytes_of(divided, phase, part) == bytes_of(whole, phase, part) > 0, part
    rows, few = ("rollout.kv_bytes=0", "rollout.max_live=8"), "keys, values, features"
    by_rows = [plan_memory(situation("qwen32b", f"rollout.tensor_parallel={n}", *rows)) for n in (1, 4)]
    one, four = (bytes_of(plan, "rollout", few) for plan in by_rows)
    assert four == pytest.approx(one * (65 * 2 * 2 * 128 + 5120) / (65 * 8 * 2 * 128 + 5120), rel=1e-6)


def test_at_stage_3_only_rank_0_holds_a_whole_model_in_host_memory() -> None:
    plan = plan_memory(situation("qwen7b"))
    ((loading, num_bytes),) = plan.first_host.items()
    assert num_bytes == 2 * named_parameters() and loading not in plan.host
    assert bytes_of(plan, "start", "policy, not yet shared out") < 2 * 152064 * 3584
    assert plan_memory(situation("qwen7b", "algorithm.kl_coefficient=0.1")).first_host == plan.first_host
    each = plan_memory(situation("qwen7b", "optimizer.zero_stage=2"))
    assert not each.first_host and loading in each.host
    assert plan.node_bytes == 8 * total_bytes(plan.host) + num_bytes


def named_parameters() -> int:
    return find_shape("nowhere", "Qwen2.5-7B").num_parameters


@pytest.mark.parametrize(
    ("job", "overrides", "ranks", "gigabytes"),
    [
        ("qwen7b", ("rollout.kv_bytes=0", "rollout.max_live=16"), 8, 43),
        ("qwen32b", (), 64, 44),
        ("tiny", ("model.dtype=float32", "optimizer.zero_stage=0"), 1, 24),
    ],
)
def test_settings_that_make_a_plan_fit_are_found_and_each_is_needed(
    job: str, overrides: tuple[str, ...], ranks: int, gigabytes: int
) -> None:
    given = situation(job, *overrides, ranks=ranks, model="qwen2.5-1.5b" if job == "tiny" else "")
    given, limits = replace(given, ranks_per_node=min(8, ranks)), MemoryLimits(gigabytes * 10**9)
    assert not limits.plan_fits(plan_memory(given))
    found = find_memory_savings(plan_memory(given), limits)
    assert limits.plan_fits(found.plan) and not set(found.changed) & {"rollout.max_new_tokens", "speculation.mode"}
    changes = found.command_line_settings.split()
    for left_out in (None, *(change for change in changes if "zero_stage" not in change)):
        kept = [change for change in changes if change != left_out]
        again = replace(given, config=load_config(JOBS / f"{job}.toml", [*overrides, *kept]))
        assert limits.plan_fits(plan_memory(again)) == (left_out is None), left_out


# --- the command ---


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


QWEN = str(JOBS / "qwen7b.toml")


def test_it_fits_or_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, QWEN, "--gpus-per-node=8", "--gpu-memory", "84.9")
    assert status == 0 and "Fits. Peak 67.4 GB a GPU, in the phase 'tail'; 17.5 GB (21%) of each GPU left." in out
    status, out, _ = command(capsys, QWEN, "--gpus-per-node=8", "--host-memory", "250")
    assert status == 1 and "more than the 250.0 GB of each node's host memory" in out
    status, out, _ = command(capsys, QWEN, "--gpus-per-node=8", "--gpu-memory", "40")
    assert status == 1 and re.search(r"\nFits with (.+): ([\d.]+ GB a GPU) in the phase '\w+'\.$", out.rstrip())
    status, out, _ = command(capsys, QWEN, "--gpus-per-node=8", "--gpu-memory", "16")
    assert status == 1 and out.rstrip().endswith("more than the 16.0 GB of each GPU. Use more nodes.")
    status, out, _ = command(capsys, str(JOBS / "tiny.toml"))
    assert status == 0 and out.rstrip().endswith(" of this machine's available memory left.")
    status, out, _ = command(capsys, str(JOBS / "tiny.toml"), "--host-memory", "2")
    assert status == 1 and out.rstrip().endswith("host memory. Use fewer ranks per node, or nodes with more memory.")


@pytest.mark.parametrize(("job", "is_said"), [("qwen7b_lora", True), ("tiny", False)])
def test_a_plan_for_cpus_of_a_job_for_gpus_says_so(job: str, is_said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, str(JOBS / f"{job}.toml"))
    assert status == 0 and ("for ranks on CPUs; --gpus-per-node N" in out.splitlines()[-1]) == is_said


def test_a_dry_run_says_whose_memory_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(JOBS / "tiny.toml")
    assert main(["train", tiny, "--dry-run"]) == 0 and "of each GPU" not in capsys.readouterr().out
    assert main(["train", tiny, "--dry-run", "model.dtype=bfloat16"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.endswith(" of each GPU, if it runs on GPUs; tlt plan --gpus-per-node 2 has the parts")
    peak = said.split("memory")[1].split("at the peak")[0].strip()
    _, out, _ = command(capsys, tiny, "--gpus-per-node=2", "model.dtype=bfloat16")
    assert f"Peak {peak} a GPU" in out


@pytest.mark.parametrize(
    "job", sorted(path.stem for path in JOBS.glob("*.toml") if not path.stem.startswith(("tiny", "smollm2")))
)
def test_jobs_fit_their_gpus_as_their_comments_say(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join((JOBS / f"{job}.toml").read_text().replace("\n#", " ").split())
    found = re.search(r"`tlt plan (jobs/\S+) ([^`]+)`: ([\d.]+) GB of each GPU .*? (\d+) GB of a node's", text)
    assert found is not None and "--gpu-memory" in found[2]
    status, out, _ = command(capsys, str(ROOT / found[1]), *found[2].split())
    assert status == 0 and f"Fits. Peak {found[3]} GB a GPU" in out
    host = re.search(r"([\d.]+) GB a node\.", out)
    assert host is not None and round(float(host[1])) == int(found[4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus-per-node=8", "--nodes", "6"],
            "rollout.prompts_per_step = 128 is not divisible by 48 ranks; set it to 96",
        ),
        (["--gpus-per-node=8", "model.device=cpu"], "--gpus-per-node 8 with model.device = 'cpu'; leave one of"),
        (["--gpus-per-node=8", "--shape", "none"], "--shape none is not the folder of a model on this machine, and"),
        (["--gpus-per-node=2", "--nodes=4", "rollout.tensor_parallel=4"], "rollout.tensor_parallel = 4 does not"),
    ],
)
def test_mistakes_end_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(capsys, QWEN, *arguments)
    assert status == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"tlt: {message}")


ASKING = """
import sys
from tlt_hpc.checkpoint import store
from tlt_hpc.cli import main as cli
true_check = store.check_memory_all_ranks
def check_memory_all_ranks(world, num_bytes):
    print(f"copies {num_bytes}", flush=True)
    true_check(world, num_bytes)
store.check_memory_all_ranks = check_memory_all_ranks
left = {left}
if left is not None:
    store.available_bytes = lambda: left
sys.exit(cli.main())
"""


def run_with(left: int | None, words: list[str]) -> subprocess.CompletedProcess[str]:
    """``tlt train`` on one rank with so many bytes of host memory left; says what it asks for."""
    command = [mpiexec(), "-n", "1", sys.executable, "-m", "mpi4py", "-c", ASKING.replace("{left}", str(left)), "train"]
    environment = {**os.environ, **LAUNCH_ENVIRONMENT, "PYTHONPATH": str(ROOT), "TLT_RANKS": "1"}
    return subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.mpi
@pytest.mark.ci
@pytest.mark.parametrize("settings", [["lora.rank=4"], ["optimizer.zero_stage=3", "optimizer.offload=parameters"]])
def test_plan_preflight_and_a_run_on_cpus_count_the_same_host_memory(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copies of a run's first step are those of the plan, and all three ask for what this process has left."""
    words = [str(JOBS / "tiny.toml"), f"run.folder={tmp_path}", "run.ranks=1", "run.num_steps=1", *settings]
    words += ["rollout.prompts_per_step=1", "rollout.group_size=2", "rollout.max_new_tokens=4"]
    done = run_with(None, words)
    assert done.returncode == 0, done.stderr
    copied = [int(count) for count in re.findall(r"^copies (\d+)$", done.stdout, re.MULTILINE)]
    config = load_config(words[0], words[1:])
    job = PlannedJob(config, SlurmRequest())
    chunk = 1 << 24
    (planned,) = {phase.parts["copy for checkpoints"] for phase in job.plan.phases if phase.name == "rollout"}
    assert planned == sum(-(-count // chunk) * chunk for count in copied)
    needed = job.plan.node_bytes
    for left, fits in ((needed, True), (needed - 1, False)):
        for module in (summary, system_checks):
            monkeypatch.setattr(module, "available_bytes", lambda left=left: left)
        capsys.readouterr()
        assert main(["plan", *words]) == (0 if fits else 1)
        assert ("Does not fit." in capsys.readouterr().out) is not fits
        assert (system_checks.check_memory(job).level == "ok") is fits
    done = run_with(max(copied) - 1, [*words, "run.name=small"])
    assert done.returncode == 2 and "of host memory left, and to save a checkpoint its ranks copy" in done.stderr
