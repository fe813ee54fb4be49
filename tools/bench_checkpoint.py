"""For how long a checkpoint blocks the step: copied and written in the background, against written at once.

    python tools/bench_checkpoint.py                      # the drafter of Qwen2.5-7B: 259 M parameters, two moments
    python tools/bench_checkpoint.py --shape embedded     # the embedded job: its policy and its drafter

Three ways, interleaved: `background` is what a run does (trained tensors and moments alone, copied to host memory, then
written and synced by a thread; the time is that of the copy, and of all calls that see the save through); `at once` is
the same content written and synced while the caller waits; `full` is, in one safetensors file, that content and what
training does not change (the embedding and head that the drafter reads, in bfloat16), synced too. A product of matrices
goes on during the background's writing: what that costs it is printed as well. Random weights; nothing is left on disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.folder import find_model, folder_weights
from tlt_hpc.models.piece import Piece
from tlt_hpc.models.shape import ModelShape, read_shape
from tlt_hpc.storage.folder import sync

QWEN_7B = ModelShape(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    norm_epsilon=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_positions=32_768,
    tied_head=False,
    qkv_bias=True,
    output_bias=False,
    head_norm=False,
    eos_token_ids=(),
)
WORK_ROWS = 512


class Alone:
    """A world of one rank, without MPI."""

    rank, size, node, hostname = 0, 1, 0, "here"

    def allgather(self, item: Any) -> list[Any]:
        return [item]


@dataclass(frozen=True)
class Subject:
    """What is saved: tensors that training changes, and those that it does not."""

    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]


@dataclass(frozen=True)
class Background:
    """One background save: seconds that the caller was held up, seconds until it was whole, and products meanwhile."""

    blocked_seconds: float
    core_seconds: float
    """Of the copy, on the caller's core: what it takes where neighbours leave it alone."""
    whole_seconds: float
    products_per_second: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix="bench_checkpoint-", dir=options.folder))
    try:
        figures = measure(embedded_job() if options.shape == "embedded" else drafter_7b(), folder, options.repeats)
    finally:
        shutil.rmtree(folder)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("7b", "embedded"), default="7b", help="what is saved (default: 7b)")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where to write (default: here; 7b: 9 GB for a while)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give 1 or more")
    return options


def drafter_7b() -> Subject:
    """Weights and moments of the drafter for Qwen2.5-7B, 3.1 GB, and the policy's embedding and head, 2.2 GB."""
    embedding = (QWEN_7B.vocab_size, QWEN_7B.hidden_size)
    frozen = {name: torch.randn(embedding, dtype=torch.bfloat16) for name in ("embedding", "head")}
    return Subject(with_moments(drafter_weights(QWEN_7B)), frozen)


def embedded_job() -> Subject:
    """Weights and moments of the embedded policy and its drafter; the drafter's embedding and head are the policy's."""
    folder = find_model(EMBEDDED_MODEL)
    policy = {f"policy.{name}": weight.float() for name, weight in folder_weights(folder)}
    shape = read_shape(folder)
    frozen = {name: torch.randn(shape.vocab_size, shape.hidden_size).bfloat16() for name in ("embedding", "head")}
    return Subject(with_moments({**policy, **drafter_weights(shape)}), frozen)


def drafter_weights(shape: ModelShape) -> dict[str, Tensor]:
    """Random weights of the EAGLE form."""
    h, i, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    sizes = {
        "fc": (h, 2 * h),
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, h),
        "output": (h, heads),
        "gate_up": (2 * i, h),
        "down": (h, i),
        "post_norm": (h,),
    }
    return {f"drafter.{name}": torch.randn(size) for name, size in sizes.items()}


