"""Response tokens per second of whole RL steps: this project's main job against TRL's GRPOTrainer, on the same work.

    python tools/bench_trl.py                      # the embedded job, 2 processes of one thread each on both sides
    python tools/bench_trl.py --steps 5 --repeats 3

Both sides start from the same weights and train on the same prompts in the same order (16 x 8 responses a step, at most
512 tokens, temperature 1), with the same rewards, loss and learning rate. TRL runs in float32 without gradient
checkpointing and generates with transformers in two modes: ``generate``, its default, and continuous batching. Given
several ``--batches`` or ``--continuous``, it runs in each combination; the default of the last was the
fastest of eight.
Every side is a launch of its own; launches are interleaved, and the first step of each is left out, as a warm-up. Speed
is the median over steps of response tokens over seconds of the step (rollout, reward, update).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.config import Config, load_config

JOB = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
RANKS = 2
CONTINUOUS = {"num_blocks": 256, "max_batch_tokens": 512}


def job_of(folder: str, options: argparse.Namespace) -> Config:
    """The main job, with nothing but its length, place and ranks changed."""
    overrides = [f"run.folder={folder}", f"run.num_steps={options.steps + 1}", f"run.ranks={RANKS}"]
    return load_config(JOB, [*overrides, "checkpoint.every_steps=1000"])


# -- ours -------------------------------------------------------------------------------------------------------------


class Recorder(StepReporter):
    """Records the figures of every step; its seconds are those since the step before was shown, saves included."""

    def __init__(self) -> None:
        super().__init__(Screen(False))
        self.rows: list[dict[str, float]] = []
        self._shown = time.perf_counter()

    def stepped(self, summary: Any) -> None:
        now = time.perf_counter()
        row = {"tokens": summary["perf/total_num_tokens"], "seconds": now - self._shown}
        self.rows.append({**row, "rollout_seconds": summary["timing_s/gen"], "score": summary["critic/score/mean"]})
        self._shown = now


def run_ours(options: argparse.Namespace) -> None:
    """One rank of the main job."""
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    world, recorder = World.connect(), Recorder()
    run(job_of(options.folder, options), world, recorder)
    leave_process_group()
    if world.rank == 0:
        write_rows(options, recorder.rows)
    world.barrier()


# -- TRL's ------------------------------------------------------------------------------------------------------------


def trl_settings(config: Config, options: argparse.Namespace) -> Any:
    """The job as TRL's arguments."""
    from trl.trainer.grpo_config import GRPOConfig

    rollout, algorithm = config.rollout, config.algorithm
    batch, continuous = options.setting["batch"], options.setting["continuous"]
    return GRPOConfig(
        output_dir=options.folder,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=config.samples_per_step // (RANKS * batch * algorithm.updates_per_step),
        generation_batch_size=config.samples_per_step,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        use_transformers_continuous_batching=continuous is not None,
        transformers_continuous_batching_config=continuous,
        temperature=rollout.temperature,
        top_k=0,
        top_p=1.0,
        max_steps=(options.steps + 1) * algorithm.updates_per_step,
        learning_rate=config.optimizer.learning_rate,
        lr_scheduler_type="constant",
        loss_type="dapo",
        epsilon=algorithm.recipe.clip_low,
        epsilon_high=algorithm.recipe.clip_high,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        mask_truncated_completions=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def run_trl(options: argparse.Namespace) -> None:
    """One process of TRL's trainer on the same job."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    from tlt_hpc.data.prompts import open_prompts
    from tlt_hpc.models.tokenizer import find_model, load_tokenizer
    from tlt_hpc.rewards.text import boxed

    torch.set_num_threads(1)
    config = job_of(options.folder, options)
    folder = find_model(config.model.path)
    prompts = open_prompts(config, load_tokenizer(folder))
    drawn = [prompt for step in range(options.steps + 1) for prompt in prompts.batch(step)]
    rows: list[dict[str, float]] = []
    now: dict[str, float] = {}

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        scores = [boxed(text, truth).reward for text, truth in zip(completions, answer, strict=True)]
        now["tokens"] += sum(map(len, completion_ids))
        now["score"] += sum(scores) / config.samples_per_step
        now["rollout_seconds"] = time.perf_counter() - now["start"]
        return scores

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.distributed.barrier()
            now.update(start=time.perf_counter(), tokens=0.0, score=0.0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            row = torch.tensor([now["tokens"], now["score"]])
            torch.distributed.all_reduce(row)
            seconds = time.perf_counter() - now["start"]
            figures = {"tokens": float(row[0]), "score": float(row[1]), "seconds": seconds}
            rows.append({**figures, "rollout_seconds": now["rollout_seconds"]})

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
        # not AutoTokenizer's: for every qwen2 model that takes Qwen's own way of splitting text
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        reward_funcs=reward,
        args=trl_settings(config, options),
        train_dataset=Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in drawn]),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        write_rows(options, joined(rows, config.algorithm.updates_per_step))


def joined(rows: list[dict[str, float]], updates: int) -> list[dict[str, float]]:
    """Optimiser steps that share a rollout, as one step of ours."""
    parts = [rows[start : start + updates] for start in range(0, len(rows), updates)]
    return [
        {**part[0], "tokens": sum(row["tokens"] for row in part), "seconds": sum(row["seconds"] for row in part)}
        for part in parts
    ]


# -- both -------------------------------------------------------------------------------------------------------------


def write_rows(options: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    (Path(options.folder) / "rows.json").write_text(json.dumps(rows))


def trl_sides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """TRL's settings by name; a name has what tells it from others of its mode."""
    modes = [None, *options.continuous]
    settings = [{"batch": batch, "continuous": mode} for mode, batch in itertools.product(modes, options.batches)]
    several = len(settings) > 2

    def name(setting: dict[str, Any]) -> str:
        mode = "generate" if setting["continuous"] is None else "continuous batching"
        return f"TRL, {mode}" + (f" {json.dumps(setting)}" if several else "")

    return {name(setting): setting for setting in settings}


def launch(setting: dict[str, Any] | None, options: argparse.Namespace) -> list[dict[str, float]]:
    """One launch of TRL with ``setting``, or without one of ours; the rows of its steps after the first."""
    side = "trl" if setting else "ours"
    starts = {
        "ours": [find_mpiexec(), "-n", str(RANKS), sys.executable, "-m", "mpi4py"],
        "trl": [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        command = [*starts[side], __file__, "--side", side, "--folder", folder, "--steps", str(options.steps)]
        command += ["--setting", json.dumps(setting)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        rows: list[dict[str, float]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows[1:]


def median_of(rows: list[dict[str, float]], name: str) -> float:
    """A figure's median over steps; ``speed`` is tokens over seconds."""
    return statistics.median(row["tokens"] / row["seconds"] if name == "speed" else row[name] for row in rows)


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All sides' rows, launches interleaved."""
    sides = {"ours": None, **trl_sides(options)}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repetition in range(options.repeats):
        for name, setting in sides.items():
            rows[name] += launch(setting, options)
            speed = median_of(rows[name], "speed")
            print(f"  repetition {repetition + 1}, {name}: {speed:,.0f} response tokens/s", flush=True)
    return rows


def report(rows: Mapping[str, list[dict[str, float]]]) -> None:
    """Print the table, and ours over each mode of TRL, the fastest last."""
    width = max(map(len, rows)) + 2
    print(f"\n{'':{width}}{'tokens/s':>10}{'tokens':>9}{'step s':>9}{'rollout s':>11}{'score':>8}")
    speeds = {name: median_of(own, "speed") for name, own in rows.items()}
    for side, own in rows.items():
        tokens, seconds, rollout, score = (
            median_of(own, key) for key in ("tokens", "seconds", "rollout_seconds", "score")
        )
        print(f"{side:{width}}{speeds[side]:10,.0f}{tokens:9,.0f}{seconds:9.2f}{rollout:11.2f}{score:8.3f}")
    ours = speeds.pop("ours")
    print("\nours, in response tokens per second of whole steps:")
    for name, speed in sorted(speeds.items(), key=lambda item: item[1]):
        print(f"  {ours / speed:.2f}x {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a launch")
    parser.add_argument("--repeats", type=int, default=2, help="launches of each side")
    parser.add_argument("--batches", type=int, nargs="+", default=[32], help="TRL's per-device batches")
    parser.add_argument("--continuous", type=json.loads, nargs="+", default=[CONTINUOUS], help="JSON, for TRL")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        {"ours": run_ours, "trl": run_trl}[options.side](options)
        return 0
    report(compare(options))
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_trl", main))
