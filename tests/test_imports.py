"""The floors of the house: imports point down, each heavy library has one floor, and nothing runs in a circle."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tlt_hpc"

# Top to bottom. A room is a folder of the package or a module beside them; those on one line do not know each other.
FLOORS = (
    ("__main__",),
    ("cli", "script"),
    ("show_evaluation",),
    ("display", "inspect_data", "preflight", "live", "report"),
    ("ablate",),
    ("compare", "bench", "export", "warmup"),
    ("launch",),
    ("run",),
    ("saving",),
    ("replay",),
    ("tail", "update", "evaluate"),
    ("draws", "kept", "finished"),
    ("job", "metrics", "simulate"),
    ("plan", "memory_plan", "owner", "environment"),
    ("rollout", "drafting", "rl", "rewards", "checkpoint", "data", "tracking"),
    ("models", "figures"),
    ("analysis",),
    ("mpi", "storage", "kernels", "energy"),
    ("config", "records", "timing", "stopping", "console"),
    ("recipes", "watch", "errors", "printable", "words"),
    ("files",),
    ("",),  # the package itself: its version
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Narrower than the floors: what these rooms may know at all.
MAY_KNOW = {
    "rollout": {"models", "kernels", "records", "files"},
    "kernels": set(),
    "drafting": {"models", "storage", "config", "records", "watch"},
    "data": {"config", "records", "files"},
    "rewards": {"config", "records", "watch", "files"},
    "storage": {"records", "config", "errors", "files"},
    "analysis": {"storage", "records", "errors", "files", "words"},
    "figures": {"analysis", "printable", "words"},
    "mpi": {"config", "stopping", "watch"},
    "launch": {"config", "storage", "stopping", "watch", "files", "words"},
    "bench": {"rollout", "models", "data", "config", "records"},
    "memory_plan": {"rollout", "models", "config", "console", "words"},
    "simulate": {"memory_plan", "rollout", "models", "storage", "config", "records", "console", "words"},
    "export": {"checkpoint", "models", "storage", "config", "words"},
    "report": {"simulate", "figures", "analysis", "storage", "errors", "files", "printable", "words"},
    "energy": set(),
    "environment": {"rollout", "storage", "mpi", "words"},
    "live": {"owner", "models", "storage", "records", "watch", "errors", "files", "console", "printable", "words"},
    "tracking": {"storage", "config", "files"},
    "records": set(),
    "config": {"recipes", "errors", "files"},
    "recipes": set(),
    "timing": {"watch"},
    "watch": {"files"},
}

HOME_OF = {
    "mpi4py": {"mpi"},
    "h5py": {"storage"},
    "hdf5plugin": {"storage"},
    "deepspeed": {"rl"},
    "transformers": {"models"},
    "submitit": {"launch"},
    "matplotlib": {"bench", "ablate", "simulate", "figures"},
    "triton": {"kernels"},
    "pyarrow": {"data"},
    "jinja2": {"data", "report"},
    "reasoning_gym": {"data"},
    "flash_attn": {"kernels"},
    "math_verify": {"rewards"},
    "tensorboard": {"tracking"},
    "wandb": {"tracking"},
    "huggingface_hub": {"preflight"},
    "pynvml": {"energy"},
    "pickle": {"mpi"},  # between ranks; a file that is unpickled is run
}
WITHOUT_TORCH = {
    "mpi",
    "storage",
    "config",
    "records",
    "recipes",
    "timing",
    "watch",
    "data",
    "rewards",
    "launch",
    "plan",
    "memory_plan",
    "simulate",
    "cli",
    "display",
    "show_evaluation",
    "compare",
    "inspect_data",
    "preflight",
    "live",
    "report",
    "energy",
    "environment",
    "analysis",
    "figures",
}
WITHOUT_TORCH_OUTSIDE = {
    "tools": {
        "make_tiny_model.py",
        "make_tiny_drafter.py",
        "prove_exactness.py",
        "bench_shape.py",
        "record_workload.py",
        "check_kernels.py",
        "compare_merges.py",
        "bench_packing.py",
        "bench_checkpoint.py",
        "bench_cache.py",
        "bench_update.py",
        "bench_trl.py",
        "bench_replica.py",
        "check_memory_plan.py",
        "faulty_inputs.py",
    },
    "jobs": set[str](),
}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere, functions and type checks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(name: str, modules: set[str]) -> str:
    """The module of the package that an imported name is, or is in."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def library_of(name: str) -> str:
    """The heavy library behind an imported name; safetensors.torch is torch, and torch.utils.tensorboard is not."""
    if name.startswith("torch.utils.tensorboard"):
        return "tensorboard"
    return "torch" if name.startswith("safetensors.torch") else name.split(".")[0]


