"""Inputs of the program with one file damaged, for ``hostile.py``: the program's own reader reads what was written, or
refuses it in one line that names the file."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from damage import Case, damages_of

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import load_config, load_saved_config
from tlt_hpc.models.drafter_file import initial_drafter
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import embedded, load_tokenizer
from tlt_hpc.models.weight_check import check_weights
from tlt_hpc.models.weight_files import end_token_ids
from tlt_hpc.plan.inputs import read_assets
from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import finished_message
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import read_lines


@dataclass(frozen=True)
class Input:
    """An input of the program, and the program's own way to read it."""

    files: str
    """A pattern, below the folder of all inputs."""
    read: Callable[[Path], object]
    """Reads it below that folder; returns what it read in a form that can be compared."""
    names: str = r"$^"
    """A pattern of what a refusal may name instead of the file."""
    has_checksums: bool = False
    """Whatever is read without an error must be what was written."""


def make(number: int, folder: Path, base_run: Path, source: random.Random) -> Case:
    """Damage one file of input ``number``; ``base_run`` is a finished run of the embedded model."""
    subject = INPUTS[number % len(INPUTS)]
    place = folder / "inputs"
    make_inputs(place, base_run)
    path = source.choice(sorted(place.glob(subject.files)))
    kind, damage = source.choice(list(damages_of(path.name).items()))
    damage(path, source)
    wanted = undamaged(folder.parent, base_run, number % len(INPUTS))
    return Case(
        kind=f"{path.relative_to(place)}: {kind}",
        commands={"read": lambda out: read(subject, place, wanted)},
        names=f"{re.escape(path.name)}|{re.escape(str(place))}|{subject.names}",
        constant=place,
    )


def read(subject: Input, folder: Path, wanted: object) -> int:
    """Read an input as a command would; an error that is not the user's, or no clear line, is raised."""
    try:
        found = subject.read(folder)
    except (ValueError, FileNotFoundError, IsADirectoryError) as error:
        is_of_a_library = type(error).__module__ != "builtins" and not type(error).__module__.startswith("tlt_hpc")
        if is_of_a_library or isinstance(error, UnicodeError) or "\n" in str(error):
            raise
        print(error, file=sys.stderr)
        return 2
    if subject.has_checksums and found != wanted:
        raise AssertionError("damaged content was read without an error")
    return 0


@cache
def undamaged(scratch: Path, base_run: Path, number: int) -> object:
    """What the reader of an input finds when nothing is damaged."""
    place = scratch / "undamaged"
    if not place.exists():
        make_inputs(place, base_run)
    return INPUTS[number].read(place)


def make_inputs(folder: Path, run: Path) -> None:
    """Copy a run, a model and data into a folder."""
    shutil.copytree(run, folder / "run")
    shutil.copytree(embedded("tiny"), folder / "model")
    rows = [
        {"prompt": f"gcd({6 * n},{4 * n})=", "answer": str(2 * n), "data_source": "gcd", "solution": "x" * n}
        for n in range(1, 25)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")


# -- readers --------------------------------------------------------------------------------------------------------


def digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def sums(named: Any) -> list[tuple[Any, ...]]:
    """Names, shapes and sums of tensors."""
    return [(name, tensor.shape, tensor.double().sum().item()) for name, tensor in named]


def read_data(name: str, folder: Path) -> str:
    changes = [f"data.source={folder / name}", "reward.default=numeric"]
    prompts = read_assets(load_config(Path("jobs/tiny.toml"), changes), 2).prompts
    drawn = [prompt for step in range(12) for prompt in prompts.batch(step)]
    return digest([(prompt.tokens.tolist(), prompt.answer) for prompt in drawn])


def read_model(folder: Path) -> str:
    place = folder / "model"
    shape, tokenizer = read_shape(place), load_tokenizer(place)
    check_weights(place, shape)
    return digest(shape, tokenizer.encode("gcd(4,6)=").ids, end_token_ids(place, shape), sums(folder_weights(place)))


def read_checkpoint(folder: Path) -> str:
    found = CheckpointStore(folder / "run" / "checkpoints", keep=1).newest()
    assert found is not None
    parts = [(name, found.read(part, name)) for part in sorted(found.tensors) for name in found.names(part)]
    return digest(found.step, found.state, sums(parts))


def read_log(folder: Path) -> str:
    at = RunFolder(folder / "run")
    record = read_step(at.rollout_log(1, 0))
    texts = [
        (r.key, r.prompt_tokens.tolist(), r.response_tokens.tolist(), r.log_probs.tolist()) for r in record.rollouts
    ]
    return digest(texts, record.rewards.tolist(), record.advantages.tolist(), record.decisions.tolist(), record.metrics)


def read_cache(folder: Path) -> str:
    with closing(FeatureCacheReader(RunFolder(folder / "run").feature_cache(1, 0))) as reader:
        documents = [reader.read(index) for index in range(len(reader))]
    return digest([(d.tokens.tolist(), d.prompt_length, d.features.tolist()) for d in documents])


def read_drafter(folder: Path) -> str:
    model, place = embedded("tiny"), str(folder / "run" / "drafter")
    tensors = initial_drafter(place, "eagle", read_shape(model), model) or {}
    return digest(sums(sorted(tensors.items())))


def read_finished(folder: Path) -> str:
    config = load_saved_config(folder / "run" / "config.toml")
    run = config.run.model_copy(update={"folder": str(folder), "name": "run"})
    return finished_message(config.model_copy(update={"run": run}))


INPUTS = (
    Input("run/config.toml", lambda folder: repr(load_config(folder / "run" / "config.toml")),
          names=r"key '\w+(\.\w+)*'|^\w+(\.\w+)* = "),
    Input("data.jsonl", partial(read_data, "data.jsonl")),
    Input("data.parquet", partial(read_data, "data.parquet")),
    Input("model/[cmt]*.*", read_model),
    Input("run/checkpoints/step-000002/*", read_checkpoint, has_checksums=True),
    Input("run/rollouts/step-000002/*", read_log, has_checksums=True),
    Input("run/cache/step-000002/*", read_cache, has_checksums=True),
    Input("run/drafter/drafter.safetensors", read_drafter),
    Input("run/metrics.jsonl", lambda folder: repr(read_lines(folder / "run" / "metrics.jsonl"))),
    Input("run/finished.json", read_finished),
)  # fmt: skip
