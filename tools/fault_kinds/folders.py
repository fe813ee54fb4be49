"""Six commands on run folders with one thing wrong, chosen by a seed: they may answer in a line or refuse in one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import inspect_run

from fault_kinds.commands import Case, Command
from fault_kinds.damage import FOR_A_FILE, FOR_A_FOLDER, VALUES, Damage, damages_of
from fault_kinds.runs import ROOT
from tlt_hpc.cli.main import main

READERS = frozenset({"watch", "report", "evaluate", "inspect", "check"})
ALL, CHECK, NOBODY = READERS | {"train"}, frozenset({"check"}), frozenset[str]()
FILES: dict[str, frozenset[str]] = {
    "config.toml": frozenset({"train", "evaluate"}),
    **dict.fromkeys(("metrics.jsonl", "finished.json"), CHECK | {"train"}),
    **dict.fromkeys(("rollouts", "rollouts/step-000001", "rollouts/step-000002/rank-0000.h5"), CHECK),
    **dict.fromkeys(("environment.jsonl", "data.json"), CHECK),
    **dict.fromkeys(("status", "status/owner", "status/rank-0000", "status/verdict.txt"), NOBODY),
    **dict.fromkeys(("checkpoints", "checkpoints/step-000002/state.json"), NOBODY),
    **dict.fromkeys(("checkpoints/step-000002/policy-00000-of-00001.safetensors", "report.html"), NOBODY),
    **dict.fromkeys(("drafter-checkpoints/step-000002/state.json", "cache", "cache/step-000002/rank-0000.h5"), NOBODY),
}
"""What is damaged -> the commands that cannot do without it, or that report whether it is sound."""


def make(number: int, folder: Path, base_run: Path, source: random.Random) -> Case:
    """A copy of ``base_run`` with damage that ``number`` and ``source`` choose."""
    run, job = folder / "runs" / base_run.name, folder / "job.toml"
    shutil.copytree(base_run, run, symlinks=True)
    shutil.copyfile(base_run / "config.toml", job)
    kind, must_fail = damage_run(number, run, source)
    return Case(kind, commands_on(job, (f"run.folder={run.parent}", f"run.name={run.name}"), run), must_fail)


def damage_run(number: int, run: Path, source: random.Random) -> tuple[str, frozenset[str]]:
    """Damage one thing of a run; returns what, and the commands that may not take it for sound."""
    turn, rest = divmod(number, 3)
    if rest == 0:
        name, damage, must_fail = RUNS[turn % len(RUNS)]
        detail = damage(run, source)
        return f"{name} ({detail})" if isinstance(detail, str) else name, must_fail
    name = tuple(FILES)[(turn * 2 + rest) % len(FILES)]
    path = run / name
    add_missing(path)
    special = FOR_A_FOLDER if path.is_dir() else FOR_A_FILE
    kinds = special if path.is_dir() else damages_of(path) | special
    kind = source.choice(sorted(kinds))
    kinds[kind](path, source)
    return f"{name}: {kind}", FILES[name] if kind in special and kind != "a dangling link" else NOBODY


def add_missing(path: Path) -> None:
    """Make a file that not every run has."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"schema": 1}')


def commands_on(job: Path, overrides: tuple[str, ...], folder: Path) -> dict[str, Command]:
    """The commands that read a job file and the folder of a run."""

    def tlt(*words: str | Path) -> Command:
        return lambda out: main([*map(str, words)])

    return {
        "train": tlt("train", job, *overrides, "--dry-run"),
        "watch": tlt("watch", folder, "--once"),
        "report": lambda out: main(["report", str(folder), "--output", str(out / "report.html")]),
        "evaluate": tlt("evaluate", folder, job, *overrides, "--dry-run"),
        "inspect": lambda out: inspect_run.main([str(folder)]),
        "check": lambda out: inspect_run.main([str(folder), "--check"]),
    }


# -- metrics.jsonl --------------------------------------------------------------------------------------------------


def of_lines(change: Callable[[list[Any], random.Random], list[Any]]) -> Damage:
    """Damage to the lines of metrics, as JSON."""

    def apply(run: Path, source: random.Random) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        changed = change(lines, source)
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))

    return apply


