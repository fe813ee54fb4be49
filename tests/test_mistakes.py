"""Typical mistakes in a command: each ends with one line on standard error, here in full, status 2, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tlt_hpc.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (
    "Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen2.5-3B, Qwen2.5-7B, Qwen2.5-14B, Qwen2.5-32B, DeepSeek-R1-Distill-Qwen-1.5B, "
    "DeepSeek-R1-Distill-Qwen-7B, DeepSeek-R1-Distill-Qwen-32B, Qwen3-8B, Llama-3.1-8B, Llama-3.1-70B, Llama-3.3-70B, "
    "DeepSeek-R1-Distill-Llama-70B, Qwen3-30B-A3B, Mistral-7B-v0.3, gemma-3-270m, gemma-3-1b"
)
MISTAKES = r"""
trian jobs/tiny.toml
    tlt: no command 'trian'; did you mean train? (see tlt --help)
cancel
    tlt: no command 'cancel'; did you mean tlt submit cancel? (see tlt --help)
train
    tlt train: the following arguments are required: CONFIG.toml (see tlt train --help)
train jobs/tinny.toml
    tlt: config file jobs/tinny.toml: No such file or directory; did you mean jobs/tiny.toml?
train tiny
    tlt: config file tiny: No such file or directory; did you mean jobs/tiny.toml?
train xyz.toml
    tlt: config file xyz.toml: No such file or directory; give the path of a TOML file such as jobs/tiny.toml
train jobs
    tlt: config file jobs: Is a directory; give the path of a TOML file such as jobs/tiny.toml
train empty.toml
    tlt: missing section [run]; add it to the file (`tlt keys run`)
train section.toml
    tlt: unknown section 'modell'; did you mean 'model'?
train broken.toml
    tlt: config file broken.toml is not valid TOML: Invalid value (at line 1, column 7); fix it
train jobs/tiny.toml rollout.temprature=0.9
    tlt: unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?
train jobs/tiny.toml rolout.temperature=0.9
    tlt: unknown section 'rolout'; did you mean 'rollout'?
train jobs/tiny.toml temperature=0.9
    tlt: override 'temperature=0.9' names no section; did you mean rollout.temperature=0.9 or evaluation.temperature=0.9?
train jobs/tiny.toml learning_rate=1e-3
    tlt: override 'learning_rate=1e-3' names no section; did you mean drafter.learning_rate=1e-3 or optimizer.learning_rate=1e-3?
train jobs/tiny.toml --rollout.temperature=0.9
    tlt train: unknown option --rollout.temperature=0.9; leave out the dashes: rollout.temperature=0.9 (see tlt train --help)
train jobs/tiny.toml --rollout.temperature 0.9
    tlt train: unknown option --rollout.temperature; leave out the dashes: rollout.temperature=VALUE (see tlt train --help)
train jobs/tiny.toml rollout.temperature 0.9
    tlt: override 'rollout.temperature' has no value; write rollout.temperature=VALUE, without blanks
train jobs/tiny.toml rollout.temperature=hot
    tlt: rollout.temperature = 'hot': use a number from 0 to 100
train jobs/tiny.toml rollout.temperature=-1
    tlt: rollout.temperature = -1: use a number from 0 to 100
train jobs/tiny.toml rollout.max_new_tokens=1009
    tlt: data.max_prompt_tokens + rollout.max_new_tokens = 1025 exceeds the model's 1024 positions; lower rollout.max_new_tokens to 1008 or less
train jobs/tiny.toml run.num_steps=ten
    tlt: run.num_steps = 'ten': use a whole number from 1
train jobs/tiny.toml run.num_steps=0
    tlt: run.num_steps = 0: use a whole number from 1
train jobs/tiny.toml run.name=a/b
    tlt: run.name = 'a/b': use letters, digits, '_', '-' and '.', and none of the last two in front
train jobs/tiny.toml model.path=models/none
    tlt: model.path = 'models/none' does not exist; on the login node: hf download ORG/NAME --local-dir models/none
train jobs/tiny.toml data.source=data/none.jsonl
    tlt: data.source = 'data/none.jsonl' does not exist; give a .jsonl, .parquet or .arrow file, a folder or pattern of them, 'reasoning-gym:NAME' or 'embedded:gcd' (docs/data.md)
train jobs/tiny.toml speculation.strategies=["draft-4"]
    tlt: speculation.strategies: strategy 'draft-4': write off, or ngram|drafter-DEPTH such as ngram-4, drafter-6x4v16a2
train jobs/tiny.toml speculation.mode=fast
    tlt: speculation.mode = 'fast': use "plain", "ngram", "frozen", "full"
train jobs/tiny.toml run.ranks=3
    tlt: rollout.prompts_per_step = 16 is not divisible by 3 ranks; set it to 15, or use another number of ranks
train jobs/tiny.toml drafter.init=none/drafter
    tlt: drafter.init = 'none/drafter': no drafter.safetensors there; give the drafter folder of a run with this model or 'random'
train jobs/tiny.toml --dryrun
    tlt train: unknown option --dryrun; did you mean --dry-run? (see tlt train --help)
train jobs/tiny.toml --resume
    tlt train: unknown option --resume (see tlt train --help)
