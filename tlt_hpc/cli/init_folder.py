"""``tlt init``: the job files and batch scripts that come with the package, copied to where they are edited and run."""

from __future__ import annotations

import argparse
import filecmp
import shlex
import shutil
from pathlib import Path

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.source import PACKAGE
from tlt_hpc.config import UserError

# sbatch/smoke_gpu.sh runs the tools; the wheel has the same files (pyproject.toml)
PATTERNS = (
    "jobs/*.toml", "jobs/*.jsonl", "jobs/*.py", "sbatch/*.sh",
    *(f"tools/{name}.py" for name in ("bench_shape", "check_kernels", "gpu_first", "prove_exactness")),
)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Copy what a folder lacks, and print what to do there.

    Raises:
        UserError: a file there differs from the one to be copied; nothing was written.
        OSError: the folder cannot be written.
    """
    source, folder = find_shipped_folder(), options.folder
    names = sorted(path.relative_to(source) for pattern in PATTERNS for path in source.glob(pattern))
    there = [name for name in names if (folder / name).exists()]
    if changed := [str(name) for name in there if not filecmp.cmp(source / name, folder / name, shallow=False)]:
        raise UserError(f"{folder} has other versions of {', '.join(changed)}; move them away, or give another folder")
    missing = [name for name in names if name not in there]
    for name in missing:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, folder / name)
    print(f"{folder}: {format_count(len(missing), 'file')} copied, {len(there)} there already")
    print(f"next: cd {shlex.quote(str(folder))} && tlt train jobs/tiny.toml")
    print("on a cluster: sbatch -A ACCOUNT -p PARTITION sbatch/smoke.sh")
    print("then: tlt submit jobs/qwen7b.toml --script sbatch/train_qwen7b.sh --account ACCOUNT --partition PARTITION")


def find_shipped_folder() -> Path:
    """The folder that has ``jobs/`` and ``sbatch/``: the clone, or in an installed package its own copy."""
    inside = PACKAGE / "shipped"
    return inside if inside.is_dir() else PACKAGE.parent
