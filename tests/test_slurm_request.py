"""What is asked of Slurm is read from a script, from variables and from options as sbatch reads it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from preflight_place import SCRIPT

from tlt_hpc.cluster.request import SlurmRequest, num_gpus, parse_sbatch_options, read_script_options
from tlt_hpc.config import ConfigError


def test_a_script_is_read_as_sbatch_reads_it(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)

    def read(given: dict[str, str], variables: dict[str, str], *names: str) -> tuple[SlurmRequest, list[str]]:
        found = SlurmRequest.of_script(script, given, variables)
        return found, [found.option_value(name) for name in names]

    found, asked = read({}, {}, "partition", "account", "time", "signal")
    assert (found.nodes, found.ranks_per_node, found.memory_mb, found.wants_requeue) == (2, 1, 16384, True)
    assert asked == ["main", "science", "10:00:00", "USR2@120"]
    given = {"nodes": "3", "account": "given"}
    found, asked = read(given, {"SBATCH_PARTITION": "other", "SBATCH_ACCOUNT": "mine"}, "partition", "account")
    assert (found.nodes, asked) == (3, ["other", "given"])
    assert (found.option_source("partition"), found.option_source("account")) == ("SBATCH_PARTITION", "the script")
    variables = {"SBATCH_TIMELIMIT": "5:00", "SBATCH_GRES": "gpu:2", "SBATCH_NO_REQUEUE": "1"}
    found, asked = read(given, variables, "time")
    assert (asked, found.gpus_per_node, found.wants_requeue) == (["5:00"], 2, False)


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        ("\n# a comment\n  # another\n#SBATCH --nodes=2 # 'quoted\n", {"nodes": "2"}),
        ("#SBATCH --nodes=2\ncat <<'X'\n#SBATCH --nodes=4\nX\n", {"nodes": "2"}),
        ("#SBATCH --nodes=2\n#SBATCH --comment=don't\n", "a quote in an #SBATCH line has no end; close or remove it"),
        ("#SBATCH --exclusive\n#SBATCH hetjob\n#SBATCH -N4\n", "the script asks for a heterogeneous job"),
    ],
)
def test_lines_count_up_to_the_first_command(lines: str, read: dict[str, str] | str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + lines)
    if isinstance(read, dict):
        assert read_script_options(tmp_path / "job.sh") == read
        return
    with pytest.raises(ConfigError, match=read):
        read_script_options(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ("--ntasks-per-node=2 --gpus-per-node=a100:4 --mem=7G", (4, 2, 7168)),
        ("--gpus-per-node=a100:4 --gres=gpu:h100:2", (4, 4, None)),
        ("--gpus-per-node=a100:4,h100:2 --mem=0", (6, 6, 0)),
        ("--gres=gres/gpu:a100:4", (4, 4, None)),
        ("--gres=craynetwork:1,gpu,lscratch:200 -N 2-4 --mem=100", (1, 1, 100)),
        ("-A acc -p gpu -N 2 -t 1:00:00 --gres gpu:4 --exclusive -C=a100", (4, 4, None)),
        ("-J tiny --mem 2G -s --gpus-per-node 3 -H --ntasks-per-node=5 --gpus-per-node=1", (1, 5, 2048)),
    ],
)
def test_gpus_memory_and_ranks_of_a_node_are_read(asked: str, read: tuple[object, ...]) -> None:
    found = SlurmRequest(parse_sbatch_options(shlex.split(asked))).check_options()
    assert (found.gpus_per_node, found.ranks_per_node, found.memory_mb) == read


MEASURE = r"the script asks for --(ntasks|gpus|mem|tres).*; write --(ntasks-per|gpus-per|mem)"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("--nodes=two", "--nodes=two is no number"),
        ("-Z 3", "'-Z' is not understood as an option of sbatch"),
        ("-N2 stray", "'stray' is not understood as an option of sbatch; write --OPTION=VALUE"),
        *((asked, MEASURE) for asked in ("-n 8", "-G 8", "--gpus-per-task=1", "--mem-per-cpu=1G", "--mem-per-gpu=1G")),
        ("--tres-per-node=gres/gpu:4", MEASURE),
    ],
)
def test_options_that_sbatch_would_not_take_or_that_measure_no_node_are_named(asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SlurmRequest(parse_sbatch_options(shlex.split(asked))).check_options()


def test_the_last_word_on_requeue_counts() -> None:
    words = ["--requeue", "--no-requeue", "--requeue"]
    assert [SlurmRequest(parse_sbatch_options(words[:end])).wants_requeue for end in range(4)] == [
        None,
        True,
        False,
        True,
    ]


def test_gpus_are_counted_in_generic_resources() -> None:
    texts = {"gpu:a100:4(S:0-1)": 4, "gpu:8": 8, "(null)": 0, "gpu:a100:2,gpu:v100:1": 3, "nvme:1,gpu:h100:8(S:0)": 8,
             "gpu_memory:80": 0, "gpu:1g.10gb:7(S:0,1)": 7}  # fmt: skip
    assert {text: num_gpus(text) for text in texts} == texts