compare jobs/tiny.toml --steps 0
    tlt compare: argument --steps: '0': use whole numbers of 1 or more (see tlt compare --help)
compare jobs/tiny.toml --step 3
    tlt compare: unknown option --step; did you mean --steps? (see tlt compare --help)
compare jobs/tiny.toml --without drafter
    tlt compare: --without has no 'drafter'; choose from ngram, tail, ahead-tail (see tlt compare --help)
compare jobs/tiny.toml --json none/x.json
    tlt compare: --json none/x.json: its folder does not exist; make it first (see tlt compare --help)
compare jobs/tiny.toml --json jobs
    tlt compare: --json jobs is a folder; give a file (see tlt compare --help)
evaluate jobs/tiny.toml
    tlt: jobs/tiny.toml is a file; give a run's folder, with its rollouts/ and metrics.jsonl
evaluate embedded:tiny
    tlt: embedded:tiny is a model; give the job's file too, such as jobs/tiny.toml
evaluate none --step 3
    tlt: none does not exist; give a run's folder
plan jobs/qwen7b.toml --gpus-per-node eight
    tlt plan: argument --gpus-per-node: 'eight': use whole numbers of 1 or more (see tlt plan --help)
plan jobs/qwen7b.toml --gpu-memory b200
    tlt plan: argument --gpu-memory: 'b200': give it in GB of 10^9 bytes, or l4, rtx4090, a100-40, l40s, a100-80, h100-80, h200 (see tlt plan --help)
plan jobs/tiny.toml --shape Qwen9
    tlt: --shape Qwen9 is not the folder of a model on this machine, and not the name of a known one; give --shape CONFIG.json, or one of {SHAPES}
simulate jobs/qwen7b.toml --nodes 1,x
    tlt simulate: argument --nodes: 'x': use whole numbers of 1 or more (see tlt simulate --help)
preflight jobs/qwen7b.toml --script nope.sh
    tlt: --script nope.sh: No such file or directory; give one such as sbatch/train_qwen7b.sh
preflight jobs/qwen7b.toml --nodes 2
    tlt: --nodes=2 without --script: give the batch script that asks for it
watch runs/none
    tlt: runs/none does not exist; give a run's folder
watch
    tlt watch: the following arguments are required: RUN (see tlt watch --help)
report runs/none
    tlt: runs/none does not exist; give a run's folder
runs
    tlt: no folder runs; give the folder of your runs, or call this where runs/ is
keys rolout
    tlt: unknown section 'rolout'; did you mean 'rollout'?
data inspekt x
    tlt data: no command 'inspekt'; did you mean inspect? (see tlt data --help)
export-drafter runs/none
    tlt export-drafter: the following arguments are required: --format (see tlt export-drafter --help)
export-drafter runs/none --format trt
    tlt export-drafter: --format has no 'trt'; choose from sglang, vllm, speculators (see tlt export-drafter --help)
submit jobs/tiny.toml --sweep run.seed
    tlt: --sweep 'run.seed' is not of the form section.key=A,B, e.g. run.seed=0,1,2
submit jobs/tiny.toml --sweep run.seed=0-2
    tlt: --sweep 'run.seed=0-2': a range is not read; write run.seed=0,1,2
submit jobs/tiny.toml --sweep run.seed=0..99
    tlt: --sweep 'run.seed=0..99': a range is not read; write run.seed=0,1,2,..
submit collect --output none/x.csv
    tlt: --output none/x.csv: its folder does not exist; make it first
submit jobs/tiny.toml --gpu 4
    tlt submit: unknown option --gpu; did you mean --gpu-memory? (see tlt submit --help)
submit status
    tlt: no submission in runs/submitted; give its folder
submit status runs/none
    tlt: no submission runs/none; give the folder that `tlt submit` has named
completion fish
    tlt completion: shell has no 'fish'; choose from bash, zsh (see tlt completion --help)
"""


def pairs() -> list[tuple[str, str]]:
    lines = MISTAKES.replace("{SHAPES}", SHAPES).strip().splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the shipped jobs and three that are wrong."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / "empty.toml").touch()
    (tmp_path / "section.toml").write_text('[run]\nname = "x"\nnum_steps = 1\n[modell]\npath = "m"\n')
    (tmp_path / "broken.toml").write_text("run = \n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "line"), pairs())
def test_a_mistake_is_one_line(command: str, line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    try:
        status = main(command.split())
    except SystemExit as end:
        status = int(end.code or 0)
    assert (capsys.readouterr().err, status) == (line + "\n", 2)
    assert sorted(place.rglob("*")) == before


def test_a_single_key_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "run.num_steps"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[run] ") and "\nnum_steps: " in out and "\nseed: " not in out
    assert main(["keys", "run.num_step"]) == 2
    assert capsys.readouterr().err == "tlt: unknown key 'run.num_step'; did you mean 'run.num_steps'?\n"


def test_no_line_of_the_keys_ends_with_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 300 and [line for line in lines if line != line.rstrip() or len(line) > 80] == []


def test_tlt_alone_prints_its_commands_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "\nrun:\n  train " in out and "\non a cluster:\n  submit " in out and "\nexamples:\n  tlt train " in out
