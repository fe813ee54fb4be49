"""What a reader makes of a corrupted input: one clear line, or what was there before. Used by ``faults.py``."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 30.0
"""That a reader may take to answer."""
MEMORY_BYTES = 6 * 2**30
"""More address space than before that it may ask for."""

Corrupt = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Subject:
    """An input of the program, and the program's own way to read it."""

    name: str
    files: tuple[str, ...]
    """Below the folder of all inputs."""
    read: Callable[[Path], Any]
    """Reads what it needs below the folder, and gives what it read in a form that can be compared."""
    names: str = ""
    """A pattern of what a refusal may name instead of the file."""
    has_checksums: bool = False
    """Whatever is read without an error must be what was written."""


@dataclass(frozen=True)
class Outcome:
    """What came of one corruption."""

    subject: str
    file: str
    corruption: str
    seed: int
    verdict: str
    """refused, unharmed (the same was read), accepted (something else, of an input without checksums), or a fault."""
    said: str

    @property
    def is_fault(self) -> bool:
        return self.verdict not in ("refused", "unharmed", "accepted")


class Canary:
    """Unpickled, it leaves a file: nothing of ours may ever do so."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


# -- corruptions ----------------------------------------------------------------------------------------------------


def flip_bit(path: Path, source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    path.write_bytes(data)


def flip_early_bit(path: Path, source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[source.randrange(min(len(data), 512))] ^= 1 << source.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, source: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: source.randrange(len(data) or 1)])


def append_garbage(path: Path, source: random.Random) -> None:
    path.write_bytes(path.read_bytes() + source.randbytes(source.randint(1, 4096)))


def zero_block(path: Path, source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = source.randrange(len(data) or 1)
    length = min(source.randint(1, 4096), len(data) - start)
    data[start : start + length] = bytes(length)
    path.write_bytes(data)


def empty(path: Path, source: random.Random) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path, source: random.Random) -> None:
    path.write_bytes(source.randbytes(source.randint(1, 20_000)))


def folder_instead(path: Path, source: random.Random) -> None:
    path.unlink()
    path.mkdir()


def missing(path: Path, source: random.Random) -> None:
    path.unlink()


def pickle_instead(path: Path, source: random.Random) -> None:
    path.write_bytes(pickle.dumps({"policy": Canary(str(path.parent / "canary"))}, protocol=source.choice((0, 2, 5))))


def torch_zip_instead(path: Path, source: random.Random) -> None:
    import torch

    torch.save({"policy": Canary(str(path.parent / "canary"))}, path)


def deep_nesting(path: Path, source: random.Random) -> None:
    path.write_text(source.choice("[{").replace("{", '{"a":') * source.choice((1000, 100_000)))


def invalid_utf8(path: Path, source: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = source.randrange(len(data) or 1)
    data[place:place] = source.choice((b"\xff\xfe", b"\xc3", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf"))
    path.write_bytes(data)


def another_value(path: Path, source: random.Random) -> None:
    """Replace one value of JSON or TOML by one of another type, or far too large."""
    text = path.read_text(encoding="utf-8")
    spots = [i for i, c in enumerate(text) if c.isdigit() or c == '"']
    if spots:
        place = source.choice(spots)
        value = source.choice(("null", "[]", "{}", "-1", "1e999", "NaN", "9" * 400, '"x"', "true", "0.5", '"\\ud800"'))
        text = text[:place] + value + text[place + 1 :]
    path.write_text(text, encoding="utf-8")


def hostile_hdf5(path: Path, source: random.Random) -> None:
    """Replace one dataset or attribute by something that a careless reader follows, or drowns in."""
    import h5py
    import numpy as np

    with h5py.File(path, "r+") as file:
        found: list[str] = []
        file.visititems(lambda name, node: found.append(name) if isinstance(node, h5py.Dataset) else None)
        name = source.choice(sorted(found))
        kind = source.choice(("external", "soft", "loop", "raw", "huge", "virtual", "text", "objects", "attribute"))
        if kind == "attribute":
            file.attrs[source.choice(sorted(file.attrs))] = source.choice(
                (-1, 2**60, "text", [1, 2], np.float64("nan"))
            )
            return
        shape = file[name].shape
        del file[name]
        if kind == "external":
            file[name] = h5py.ExternalLink("/etc/passwd", "/a")
        elif kind == "soft":
            file[name] = h5py.SoftLink("/nowhere")
        elif kind == "loop":
            file[name] = h5py.SoftLink("/" + name)
        elif kind == "raw":
            length = max(1, shape[0] if shape else 1)
            secret = [("/etc/passwd", 0, length * 4)]
            file.create_dataset(name, (length,), "i4", external=secret)
        elif kind == "huge":
            file.create_dataset(name, (2**50,), "i8", chunks=(2**16,))
        elif kind == "virtual":
            layout = h5py.VirtualLayout((4,), "i4")
            layout[:] = h5py.VirtualSource("/etc/passwd", "a", (4,))
            file.create_virtual_dataset(name, layout)
        elif kind == "text":
            file.create_dataset(name, data=["x"] * 3, dtype=h5py.string_dtype())
        else:
            file.create_dataset(name, data=np.full(3, file.ref), dtype=h5py.ref_dtype)


BINARY: tuple[Corrupt, ...] = (
    flip_bit, flip_bit, flip_early_bit, truncate, truncate, append_garbage, zero_block, empty, random_bytes,
    folder_instead, missing, pickle_instead, torch_zip_instead,
)  # fmt: skip
TEXT: tuple[Corrupt, ...] = (*BINARY, another_value, another_value, another_value, deep_nesting, invalid_utf8)
HDF5: tuple[Corrupt, ...] = (*BINARY, hostile_hdf5, hostile_hdf5, hostile_hdf5, hostile_hdf5)


def corruptions_of(file: str) -> tuple[Corrupt, ...]:
    """What may happen to a file, by its kind."""
    if file.endswith(".h5"):
        return HDF5
    return TEXT if file.endswith((".json", ".jsonl", ".toml")) else BINARY


# -- one case -------------------------------------------------------------------------------------------------------


def try_one(subject: Subject, pristine: Path, wanted: Any, scratch: Path, seed: int) -> Outcome:
    """Corrupt one file of the subject in a copy, and read it in a process of its own."""
    source = random.Random(seed)
    file = source.choice(subject.files)
    corrupt = source.choice(corruptions_of(file))
    folder = scratch / "inputs"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    corrupt(folder / file, source)
    before = contents(folder)
    verdict, said = in_a_process(lambda: judge(subject, folder, file, wanted))
    if list(folder.rglob("canary")):
        verdict, said = "executed", "a pickle of the file was run"
    elif contents(folder) != before:
        verdict, said = "overwritten", "the reader changed a file"
    return Outcome(subject.name, file, corrupt.__name__, seed, verdict, said)


def judge(subject: Subject, folder: Path, file: str, wanted: Any) -> tuple[str, str]:
    """Read, and say what became of it."""
    try:
        found = subject.read(folder)
    except (ValueError, FileNotFoundError) as error:
        # what the command shows of an error of the user's: str, in one line; a library's own has none of ours
        said = str(error)
        own = type(error).__module__.startswith("tlt_hpc") or type(error) in (ValueError, FileNotFoundError)
        if not own:
            return "foreign error", f"{type(error).__module__}.{type(error).__name__}: {said[:300]}"
        if "\n" in said or len(said) > 2000:
            return "unclear", said[:300]
        names_key = subject.names and re.search(subject.names, said)
        if Path(file).name not in said and str(folder) not in said and not names_key:
            return "unnamed", said[:300]
        return "refused", said
    except Exception as error:  # noqa: BLE001 (that anything else comes out is what is looked for)
        return "traceback", f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
    if found == wanted:
        return "unharmed", ""
    return ("believed" if subject.has_checksums else "accepted"), ""


def in_a_process(task: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Its answer, or how the process ended that was to find it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os.write(writer, json.dumps(task()).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    status, end = wait_for(child, time.monotonic() + SECONDS)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    if end:
        return "hang", f"no answer after {SECONDS:.0f} s"
    if status or not answer:
        return "crash", f"the reader ended with status {status}"
    verdict, said = json.loads(answer)
    return str(verdict), str(said)


def wait_for(child: int, end: float) -> tuple[int, bool]:
    """A process's status, and whether it had to be killed at ``end``."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status, False
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0, True
        time.sleep(0.002)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


