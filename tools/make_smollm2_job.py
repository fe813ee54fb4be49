"""Write a job on SmolLM2-135M-Instruct, and prompts for it, to try `tlt warmup` on a real model and vocabulary.

make smollm2
python tools/make_smollm2_job.py --output runs/smollm2
tlt warmup runs/smollm2/job.toml
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

TASKS = (
    "Explain {} in a few sentences.",
    "Explain {} to a child of ten.",
    "Write a short story in which {} matters.",
    "List five facts about {}.",
    "Give three arguments why {} is worth learning about.",
    "Write a letter to a friend about {}.",
    "What are common mistakes people make about {}?",
    "Write a quiz of three questions and answers about {}.",
)
TOPICS = (
    "photosynthesis", "the French Revolution", "a hash table", "bread baking", "the moon", "prime numbers", "gravity",
    "volcanoes", "the violin", "a bicycle", "vaccines", "the stock market", "chess", "glaciers", "the printing press",
    "sleep", "electric cars", "the water cycle", "black holes", "coffee", "bees", "the Roman Empire", "recursion",
    "tides",
)  # fmt: skip
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
JOB = """[run]
name = "smollm2"
folder = {folder}
num_steps = 1
ranks = 2

[model]
path = {model}
dtype = "float32"

[data]
source = {prompts}
max_prompt_tokens = 48

[rollout]
prompts_per_step = 16
group_size = 4
max_new_tokens = 128
max_live = 32

[warmup]
responses = 384
updates = 400
minutes = 8.0
batch_tokens = 512
learning_rate = 1e-3
validate_every = 100
validation_prompts = 16
"""


def prompts() -> list[str]:
    """Every task with every topic, in SmolLM2's chat form."""
    return [CHAT.format(task.format(topic)) for task in TASKS for topic in TOPICS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write job.toml and prompts.jsonl to")
    parser.add_argument("--model", type=Path, help="the model's folder (default: where `make smollm2` puts it)")
    arguments = parser.parse_args()
    fetch = runpy.run_path(str(Path(__file__).with_name("fetch_smollm2.py")))
    model = arguments.model or fetch["default_folder"]()
    if not (model / "config.json").is_file():
        parser.error(f"no model in {model}; run `make smollm2`, or name its folder with --model")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts()))
    places = {"folder": arguments.output, "model": model, "prompts": path}
    job = JOB.format(**{name: json.dumps(str(place)) for name, place in places.items()})
    (arguments.output / "job.toml").write_text(job)
    print(f"wrote {len(prompts())} prompts and {arguments.output / 'job.toml'}")


if __name__ == "__main__":
    sys.exit(ending("make_smollm2_job", main))
