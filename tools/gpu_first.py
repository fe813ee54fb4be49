"""The first minutes on a GPU: everything that has only been tested without one, in one command and on one page.

    python tools/gpu_first.py --output FOLDER                # on a node with a GPU; at most ten minutes
    python tools/gpu_first.py --output FOLDER --device cpu   # what of it a CPU can run, to try it out

Each part is a process of its own with a time limit, and a part that fails does not stop those after it. FOLDER gets a
log of each part and ``page.md``: what passed, what failed, what did not run, and the figures. Needs no network and no
model: weights are the embedded ones, or random at the shape of Qwen2.5-7B. Status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import torch
from bench_shape import choose_device

from tlt_hpc.storage.folder import make_folder

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
NUM_FIGURES = 8
"""Last lines of a part's log that the page shows."""
_ENDED = 124
"""Status of a part that its time limit ended: that of coreutils' timeout."""
_LEAST_SECONDS = 5.0
"""A part that has less time left does not begin."""


@dataclass(frozen=True)
class Part:
    """One question, and the command that answers it by its exit status."""

    name: str
    question: str
    command: Sequence[str]
    seconds: int
    """Time limit."""
    on_cpu: Sequence[str] | None = None
    """The command without a GPU; None: it cannot be answered there."""
    shares_gpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a part: its exit status, None if it did not run, and the end of its log."""

    part: Part
    status: int | None
    seconds: float
    lines: Sequence[str]

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.status is None:
            return "did not run"
        if self.status == 0:
            return "passed"
        return f"ended after {self.seconds:.0f} s" if self.status == _ENDED else f"FAILED (status {self.status})"


def tool(name: str, *arguments: str) -> list[str]:
    """The command of a tool beside this one."""
    return [sys.executable, str(TOOLS / name), *arguments]


def tlt(folder: Path, *arguments: str) -> list[str]:
    """A command of ``tlt`` whose runs are in the folder."""
    return [sys.executable, "-m", "tlt_hpc", *arguments, f"run.folder={folder / 'runs'}"]


def parts_of(folder: Path) -> list[Part]:
    """The parts in their order: a later one rests on those before it."""
    tiny = str(ROOT / "jobs" / "tiny.toml")
    cuda, cpu, half = "model.device=cuda", "model.device=cpu", "model.dtype=bfloat16"
    small = ("--tokens", "500", "--ways", "switched")
    shape = ("--layers", "1", "--batches", "1", "--new-tokens", "4", "--repeats", "1", "--dtype", "float32")
    sanitizer = shutil.which("compute-sanitizer")
    exact = ("--device", "cuda", "--tokens", "30000")
    speed = ("--device", "cuda", "--batches", "1,32,128", "--new-tokens", "64")
    return [
        Part("kernels", "Does each program compute what its reference does, and each row the same bits in every pass?",
             tool("check_kernels.py"), 120),
        Part("float32", "Is the text the same in all ways of decoding, with the tie guard?",
             tool("prove_exactness.py", *exact), 120, tool("prove_exactness.py", *small)),
        Part("bfloat16", "And in batch-invariant mode, without it?",
             tool("prove_exactness.py", *exact, "--dtype", "bfloat16"), 120,
             tool("prove_exactness.py", *small, "--dtype", "bfloat16")),
        Part("speed", "How fast is plain decoding at 7B shape, against the memory's bandwidth?",
             tool("bench_shape.py", *speed), 120,
             tool("bench_shape.py", *shape)),
        Part("speed by the library", "And without batch-invariant kernels: what do they cost?",
             tool("bench_shape.py", *speed, "--library"), 120),
        Part("compare", "Are text and policy the same with and without drafts, in training?",
             tlt(folder, "compare", tiny, "--steps", "2", "run.ranks=1", cuda, half), 150,
             tlt(folder, "compare", tiny, "--steps", "1", "--without", "ngram", "run.ranks=1", cpu)),
        Part("two ranks", "Do two ranks train the drafter in the tail, merge it and release each other?",
             tlt(folder, "train", tiny, "run.num_steps=4", "run.ranks=2", "run.name=two-ranks", cuda), 120,
             tlt(folder, "train", tiny, "run.num_steps=2", "run.ranks=2", "run.name=two-ranks", cpu), shares_gpu=True),
        Part("memory errors", "Does a program touch memory that is not its own?",
             [sanitizer or "compute-sanitizer", "--error-exitcode", "9",
              *tool("prove_exactness.py", "--device", "cuda", "--tokens", "500", "--ways", "trees")], 180),
    ]  # fmt: skip


def run(part: Part, command: Sequence[str], folder: Path, seconds: float) -> Outcome:
    """Run a part into its log, for so many seconds at most."""
    log, start = folder / f"{part.name.replace(' ', '-')}.log", time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    environment["HYDRA_LAUNCHER"] = "fork"  # in a job of one task MPICH would ask Slurm for more
    if part.shares_gpu:
        environment["TLT_SHARE_GPUS"] = "1"
    limited = ["timeout", "--kill-after=5", str(min(part.seconds, seconds)), *command]  # ends its ranks as well
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            limited, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=folder, env=environment, check=False
        )
    status = _ENDED if done.returncode == -signal.SIGKILL else done.returncode  # timeout's own end, where it kills
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(part, status, time.monotonic() - start, lines[-NUM_FIGURES:])


def page_of(outcomes: Sequence[Outcome], device: str, place: str) -> str:
    """The page in Markdown."""
    rows = [f"| {o.part.name} | {o.part.question} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes]
    logs = [f"## {o.part.name}\n\n```\n" + "\n".join(o.lines) + "\n```\n" for o in outcomes if o.lines]
    head = f"# First minutes on {place}\n\nDevice: {device}, {time.strftime('%Y-%m-%d %H:%M')}\n"
    return "\n".join([head, "| part | question | outcome | seconds |", "|---|---|---|---|", *rows, "", *logs])


def main() -> int:
    """Run all parts; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (default 10)")
    options = parser.parse_args()
    device, folder = choose_device(options.device), options.output.resolve()
    make_folder(folder)
    place = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    end, outcomes = time.monotonic() + 60 * options.minutes, list[Outcome]()
    for part in parts_of(folder):
        command = part.command if device.type == "cuda" else part.on_cpu
        if part.name == "memory errors" and shutil.which(part.command[0]) is None:
            command = None
        print(f"{part.name}: {part.question}", flush=True)
        left = end - time.monotonic()
        if command is None or left < _LEAST_SECONDS:
            reason = "no time was left" if command is not None else "not on this machine"
            outcomes.append(Outcome(part, None, 0.0, [reason]))
        else:
            outcomes.append(run(part, command, folder, left))
        print(f"  {outcomes[-1].verdict} in {outcomes[-1].seconds:.0f} s", flush=True)
        # written after each part: a job that Slurm ends leaves what is known so far
        (folder / "page.md").write_text(page_of(outcomes, options.device, place), encoding="utf-8")
    print(f"written to {folder / 'page.md'}")
    return 1 if any(outcome.status for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(run_script("gpu_first", main))
