"""The table of docs/cluster.md: what each job takes on GPUs of two sizes and on several nodes, as planned.

python tools/tuning_table.py            # prints it; tests/test_files.py holds the page against it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.config import ConfigError, check_ranks, load_config
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryLimits, Situation
from tlt_hpc.plan.memory.savings import cheapest_fit
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.plan_options import GPU_GB

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9
JOBS = ("qwen7b", "qwen32b", "llama70b")
GPU_NAMES = ("a100-40", "h100-80")
NODES = (1, 4, 8)
GPUS = 8


def rows() -> Iterator[str]:
    """The lines of the table in Markdown; nodes that a job's samples cannot be dealt over are left out."""
    yield "| job | GPU | nodes of 8 | settings beside the job's | peak | host memory a node | disk, at most |"
    yield "|---|---|---|---|---|---|---|"
    for job in JOBS:
        for gpu in GPU_NAMES:
            for nodes in NODES:
                if line := row(job, gpu, nodes):
                    yield line


def row(job: str, gpu: str, nodes: int) -> str:
    """One line; empty where the ranks cannot be."""
    config = load_config(ROOT / "jobs" / f"{job}.toml")
    num_ranks = nodes * GPUS
    try:
        check_ranks(config, num_ranks)
    except ConfigError:
        return ""
    situation = Situation(config, find_shape(config.model.path, None), num_ranks, GPUS, "cuda")
    found = cheapest_fit(plan_memory(situation), MemoryLimits(int(GPU_GB[gpu] * GB)))
    head = f"| `{job}` | `{gpu}` | {nodes} |"
    if found is None:
        return f"{head} does not fit | | | |"
    peak, host, disk = (
        found.plan.peak.num_bytes,
        found.plan.node_bytes,
        sum(part.num_bytes for part in found.plan.disk),
    )
    settings = f"`{found.what}`" if found.what else "none"
    return f"{head} {settings} | {peak / GB:.0f} GB | {host / GB:,.0f} GB | {disk / GB / 1000:.1f} TB |"


def main() -> None:
    """Print the table."""
    print("\n".join(rows()))


if __name__ == "__main__":
    sys.exit(ending("tuning_table", main))
