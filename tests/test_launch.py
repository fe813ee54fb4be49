"""Starting ranks: what counts as launched, and the command and environment of those that `tlt` starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from launch_ranks import ROOT, run_python

from tlt_hpc.cli.display import startup_times_text
from tlt_hpc.cluster import launcher


@pytest.mark.parametrize(
    ("environment", "rank", "count"),
    [
        ({}, None, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, 3, 8),
        ({"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "64"}, 5, 64),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, 1, 4),
        # a batch script, outside any step, has SLURM_PROCID too, and is no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, None),
        # nor is the shell that salloc opens on a node, which is a step of one task
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, None),
    ],
)
def test_who_was_launched(environment, rank, count):
    assert launcher.launched_rank(environment) == rank
    assert launcher.launched_count(environment) == count


IN_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "4"}
"""What a shell of ``srun --pty bash`` has."""


def test_one_rank_in_a_step_is_named_where_the_job_has_more():
    said = launcher.single_rank_hint({**IN_STEP, "PMI_RANK": "0", "PMI_SIZE": "1"}, 2, ["train", "my job.toml"])
    assert said == (
        "srun started one rank, but run.ranks = 2; to start all of them: "
        f"`srun --overlap --overcommit -n 2 {sys.executable} -P -m mpi4py -m tlt_hpc train 'my job.toml'`"
    )
    assert launcher.single_rank_hint(IN_STEP, 2, ["train", "my job.toml"]) == said
    for environment, num_ranks in (
        (IN_STEP, 1),
        ({**IN_STEP, "SLURM_STEP_NUM_TASKS": "2"}, 4),  # the launcher's number counts
        ({**IN_STEP, "SLURM_STEP_ID": "4294967290"}, 2),  # the shell of salloc, where mpiexec starts
        ({"SLURM_JOB_ID": "4", "SLURM_PROCID": "0"}, 2),  # a batch script
        ({**IN_STEP, "TLT_JOB_FILE": "a.toml"}, 2),  # what it starts
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 2),  # mpiexec -n 1
        ({}, 2),
    ):
        assert launcher.single_rank_hint(environment, num_ranks, ["train"]) == ""


def test_mpiexec_is_found_and_not_started_where_it_would_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no mpiexec beside this Python or on PATH; `pip install 'mpich<5'`"):
        launcher.find_mpiexec()
    (tmp_path / "mpiexec").touch()
    for environment in ({}, {"SLURM_JOB_ID": "4"}, {**IN_STEP, "SLURM_STEP_ID": "4294967290"}):
        assert launcher.find_mpiexec(environment) == str(tmp_path / "mpiexec")
    with pytest.raises(ValueError, match=r"within a step of Slurm \(SLURM_STEP_ID=0\).*srun --overlap, or leave"):
        launcher.find_mpiexec(IN_STEP)


def test_more_ranks_than_cores_are_named():
    assert (
        launcher.starting_ranks_message(64) + launcher.crowded_cores_note(64, 2)
        == "starting 64 ranks on 2 cores, which will be slow"
    )
    assert (launcher.crowded_cores_note(3, 1), launcher.crowded_cores_note(2, 2)) == (
        " on 1 core, which will be slow",
        "",
    )


TINY = ROOT / "jobs" / "tiny.toml"
HEAVY = {"torch", "transformers", "deepspeed", "mpi4py", "h5py", "numpy"}


@pytest.mark.parametrize(
    ("environment", "given", "said"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, [], "starting 2 ranks"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "TLT_STARTED": "1"}, [], ""),
        ({"PMIX_RANK": "0"}, [], "starting the ranks"),
        ({}, ["--dry-run"], ""),
        ({}, [], f"checking {TINY}"),
    ],
)
def test_one_line_is_out_before_anything_heavy_is_imported(environment, given, said, tmp_path):
    """What comes after the line is a mistake."""
    wrong = "run.sead=1"
    program = (
        "import builtins, sys\nfrom tlt_hpc.cli import main as cli\n"
        "def stop(*given, **named):\n"
        f"    loaded = {HEAVY} & sys.modules.keys()\n"
        "    assert not loaded or named.get('file'), loaded\n"
        "    builtins.print(*given, **named)\n"
        f"cli.print = stop\nsys.exit(cli.main(['train', '{TINY}', '{wrong}', *{given}]))"
    )
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**own, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == said, done.stderr


def test_the_command_of_ranks_and_their_environment(monkeypatch):
    """mpi4py's runner ends all ranks when one raises; one thread a rank unless the user says otherwise."""
    monkeypatch.setattr(launcher, "find_mpiexec", lambda: "/opt/mpi/bin/mpiexec")
    command = launcher.launch_command(3, ["train", "jobs/tiny.toml"])
    runner = [sys.executable, "-P", "-m", "mpi4py", "-m", "tlt_hpc"]
    assert command == ["/opt/mpi/bin/mpiexec", "-n", "3", *runner, "train", "jobs/tiny.toml"]
    assert launcher.launch_environment(2, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    ranks = launcher.launch_environment(2, {})
    assert (ranks["OMP_NUM_THREADS"], ranks["TLT_RANKS"]) == ("1", "2")


@pytest.mark.mpi
def test_modules_of_the_folder_that_one_is_in_are_not_run(tmp_path):
    """It may be the folder of another user's run: neither ranks nor their reward servers take modules from there."""
    for name in ("annotated_types", "h5py", "latex2sympy2_extended", "mpi4py", "numpy", "torch", "tlt_hpc"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'taken from here'); os._exit(77)")
    small = ["rollout.prompts_per_step=2", "rollout.max_new_tokens=20", "run.num_steps=1"]
    program = "import sys; from tlt_hpc.__main__ import main; sys.exit(main())"
    words = ["train", str(TINY), f"run.folder={tmp_path}", "reward.default=math", *small]
    done = run_python("-P", "-c", program, *words, cwd=tmp_path)
    assert done.returncode == 0 and "finished: 1 step" in done.stdout and "taken" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("value", "counts"), [("", False), ("yes", False), ("1", False), ("-5", True), ("+500", False), ("-90000", False)]
)
def test_a_start_is_counted_from_the_command_that_started_the_ranks(value: str, counts: bool) -> None:
    at = str(time.time() + float(value)) if value[:1] in "+-" and value else value
    assert (launcher.launch_time({launcher.STARTED: at}) is not None) == counts
    assert launcher.launch_time({}) is None


def test_what_took_long_in_a_start_is_named() -> None:
    told = startup_times_text(100.0, {"reading": 102.0, "loading": 102.5}, 110.0)
    assert told == "first tokens 10.0 s after the start: loading 7.5, starting 2.0"
