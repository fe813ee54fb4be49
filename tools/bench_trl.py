"""Response tokens per second of whole RL steps: this project's main job against TRL's GRPOTrainer, on the same work.

Both sides start from the same weights and train on the same prompts in the same order (16 x 8 responses a step, at most
512 tokens, temperature 1), with the same rewards, loss and learning rate, in 2 processes of one thread each. TRL runs
in float32 without gradient checkpointing and generates with transformers in two modes: ``generate``, its default, and
continuous batching, with the fastest of eight settings. Every side is a launch of its own; launches are interleaved,
and the first step of each is left out, as a warm-up. Speed is the median over steps of response tokens over seconds of
the step (rollout, reward, update).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.cluster.launcher import find_mpiexec
from tlt_hpc.config import Config, load_config

JOB = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
RANKS, TRL_BATCH = 2, 32
SIDES = {
    "ours": None,
    "TRL, generate": {},
    "TRL, continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 256, "max_batch_tokens": 512},
    },
}
"""TRL's own settings of each of its modes."""


def job_of(folder: Path, steps: int) -> Config:
    """The main job, with nothing but its length, place and ranks changed; the first step is a warm-up."""
    overrides = [f"run.folder={folder}", f"run.num_steps={steps + 1}", f"run.ranks={RANKS}"]
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


def run_ours(config: Config, folder: Path) -> None:
    """One rank of the main job."""
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    world, recorder = World.connect(), Recorder()
    run(config, world, recorder)
    leave_process_group()
    if world.rank == 0:
        write_rows(folder, recorder.rows)
    world.barrier()


# -- TRL's ------------------------------------------------------------------------------------------------------------


def trl_settings(config: Config, folder: Path, mode: dict[str, Any]) -> Any:
    """The job as TRL's arguments."""
    from trl.trainer.grpo_config import GRPOConfig

    rollout, algorithm = config.rollout, config.algorithm
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        per_device_train_batch_size=TRL_BATCH,
        gradient_accumulation_steps=config.samples_per_step // (RANKS * TRL_BATCH * algorithm.updates_per_step),
        generation_batch_size=config.samples_per_step,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=0,
        top_p=1.0,
        max_steps=config.run.num_steps * algorithm.updates_per_step,
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
        **mode,
    )


def run_trl(config: Config, folder: Path, mode: dict[str, Any]) -> None:
    """One process of TRL's trainer on the same job."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    from tlt_hpc.data.prompts import open_prompts
    from tlt_hpc.models.tokenizer import find_model, load_tokenizer
    from tlt_hpc.rewards.text import boxed

    torch.set_num_threads(1)
    source = find_model(config.model.path)
    prompts = open_prompts(config, load_tokenizer(source))
    drawn = [prompt for step in range(config.run.num_steps) for prompt in prompts.batch(step)]
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
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa"),
        # not AutoTokenizer's: for every qwen2 model that takes Qwen's own way of splitting text
        processing_class=PreTrainedTokenizerFast.from_pretrained(source),
        reward_funcs=reward,
        args=trl_settings(config, folder, mode),
        train_dataset=Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in drawn]),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        write_rows(folder, joined(rows, config.algorithm.updates_per_step))


def joined(rows: list[dict[str, float]], updates: int) -> list[dict[str, float]]:
    """Optimiser steps that share a rollout, as one step of ours."""
    parts = [rows[start : start + updates] for start in range(0, len(rows), updates)]
    return [
        {**part[0], "tokens": sum(row["tokens"] for row in part), "seconds": sum(row["seconds"] for row in part)}
        for part in parts
    ]


# -- both -------------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "rows.json").write_text(json.dumps(rows))


def launch(side: str, steps: int) -> list[dict[str, float]]:
    """One launch of a side; the rows of its steps after the first."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    if side == "ours":
        launcher = [find_mpiexec(), "-n", str(RANKS), sys.executable, "-m", "mpi4py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, __file__, side, str(steps), folder]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        rows: list[dict[str, float]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows[1:]


def bench(options: argparse.Namespace) -> None:
    """Print the table, and ours over each mode of TRL."""
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repetition in range(options.repeats):
        for side in SIDES:
            rows[side] += launch(side, options.steps)
            print(f"  repetition {repetition + 1}, {side}: {speed_of(rows[side]):,.0f} response tokens/s", flush=True)
    print(f"\n{'':26}{'tokens/s':>10}{'tokens':>9}{'step s':>9}{'rollout s':>11}{'score':>8}")
    for side, own in rows.items():
        tokens, seconds, rollout, score = (
            median(row[key] for row in own) for key in ("tokens", "seconds", "rollout_seconds", "score")
        )
        print(f"{side:26}{speed_of(own):10,.0f}{tokens:9,.0f}{seconds:9.2f}{rollout:11.2f}{score:8.3f}")
    print("\nours, in response tokens per second of whole steps:")
    for side in list(SIDES)[1:]:
        print(f"  {speed_of(rows['ours']) / speed_of(rows[side]):.2f}x {side}")


def speed_of(rows: list[dict[str, float]]) -> float:
    """Response tokens per second: the median over steps."""
    return median(row["tokens"] / row["seconds"] for row in rows)


if __name__ == "__main__":
    name, num_steps, place = sys.argv[1:]
    job, mode = job_of(Path(place), int(num_steps)), SIDES[name]
    run_ours(job, Path(place)) if mode is None else run_trl(job, Path(place), mode)
