"""Hostile run folders for ``hostile.py``: a real run's, with one thing wrong in it."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_inputs import corruptions_of
from hostile_case import Case

Apply = Callable[[Path, random.Random], Any]

ROOT = Path(__file__).resolve().parent.parent
ALL = frozenset({"train", "watch", "report", "evaluate", "inspect", "check"})
READERS = ALL - {"train"}
FILES: dict[str, frozenset[str]] = {
    "config.toml": frozenset({"train", "watch", "evaluate"}),
    "metrics.jsonl": frozenset({"train", "check"}),
    "rollouts/step-000001/rank-0000.h5": frozenset({"check"}),
    "rollouts/step-000000": frozenset({"check"}),
    "finished.json": frozenset({"train", "check"}),
    "environment.jsonl": frozenset({"check"}),
    "cost_profile.json": frozenset({"check"}),
    "data.json": frozenset({"check"}),
    "status/owner": frozenset(),
    "status/rank-0000": frozenset(),
    "status/verdict.txt": frozenset(),
    "status": frozenset(),
    "rollouts": frozenset({"check"}),
    "checkpoints": frozenset(),
    "checkpoints/step-000002/state.json": frozenset(),
    "checkpoints/step-000002/policy-00000-of-00001.safetensors": frozenset(),
    "drafter-checkpoints/step-000002/state.json": frozenset(),
    "cache": frozenset(),
    "cache/step-000001/rank-0000.h5": frozenset(),
    "report.html": frozenset(),
}
"""What is damaged -> the commands that cannot do without it, or say that it is sound."""
HOSTILE_VALUES = (
    "1e300", "-1e300", "1e999", "NaN", "-Infinity", "-1", "9" * 400, "9" * 6000, str(2**63), "true", "null", "0.5",
    '"text"', '"\\ud800"', '"[bold red]x[/nope]"', '"\\u001b[31m"', "[]", "{}", "[" * 100_000, '{"a":' * 2000, "",
)  # fmt: skip
"""In place of a value of JSON."""


@dataclass(frozen=True)
class Damage:
    """A kind of damage to a whole run folder; ``must_fail`` as in ``Case``."""

    name: str
    apply: Apply
    must_fail: frozenset[str] = frozenset()


# -- in place of a file or folder -----------------------------------------------------------------------------------


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fifo(path: Path, source: random.Random) -> None:
    clear(path)
    os.mkfifo(path)


def endless(path: Path, source: random.Random) -> None:
    clear(path)
    path.symlink_to("/dev/zero")


def loop(path: Path, source: random.Random) -> None:
    clear(path)
    path.symlink_to(path.name)


def far_loop(path: Path, source: random.Random) -> None:
    clear(path)
    path.symlink_to(f"{path.name}.a")
    path.with_name(f"{path.name}.a").symlink_to(path.name)


def dangling(path: Path, source: random.Random) -> None:
    clear(path)
    path.symlink_to("/nowhere/at/all")


def folder(path: Path, source: random.Random) -> None:
    clear(path)
    (path / "inside").mkdir(parents=True)


def file(path: Path, source: random.Random) -> None:
    clear(path)
    path.write_bytes(b"no folder")


def forbidden(path: Path, source: random.Random) -> None:
    path.chmod(0)


def sparse(path: Path, source: random.Random) -> None:
    clear(path)
    with path.open("wb") as output:
        output.truncate(2**41)


def listener(path: Path, source: random.Random) -> None:
    clear(path)
    with socket.socket(socket.AF_UNIX) as server:  # a path may have 108 letters
        server.bind(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}")


ANYWHERE: tuple[Apply, ...] = (fifo, endless, loop, far_loop, dangling, forbidden, listener)
FOR_A_FILE: tuple[Apply, ...] = (*ANYWHERE, folder, sparse)
FOR_A_FOLDER: tuple[Apply, ...] = (*ANYWHERE, file)


# -- within a file --------------------------------------------------------------------------------------------------


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_lines(run: Path, lines: list[Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def twice(run: Path, source: random.Random) -> None:
    write_lines(run, [line for line in lines_of(run) for _ in range(2)])


def reversed_order(run: Path, source: random.Random) -> None:
    write_lines(run, lines_of(run)[::-1])


def key_missing(run: Path, source: random.Random) -> str:
    lines = lines_of(run)
    key = source.choice(
        ("timing_s/step", "critic/score/mean", "response_length/mean", "rollout/seconds", "training/global_step")
    )
    del source.choice(lines)[key]
    write_lines(run, lines)
    return key


def metric_hostile(run: Path, source: random.Random) -> str:
    """Text, a list or nothing in place of a figure of one step."""
    lines = lines_of(run)
    key = source.choice(sorted(set(lines[0]) - {"drafter/why"}))
    value: Any = source.choice(["high", [1.0], {}, None, True, "[bold red]x[/nope]"])
    source.choice(lines)[key] = value
    write_lines(run, lines)
    return f"{key} = {value!r}"


def step_hostile(run: Path, source: random.Random) -> str:
    value = source.choice(("1e300", "NaN", "-1", "0.5", "9" * 400, "9" * 6000, '"1"', "true", "[0]", str(2**63)))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[-1] = lines[-1].replace('"training/global_step": 1.0', f'"training/global_step": {value}')
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return value[:20]


def figures_extreme(run: Path, source: random.Random) -> str:
    """Numbers as far as they go, of the right type."""
    value = source.choice((1e300, 1e308, -1e308, float("nan"), float("inf"), -1.0, 0.0, 10**300))
    write_lines(run, [{key: line[key] if key in ("training/global_step", "drafter/why") else value for key in line}
                      for line in lines_of(run)])  # fmt: skip
    return str(value)[:20]


def a_value_hostile(name: str) -> Apply:
    """One value of a JSON document replaced; of a status record with the checksum that belongs to it."""

    def apply(run: Path, source: random.Random) -> str:
        path = run / name
        make_sure_of(path)
        text = path.read_text()
        text = text[9:].rstrip() if name.startswith("status/rank") else text.rstrip()
        tree = json.loads(text)
        key, value = source.choice(sorted(tree)), source.choice(HOSTILE_VALUES)
        text = json.dumps({**tree, key: "HERE"}).replace('"HERE"', value)
        write_document(path, text)
        return f"{key} = {value[:20]}"

    return apply


def a_key_gone(name: str) -> Apply:
    def apply(run: Path, source: random.Random) -> str:
        make_sure_of(run / name)
        text = (run / name).read_text()
        tree = json.loads(text[9:] if name.startswith("status/rank") else text)
        key: str = source.choice(sorted(tree))
        del tree[key]
        write_document(run / name, json.dumps(tree))
        return key

    return apply


def another_document(name: str) -> Apply:
    def apply(run: Path, source: random.Random) -> str:
        text = source.choice(('{"hello": "world"}', "[]", "3", '"text"', "null", "{}", "[[[]]]", "{}\n{}", "\ufeff{}"))
        make_sure_of(run / name)
        write_document(run / name, text)
        return text

    return apply


def write_document(path: Path, text: str) -> None:
    if path.name.startswith("rank-"):
        data = text.encode()
        path.write_bytes((f"{zlib.crc32(data):08x} ".encode() + data).ljust(2047)[:2047] + b"\n")
    else:
        path.write_text(text + "\n")


def a_setting_hostile(run: Path, source: random.Random) -> str:
    path = run / "config.toml"
    lines = path.read_text().splitlines()
    spots = [number for number, line in enumerate(lines) if " = " in line]
    spot = source.choice(spots)
    value = source.choice(("-1", "1e300", "nan", "'text'", "[]", "{}", "true", "[" * 5000, "9" * 6000, "1979-05-27"))
    lines[spot] = f"{lines[spot].partition(' = ')[0]} = {value}"
    path.write_text("\n".join(lines) + "\n")
    return lines[spot][:50]


def newer_config(run: Path, source: random.Random) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text() + "[teleport]\nspeed = 9\n")


def newer_log(run: Path, source: random.Random) -> None:
    import h5py

    for path in run.glob("rollouts/*/*.h5"):
        with h5py.File(path, "r+") as log:
            log.attrs["schema"] = 99


def log_attribute(run: Path, source: random.Random) -> str:
    """A scalar of a log, of the right type and no sense."""
    import h5py
    import numpy as np

    name = source.choice(("step", "rank", "num_ranks", "harvested_seconds", "guarded_near_ties", "committed"))
    value = source.choice((-1, 2**62, float("nan"), 1e300, float("inf")))
    with h5py.File(run / "rollouts/step-000001/rank-0000.h5", "r+") as log:
        del log.attrs[name]
        log.attrs[name] = np.float64(value) if isinstance(value, float) else np.int64(value)
    return f"{name} = {value}"


def log_times(run: Path, source: random.Random) -> str:
    """A clock that was set, or that shows nothing."""
    import h5py

    value = source.choice((-1e300, 1e300, float("nan"), 0.0, -1.0))
    with h5py.File(run / "rollouts/step-000001/rank-0000.h5", "r+") as log:
        for name in ("start_seconds", "last_token_seconds", "release_seconds"):
            log["timing"].attrs[name] = value
    return str(value)


def strange_entries(run: Path, source: random.Random) -> None:
    for name in ("step-x", "step-" + "9" * 200, "step-٣٣٣٣٣٣", "step-000007", "step--00001", "lost+found"):
        (run / "rollouts" / name).mkdir()
        (run / "cache" / name).mkdir()
        (run / "checkpoints" / name).mkdir()
    for name in ("rank-x.h5", "rank-.h5", "rank-" + "9" * 200 + ".h5", "rank-0001.h5.bak", "rank-٣٣٣٣.h5"):
        (run / "rollouts/step-000001" / name).write_bytes(b"")
        (run / "cache/step-000001" / name).write_bytes(b"")
        (run / "status" / name.removesuffix(".h5")).write_bytes(b"")


# -- of the whole folder --------------------------------------------------------------------------------------------


def emptied(run: Path, source: random.Random) -> None:
    shutil.rmtree(run)
    run.mkdir()


def folder_of_runs(run: Path, source: random.Random) -> None:
    run.rename(run.with_name("inner"))
    run.mkdir()
    run.with_name("inner").rename(run / "inner")


def foreign_program(run: Path, source: random.Random) -> None:
    """Named alike by another program."""
    shutil.rmtree(run)
    (run / "rollouts").mkdir(parents=True)
    (run / "checkpoints" / "step-000100").mkdir(parents=True)
    (run / "config.toml").write_text('[train]\nlr = 0.1\n[model]\nname = "resnet"\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
    (run / "finished.json").write_text('{"ok": true}\n')
    (run / "checkpoints/step-000100/state.json").write_text("{}")


def model_folder(run: Path, source: random.Random) -> None:
    shutil.rmtree(run)
    shutil.copytree(ROOT / "tlt_hpc" / "models" / "assets" / "tiny", run)


def parent_forbidden(run: Path, source: random.Random) -> None:
    run.parent.chmod(0)


WITHIN = (
    Damage("metrics.jsonl: each step twice", twice, frozenset({"check"})),
    Damage("metrics.jsonl: reversed order", reversed_order, frozenset({"check"})),
    Damage("metrics.jsonl: without a key", key_missing, frozenset({"check"})),
    Damage("metrics.jsonl: a value of another type", metric_hostile, frozenset({"check", "train"})),
    Damage("metrics.jsonl: a step that is none", step_hostile, frozenset({"check", "train"})),
    Damage("metrics.jsonl: extreme figures", figures_extreme),
    Damage("config.toml: a hostile value", a_setting_hostile),
    Damage("config.toml: of a newer version", newer_config, frozenset({"train", "evaluate"})),
    Damage("rollouts: of a newer version", newer_log, frozenset({"check"})),
    Damage("rollouts: a scalar without sense", log_attribute),
    Damage("rollouts: times without sense", log_times),
    Damage("entries that are no run's", strange_entries),
    *(
        Damage(f"{name}: {words}", make(name), fails)
        for name, fails in (
            ("status/rank-0000", frozenset[str]()), ("status/owner", frozenset[str]()),
            ("finished.json", frozenset[str]()), ("cost_profile.json", frozenset[str]()),
            ("data.json", frozenset[str]()), ("checkpoints/step-000002/state.json", frozenset[str]()),
        )
        for words, make in (
            ("a hostile value", a_value_hostile), ("without a key", a_key_gone), ("another document", another_document),
        )
    ),
)  # fmt: skip
WHOLE = (
    Damage("a run folder that is empty", emptied, READERS),
    Damage("a folder of runs", folder_of_runs, READERS),
    Damage("a folder of another program", foreign_program, ALL - {"inspect"}),
    Damage("a model's folder", model_folder, READERS - {"evaluate"}),
    Damage("below a forbidden folder", parent_forbidden, ALL),
    *(Damage(f"a run folder: {each.__name__}", each, READERS if each is dangling else ALL) for each in FOR_A_FOLDER),
)  # fmt: skip


def make(number: int, place: Path, base_run: Path, source: random.Random) -> Case:
    """A copy of ``base_run`` in ``place``, with the damage that ``number`` and ``source`` name."""
    parent = place / "runs"
    run = parent / base_run.name
    shutil.copytree(base_run, run, symlinks=True)
    kind, must_fail = damage(number, run, source)
    overrides = (f"run.folder={parent}", f"run.name={run.name}")
    return Case(kind, base_config(place, base_run), overrides, run, must_fail)


def base_config(place: Path, base_run: Path) -> Path:
    """The job of the run that was copied."""
    path = place / "job.toml"
    shutil.copyfile(base_run / "config.toml", path)
    return path


def damage(number: int, run: Path, source: random.Random) -> tuple[str, frozenset[str]]:
    """Do one thing to a run; returns what in words, and who may not take it for sound."""
    turn, rest = divmod(number, 4)
    if rest == 0:
        chosen = (*WHOLE, *WITHIN)[turn % len((*WHOLE, *WITHIN))]
        told = chosen.apply(run, source)
        return chosen.name + (f" ({told})" if told else ""), chosen.must_fail
    name = tuple(FILES)[(turn * 3 + rest) % len(FILES)]
    path = run / name
    make_sure_of(path)
    apply = source.choice(FOR_A_FOLDER if path.is_dir() else (*FOR_A_FILE, *corruptions_of(path.name)))
    is_gone = apply is dangling or apply.__name__ == "missing"
    apply(path, source)
    certain = apply in (*FOR_A_FILE, *FOR_A_FOLDER) and not is_gone
    return f"{name}: {apply.__name__}", FILES[name] if certain else frozenset()


def make_sure_of(path: Path) -> None:
    """What a run has only sometimes."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"schema": 1}')