FILES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
ARROWS = {
    module: {resolve(name, set(FILES)) for name in imports_of(path) if name.split(".")[0] == PACKAGE} - {module}
    for module, path in FILES.items()
}


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in FILES} <= set(LEVEL)
    assert len(FILES) > 40


def test_imports_point_down() -> None:
    up = [
        f"{module} -> {target}"
        for module, targets in ARROWS.items()
        for target in targets
        if room_of(module) != room_of(target) and LEVEL[room_of(target)] <= LEVEL[room_of(module)]
    ]
    assert not up


@pytest.mark.parametrize("room", MAY_KNOW)
def test_rooms_know_no_more_than_they_need(room: str) -> None:
    known = {room_of(target) for module, targets in ARROWS.items() if room_of(module) == room for target in targets}
    assert known - {room, ""} <= MAY_KNOW[room]


def test_no_cycles() -> None:
    """Take away modules that import none of the rest until nothing is left; what stays is in or above a circle."""
    left = {module: set(targets) for module, targets in ARROWS.items()}
    while free := {module for module, targets in left.items() if not targets & set(left)}:
        left = {module: targets for module, targets in left.items() if module not in free}
    assert not left


@pytest.mark.parametrize("library", HOME_OF)
def test_heavy_library_has_one_floor(library: str) -> None:
    users = {room_of(module) for module, path in FILES.items() if library in map(library_of, imports_of(path))}
    assert users <= HOME_OF[library]


def test_rooms_without_torch() -> None:
    users = {module for module, path in FILES.items() if "torch" in map(library_of, imports_of(path))}
    assert not {module for module in users if room_of(module) in WITHOUT_TORCH}


@pytest.mark.parametrize("folder", WITHOUT_TORCH_OUTSIDE)
def test_scripts_without_heavy_libraries(folder: str) -> None:
    """Tools read files; jobs submit. Neither waits for torch, and only jobs know submitit."""
    heavy = {"torch", "deepspeed", "mpi4py", "transformers"} | ({"submitit"} if folder == "tools" else set())
    users = {
        f"{path.name}: {library}"
        for path in (ROOT / folder).glob("*.py")
        if path.name not in WITHOUT_TORCH_OUTSIDE[folder]
        for library in heavy & set(map(library_of, imports_of(path)))
    }
    assert not users


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, tlt_hpc.cli; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "deepspeed", "transformers", "mpi4py", "h5py", "submitit", "numpy"} & set(loaded.split())


def test_what_trains_no_policy_goes_without_what_trains_one() -> None:
    """Half as many files again, which every rank would open on a shared file system."""
    modules = "tlt_hpc.evaluate.command, tlt_hpc.warmup.command, tlt_hpc.show_evaluation, tlt_hpc.display"
    code = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"deepspeed", "transformers", "triton", "pandas", "pyarrow", "matplotlib"} & set(loaded.split())


@pytest.mark.flaky(reruns=2)  # it measures seconds, on a machine that may have other work
def test_help_answers_at_once() -> None:
    """CPU seconds, not wall seconds: a busy machine is no fault of the program."""
    seconds = []
    for _ in range(2):  # the first may write bytecode
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", PACKAGE, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "train" in done.stdout
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.0