def _without_a_key(lines: list[Any], source: random.Random) -> list[Any]:
    names = ("timing_s/step", "critic/score/mean", "response_length/mean", "rollout/seconds", "training/global_step")
    del source.choice(lines)[source.choice(names)]
    return lines


def _other_type(lines: list[Any], source: random.Random) -> list[Any]:
    key = source.choice(sorted(set(lines[0]) - {"drafter/why"}))
    source.choice(lines)[key] = source.choice(["high", [1.0], {}, None, True, "[bold red]x[/nope]"])
    return lines


def _other_step(run: Path, source: random.Random) -> str:
    value, text = source.choice(VALUES), (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"training/global_step": 2.0', f'"training/global_step": {value}'))
    return value[:20]


# -- other files ----------------------------------------------------------------------------------------------------


def _newer_config(run: Path, source: random.Random) -> None:
    with (run / "config.toml").open("a") as file:
        file.write("[teleport]\nspeed = 9\n")


def _newer_log(run: Path, source: random.Random) -> None:
    for path in run.glob("rollouts/*/*.h5"):
        with h5py.File(path, "r+") as log:
            log.attrs["schema"] = 99


def _strange_entries(run: Path, source: random.Random) -> None:
    for name in ("step-x", "step-" + "9" * 200, "step-٣٣٣٣٣٣", "step-000007", "step--00001", "lost+found"):
        for parent in ("rollouts", "cache", "checkpoints"):
            (run / parent / name).mkdir()
    for name in ("rank-x.h5", "rank-.h5", "rank-" + "9" * 200 + ".h5", "rank-0001.h5.bak", "rank-٣٣٣٣.h5"):
        for parent in ("rollouts/step-000002", "cache/step-000002", "status"):
            (run / parent / name).write_bytes(b"")


# -- the whole folder -----------------------------------------------------------------------------------------------


def _folder_of_runs(run: Path, source: random.Random) -> None:
    inner = run.rename(run.with_name("inner"))
    run.mkdir()
    inner.rename(run / "inner")


def _other_program(run: Path, source: random.Random) -> None:
    shutil.rmtree(run)
    (run / "rollouts").mkdir(parents=True)
    (run / "checkpoints" / "step-000100").mkdir(parents=True)
    (run / "config.toml").write_text('[train]\nlr = 0.1\n[model]\nname = "resnet"\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
    (run / "finished.json").write_text('{"ok": true}\n')
    (run / "checkpoints/step-000100/state.json").write_text("{}")


def _model(run: Path, source: random.Random) -> None:
    shutil.rmtree(run)
    shutil.copytree(ROOT / "tlt_hpc" / "models" / "assets" / "tiny", run)


def _empty(run: Path, source: random.Random) -> None:
    shutil.rmtree(run)
    run.mkdir()


RUNS: tuple[tuple[str, Damage, frozenset[str]], ...] = (
    ("a run folder that is empty", _empty, READERS),
    ("a folder of runs", _folder_of_runs, READERS),
    ("a folder of another program", _other_program, ALL - {"inspect"}),
    ("a model's folder", _model, READERS - {"evaluate"}),
    ("below a forbidden folder", lambda run, source: run.parent.chmod(0), ALL),
    *((f"a run folder: {name}", damage, READERS if name == "a dangling link" else ALL)
      for name, damage in FOR_A_FOLDER.items()),
    ("metrics.jsonl: each step twice", of_lines(lambda lines, source: [*lines, *lines]), CHECK),
    ("metrics.jsonl: reversed order", of_lines(lambda lines, source: lines[::-1]), CHECK),
    ("metrics.jsonl: without a key", of_lines(_without_a_key), CHECK),
    ("metrics.jsonl: a value of another type", of_lines(_other_type), CHECK | {"train"}),
    ("metrics.jsonl: a wrong step", _other_step, CHECK | {"train"}),
    ("config.toml: of a newer version", _newer_config, frozenset({"train", "evaluate"})),
    ("rollouts: of a newer version", _newer_log, CHECK),
    ("entries that no run has", _strange_entries, NOBODY),
)  # fmt: skip
"""Damage to a run -> the commands that may not end with status 0."""
