"""What a large data set costs a rank: seconds and memory to open it, seconds a step, seconds to go on at a late step.

Writes a data set of verl's schema to a temporary folder, as parquet, as .jsonl and as Arrow (what `datasets` saves),
and opens each in a process of its own. Memory is what belongs to the process alone: mapped files are shared by the
ranks of a node. Knows no model weights: a tokenizer is enough.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import pyarrow as pa
import pyarrow.parquet as pq

from tlt_hpc.config import parse_config
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.models.tokenizer import find_model, load_tokenizer, read_chat_format

_WORDS = "find all real x such that the sum of roots is equal to one where a and b are positive integers"


def main() -> int:
    """Print one line a format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder with a chat template, e.g. what `make smollm2` unpacks")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--words", type=int, default=60, help="of a prompt, on average")
    parser.add_argument("--prompts-per-step", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="steps that a median is taken over")
    parser.add_argument("--late-step", type=int, default=200, help="the step at which a run goes on")
    parser.add_argument("--overlong", choices=("error", "drop"), default="error")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        print(json.dumps(measure(options)))
        return 0
    print(f"{options.rows:,} rows, {options.prompts_per_step} prompts a step, data.overlong = {options.overlong!r}")
    with tempfile.TemporaryDirectory() as folder:
        for path in write_all(Path(folder), options.rows, options.words):
            command = [sys.executable, __file__, *sys.argv[1:], "--file", str(path)]
            figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            size = path.stat().st_size / 1e6
            print(f"{path.suffix:9} {size:7.0f} MB  " + "  ".join(f"{name} {value}" for name, value in figures.items()))
    return 0


def write_all(folder: Path, num_rows: int, num_words: int) -> list[Path]:
    """The same rows in three formats."""
    draw = random.Random(0)
    rows = [make_row(draw, index, num_words) for index in range(num_rows)]
    table = pa.Table.from_pylist(rows)
    paths = [folder / f"data{suffix}" for suffix in (".parquet", ".jsonl", ".arrow")]
    pq.write_table(table, paths[0])
    with paths[1].open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with pa.OSFile(str(paths[2]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return paths


def make_row(draw: random.Random, index: int, num_words: int) -> dict[str, object]:
    """A row of verl's schema."""
    text = " ".join(draw.choices(_WORDS.split(), k=draw.randint(num_words // 2, num_words * 3 // 2)))
    return {
        "data_source": "made",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"index": index, "split": "train"},
    }


def measure(options: argparse.Namespace) -> dict[str, str]:
    """Figures of one file, in a process that has opened no other."""
    folder = find_model(options.model)
    tokenizer, chat = load_tokenizer(folder), read_chat_format(folder)
    config = parse_config(
        {
            "run": {"name": "bench", "num_steps": 1},
            "model": {"path": options.model},
            "data": {"source": str(options.file), "overlong": options.overlong},
            "rollout": {"prompts_per_step": options.prompts_per_step, "group_size": 2, "max_new_tokens": 1},
        }
    )
    import tlt_hpc.data.arrow  # noqa: F401 (its import is none of the opening)

    before, start = own_bytes(), time.perf_counter()
    prompts = open_prompts(config, tokenizer, chat)
    opened = time.perf_counter() - start
    start = time.perf_counter()
    prompts.batch(options.late_step)
    late = time.perf_counter() - start
    steps = [seconds_of(lambda: prompts.batch(step)) for step in range(1, options.repeats + 1)]  # noqa: B023
    start = time.perf_counter()
    prompts.fingerprints()
    hashed = time.perf_counter() - start
    return {
        "open": f"{opened:.2f} s",
        "memory": f"{(own_bytes() - before) / 1e6:.0f} MB",
        "step": f"{median(steps) * 1e3:.0f} ms",
        f"first at step {options.late_step}": f"{late:.2f} s",
        "fingerprint (rank 0)": f"{hashed:.2f} s",
    }


def seconds_of(work: object) -> float:
    """Wall-clock seconds of a call."""
    assert callable(work)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def own_bytes() -> int:
    """Resident bytes that no other process shares."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(ending("bench_data", main))
