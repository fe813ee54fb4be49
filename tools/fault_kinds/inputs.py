"""The program's own readers on inputs with one file damaged, chosen by a seed.

What was written is read, or refused in one line that names the file.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fault_kinds.commands import Case
from fault_kinds.damage import damages_of
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.plans import finished_message
from tlt_hpc.config import load_config, load_saved_config
from tlt_hpc.models.drafter_file import read_drafter_of_init
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import load_tokenizer, package_asset_folder
from tlt_hpc.models.weight_check import check_weights
from tlt_hpc.models.weight_files import end_token_ids
from tlt_hpc.plan.inputs import read_assets
from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import read_lines

Reader = Callable[[Path], object]
"""Reads a file below the folder of all inputs; returns what was read if it has checksums."""


def make(number: int, folder: Path, base_run: Path, source: random.Random) -> Case:
    """Damage one file of input ``number``; ``base_run`` is a finished run of the embedded model."""
    pattern, reader = list(INPUTS.items())[number % len(INPUTS)]
    place = folder / "inputs"
    make_inputs(place, base_run)
    path = source.choice(sorted(place.glob(pattern)))
    kind, damage = source.choice(list(damages_of(path).items()))
    damage(path, source)
    wanted = undamaged(folder.parent, base_run, pattern)
    names = _KEYS if path.name == "config.toml" else "$^"
    return Case(
        kind=f"{path.relative_to(place)}: {kind}",
        commands={"read": lambda out: read(reader, place, wanted)},
        names=f"{re.escape(path.name)}|{re.escape(str(place))}|{names}",
        constant=place,
    )


def read(reader: Reader, folder: Path, wanted: object) -> int:
    """Read an input as a command would; an error that is not the user's, or no clear line, is raised."""
    try:
        found = reader(folder)
    except (ValueError, FileNotFoundError, IsADirectoryError) as error:
        is_of_a_library = type(error).__module__ != "builtins" and not type(error).__module__.startswith("tlt_hpc")
        if is_of_a_library or isinstance(error, UnicodeError) or "\n" in str(error):
            raise
        print(error, file=sys.stderr)
        return 2
    if found != wanted:
        raise AssertionError("damaged content was read without an error")
    return 0


@cache
def undamaged(scratch: Path, base_run: Path, pattern: str) -> object:
    """What the reader of an input finds when nothing is damaged."""
    place = scratch / "undamaged"
    if not place.exists():
        make_inputs(place, base_run)
    return INPUTS[pattern](place)


def make_inputs(folder: Path, run: Path) -> None:
    """Copy a run, a model and data into a folder."""
    shutil.copytree(run, folder / "run")
    shutil.copytree(package_asset_folder("tiny"), folder / "model")
    rows = [
        {"prompt": f"gcd({6 * n},{4 * n})=", "answer": str(2 * n), "data_source": "gcd", "solution": "x" * n}
        for n in range(1, 25)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")


# -- readers --------------------------------------------------------------------------------------------------------


def sums(named: Any) -> list[tuple[Any, ...]]:
    """Names, shapes and sums of tensors."""
    return [(name, tensor.shape, tensor.double().sum().item()) for name, tensor in named]


def read_config(folder: Path) -> None:
    load_config(folder / "run" / "config.toml")


def read_data(path: Path) -> None:
    prompts = read_assets(load_config(Path("jobs/tiny.toml"), [f"data.source={path}", "reward.default=numeric"]), 2)
    for step in range(12):
        prompts.prompts.draw_step_prompts(step)


def read_model(folder: Path) -> None:
    place = folder / "model"
    shape = read_shape(place)
    load_tokenizer(place).encode("gcd(4,6)=")
    check_weights(place, shape)
    end_token_ids(place, shape)
    sums(read_folder_weights(place))


def read_checkpoint(folder: Path) -> object:
    found = CheckpointStore(folder / "run" / "checkpoints", keep=1).open_newest()
    assert found is not None
    parts = [
        (name, found.read_tensor(part, name)) for part in sorted(found.tensors) for name in found.tensor_names(part)
    ]
    return found.step, repr(found.state), sums(parts)


def read_log(folder: Path) -> object:
    record = read_step(RunFolder(folder / "run").rollout_log(1, 0))
    texts = [
        (r.key, r.prompt_tokens.tolist(), r.response_tokens.tolist(), r.log_probs.tolist()) for r in record.rollouts
    ]
    rest = record.rewards, record.advantages, record.decisions
    return texts, [each.tolist() for each in rest], repr(record.metrics)


def read_cache(folder: Path) -> object:
    with closing(FeatureCacheReader(RunFolder(folder / "run").feature_cache(1, 0))) as reader:
        documents = [reader.read(index) for index in range(len(reader))]
    return [(d.tokens.tolist(), d.prompt_length, d.features.tolist()) for d in documents]


def read_drafter(folder: Path) -> None:
    model, place = package_asset_folder("tiny"), str(folder / "run" / "drafter")
    read_drafter_of_init(place, "eagle", read_shape(model), model)


def read_metrics(folder: Path) -> None:
    read_lines(folder / "run" / "metrics.jsonl")


def read_finished(folder: Path) -> None:
    config = load_saved_config(folder / "run" / "config.toml")
    run = config.run.model_copy(update={"folder": str(folder), "name": "run"})
    finished_message(config.model_copy(update={"run": run}))


INPUTS: dict[str, Reader] = {
    "run/config.toml": read_config,
    "data.jsonl": lambda folder: read_data(folder / "data.jsonl"),
    "data.parquet": lambda folder: read_data(folder / "data.parquet"),
    "model/[cmt]*.*": read_model,
    "run/checkpoints/step-000002/*": read_checkpoint,
    "run/rollouts/step-000002/*": read_log,
    "run/cache/step-000002/*": read_cache,
    "run/drafter/drafter.safetensors": read_drafter,
    "run/metrics.jsonl": read_metrics,
    "run/finished.json": read_finished,
}
"""Pattern of files -> how the program reads them."""
_KEYS = r"key '\w+(\.\w+)*'|^\w+(\.\w+)* = |missing section"
"""A refusal of a job may name a key or a section instead of the file."""