def with_moments(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights and, for each, Adam's two moments, in fp32."""
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {
        f"{name}.{kind}": weight if kind == "weight" else torch.randn_like(weight)
        for name, weight in weights.items()
        for kind in kinds
    }


def measure(subject: Subject, folder: Path, repeats: int) -> dict[str, Any]:
    """All ways ``repeats`` times, in turn, after one background save that nobody counts."""
    store = CheckpointStore(folder, keep=1)
    num_bytes = sum(Piece.whole(tensor).num_bytes for tensor in subject.trained.values())
    reserving = seconds_of(lambda: store.reserve(Alone(), num_bytes, pinned=False))  # type: ignore[arg-type]
    steps = itertools.count(1)
    in_background(store, next(steps), subject)
    background, at_once, full, alone = [], [], [], []
    for _ in range(repeats):
        alone.append(products_per_second(lambda done: done >= 1.0))
        background.append(in_background(store, next(steps), subject))
        at_once.append(seconds_of(lambda: save_at_once(store, next(steps), subject)))
        full.append(seconds_of(lambda: save_full(folder / "full.safetensors", subject)))
    blocked = [each.blocked_seconds for each in background]
    slowdown = [1 - each.products_per_second / rate for each, rate in zip(background, alone, strict=True)]
    return {
        "trained_bytes": num_bytes,
        "frozen_bytes": sum(tensor.nbytes for tensor in subject.frozen.values()),
        "reserve_seconds": reserving,
        "background_blocked_seconds": blocked,
        "background_core_seconds": [each.core_seconds for each in background],
        "background_whole_seconds": [each.whole_seconds for each in background],
        "at_once_seconds": at_once,
        "full_seconds": full,
        "slowdown_while_writing": slowdown,
        "ratio_at_once": statistics.median(a / b for a, b in zip(at_once, blocked, strict=True)),
        "ratio_full": statistics.median(f / b for f, b in zip(full, blocked, strict=True)),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def in_background(store: CheckpointStore, step: int, subject: Subject) -> Background:
    """A background save beside products of matrices."""
    start, on_core = time.perf_counter(), time.thread_time()
    store.begin(step, Alone(), {"drafter": subject.trained}, {})  # type: ignore[arg-type]
    blocked, on_core = time.perf_counter() - start, time.thread_time() - on_core

    def is_whole(_: float) -> bool:
        nonlocal blocked
        asked = time.perf_counter()
        report = store.report()
        store.advance([report])
        blocked += time.perf_counter() - asked
        return report is None

    rate = products_per_second(is_whole)
    return Background(blocked, on_core, time.perf_counter() - start, rate)


def products_per_second(is_over: Callable[[float], bool]) -> float:
    """Products of square matrices per second until ``is_over`` (seconds so far) says so."""
    left, right = torch.randn(WORK_ROWS, WORK_ROWS), torch.randn(WORK_ROWS, WORK_ROWS)
    start, count = time.perf_counter(), 0
    while not is_over(time.perf_counter() - start):
        torch.mm(left, right)
        count += 1
    return count / (time.perf_counter() - start)


def save_at_once(store: CheckpointStore, step: int, subject: Subject) -> None:
    store.save(step, Alone(), {"drafter": subject.trained}, {})  # type: ignore[arg-type]


def save_full(path: Path, subject: Subject) -> None:
    save_file({**subject.trained, **subject.frozen}, path)
    sync(path)


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def show(figures: dict[str, Any]) -> None:
    def median(name: str) -> float:
        return float(statistics.median(figures[name]))

    print(f"trained {figures['trained_bytes'] / 1e6:,.1f} MB, frozen {figures['frozen_bytes'] / 1e6:,.1f} MB")
    print(f"memory for the copy taken in {figures['reserve_seconds'] * 1e3:,.1f} ms, once")
    for name, label in (
        ("background_blocked_seconds", "background: blocked for"),
        ("background_core_seconds", "  of it on the core"),
        ("background_whole_seconds", "background: whole after"),
        ("at_once_seconds", "at once: blocked for"),
        ("full_seconds", "full, at once: blocked for"),
    ):
        every = ", ".join(f"{seconds * 1e3:,.1f}" for seconds in figures[name])
        print(f"{label:28}{median(name) * 1e3:12,.1f} ms   ({every})")
    print(f"blocked: 1/{figures['ratio_at_once']:.1f} of at once, 1/{figures['ratio_full']:.1f} of full")
    print(f"products while it is written: {median('slowdown_while_writing'):.0%} fewer than alone")
    print(f"peak memory {figures['peak_bytes'] / 1e9:.1f} GB, {figures['threads']} threads, {figures['cores']} cores")


if __name__ == "__main__":
    sys.exit(ending("bench_checkpoint", main))