# -- the inputs -----------------------------------------------------------------------------------------------------


def make_inputs(folder: Path, run: Path) -> list[Subject]:
    """Copy what a finished run of the embedded model has, with a model and data beside it, and say how each is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tlt_hpc.models.folder import embedded
    from tlt_hpc.storage.folder import RunFolder

    shutil.copytree(run, folder / "run")
    shutil.copytree(embedded("tiny"), folder / "model")
    rows = [
        {"prompt": f"gcd({6 * n},{4 * n})=", "answer": str(2 * n), "data_source": "gcd", "solution": "x" * n}
        for n in range(1, 25)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    at = RunFolder(folder / "run")

    def below(*paths: Path) -> tuple[str, ...]:
        return tuple(str(path.relative_to(folder)) for path in paths)

    checkpoint = sorted(at.checkpoints.glob("step-*"))[-1]
    step = at.rollout_steps()[-1]
    model = [folder / "model" / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    return [
        Subject("configuration", below(at.config), read_config, names=r"key '\w+(\.\w+)*'|^\w+(\.\w+)* = "),
        Subject("rows of .jsonl", ("data.jsonl",), lambda place: read_data(place, "data.jsonl")),
        Subject("rows of .parquet", ("data.parquet",), lambda place: read_data(place, "data.parquet")),
        Subject("model", below(*model), read_model),
        Subject("checkpoint", below(*checkpoint.iterdir()), read_checkpoint, has_checksums=True),
        Subject("rollout log", below(*at.rollout_logs(step)), read_log, has_checksums=True),
        Subject("feature cache", below(*at.feature_caches(at.cache_steps()[-1])), read_cache, has_checksums=True),
        Subject("drafter", ("run/drafter/drafter.safetensors",), read_drafter),
        Subject("lines of metrics", below(at.metrics), read_metrics),
        Subject("word of the end", below(at.finished), read_finished),
    ]


def digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def read_config(folder: Path) -> str:
    from tlt_hpc.config import load_config

    return repr(load_config(folder / "run" / "config.toml"))


def read_data(folder: Path, name: str) -> str:
    from tlt_hpc.config import load_config
    from tlt_hpc.plan.inputs import read_assets

    changes = [f"data.source={folder / name}", "reward.default=numeric"]
    prompts = read_assets(load_config(Path("jobs/tiny.toml"), changes), 2).prompts
    read = [prompt for step in range(12) for prompt in prompts.batch(step)]
    return digest([(prompt.tokens.tolist(), prompt.answer) for prompt in read])


def read_model(folder: Path) -> str:
    from tlt_hpc.models.folder import check_weights, end_token_ids, folder_weights, load_tokenizer
    from tlt_hpc.models.shape import read_shape

    place = folder / "model"
    shape = read_shape(place)
    tokenizer = load_tokenizer(place)
    check_weights(place, shape)
    weights = [(name, tensor.shape, tensor.double().sum().item()) for name, tensor in folder_weights(place)]
    return digest(shape, tokenizer.encode("gcd(4,6)=").ids, end_token_ids(place, shape), weights)


def read_checkpoint(folder: Path) -> str:
    from tlt_hpc.checkpoint.store import CheckpointStore

    found = CheckpointStore(folder / "run" / "checkpoints", keep=1).newest()
    if found is None:
        return "none"
    parts = [(part, name, found.read(part, name)) for part in sorted(found.tensors) for name in found.names(part)]
    return digest(found.step, found.state, [(part, name, t.shape, t.double().sum().item()) for part, name, t in parts])


def read_log(folder: Path) -> str:
    from tlt_hpc.storage.folder import RunFolder
    from tlt_hpc.storage.rollout_log import read_step

    at = RunFolder(folder / "run")
    with naming_absent(folder):
        record = read_step(at.rollout_log(at.rollout_steps()[-1], 0))
    texts = [
        (r.key, r.prompt_tokens.tolist(), r.response_tokens.tolist(), r.log_probs.tolist()) for r in record.rollouts
    ]
    return digest(texts, record.rewards.tolist(), record.advantages.tolist(), record.decisions.tolist(), record.metrics)


def read_cache(folder: Path) -> str:
    from tlt_hpc.storage.feature_file import FeatureCacheReader
    from tlt_hpc.storage.folder import RunFolder

    at = RunFolder(folder / "run")
    with naming_absent(folder), FeatureCacheReader(at.feature_cache(at.cache_steps()[-1], 0)) as reader:
        documents = [reader.read(index) for index in range(len(reader))]
    return digest([(d.tokens.tolist(), d.prompt_length, d.features.tolist()) for d in documents])


def read_drafter(folder: Path) -> str:
    from tlt_hpc.models.drafter_file import initial_drafter
    from tlt_hpc.models.folder import embedded
    from tlt_hpc.models.shape import read_shape

    tensors = initial_drafter(str(folder / "run" / "drafter"), "eagle", read_shape(embedded("tiny"))) or {}
    return digest([(name, tensor.shape, tensor.double().sum().item()) for name, tensor in sorted(tensors.items())])


def read_metrics(folder: Path) -> str:
    from tlt_hpc.storage.step_lines import read_lines

    return repr(read_lines(folder / "run" / "metrics.jsonl"))


def read_finished(folder: Path) -> str:
    from tlt_hpc.config import load_saved_config
    from tlt_hpc.resume.finished import finished_message

    config = load_saved_config(folder / "run" / "config.toml")
    run = config.run.model_copy(update={"folder": str(folder), "name": "run"})
    return finished_message(config.model_copy(update={"run": run}))


@contextmanager
def naming_absent(folder: Path) -> Iterator[None]:
    """The callers of these readers take a file that is a folder, or not there, for one that cannot be read now."""
    try:
        yield
    except (IsADirectoryError, FileNotFoundError) as error:
        raise FileNotFoundError(f"{folder}: {error}") from None
