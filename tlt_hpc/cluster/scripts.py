"""What the scripts in ``sbatch/`` ask for. ``tools/make_batch_scripts.py`` writes them; a test holds them to this."""

from __future__ import annotations

from tlt_hpc.cluster.batch import RANK, Batch, Folders

FOLDERS = Folders(
    project='"$SLURM_SUBMIT_DIR" # the clone; call sbatch there',
    store='"$PROJECT"            # the shared folder that has models/ and data/, and where runs/ is written',
)
EDIT = "Edit the account and the partition and, where they differ, the two paths. The environment: sbatch/env.sh."
GOES_ON = "Requeued, or submitted again, it goes on from where it was. Status 75: stopped early."


def gpu_job(
    name: str, nodes: int, time: str, job: str, command: str, *about: str, check: tuple[str, ...] = ()
) -> Batch:
    """Whole nodes of 8 GPUs, one rank each; ``job``: its file, as the shell has it."""
    return Batch(
        name=f"tlt-{name}",
        command=f"{RANK} {command}",
        folders=FOLDERS,
        about=(*about, GOES_ON, EDIT),
        nodes=nodes,
        ranks_per_node=8,
        cpus_per_rank=8,
        gpus_per_node=8,
        time=time,
        account="YOUR_ACCOUNT",
        partition="YOUR_PARTITION",
        memory="0",
        exclusive=True,
        before=(*check, f'read_job "{job}"'),
    )


def training(job: str, model: str) -> Batch:
    """A job file of its own on 8 nodes."""
    return gpu_job(
        job.replace("_", "-"),
        8,
        "24:00:00",
        f"$PROJECT/jobs/{job}.toml",
        f'train "$PROJECT/jobs/{job}.toml" "$@"',
        f"Trains {model} on 8 nodes of 8 GPUs:   sbatch sbatch/train_{job}.sh [section.key=value ...]",
    )


SCRIPTS = {
    "train_qwen7b": training("qwen7b", "Qwen2.5-7B"),
    "train_r1_qwen7b": training("r1_qwen7b", "DeepSeek-R1-Distill-Qwen-7B"),
    "train_qwen32b": training("qwen32b", "Qwen2.5-32B"),
    "train_llama70b": training("llama70b", "Llama-3.3-70B-Instruct"),
    "warmup_drafter": gpu_job(
        "warmup",
        1,
        "12:00:00",
        "${1:-$PROJECT/jobs/qwen7b.toml}",
        'warmup "${@:-$PROJECT/jobs/qwen7b.toml}"',
        "Warms up a drafter on one node:   sbatch sbatch/warmup_drafter.sh [JOB.toml [section.key=value ...]]",
        "What it leaves begins a training:   sbatch sbatch/train_qwen7b.sh drafter.init=runs/qwen7b-warmup/drafter",
    ),
    "evaluate": gpu_job(
        "evaluate",
        1,
        "12:00:00",
        "$2",
        'evaluate "$@"',
        "Judges a run's policy, or a model, on one node:   sbatch sbatch/evaluate.sh RUN JOB.toml [key=value ...]",
        "such as   sbatch sbatch/evaluate.sh runs/qwen7b runs/qwen7b/config.toml evaluation.samples=32",
        check=(': "${2:?give a run and its TOML, such as runs/qwen7b runs/qwen7b/config.toml}"',),
    ),
    "smoke": Batch(
        name="tlt-smoke",
        command=f'{RANK} train "$PROJECT/jobs/tiny.toml" run.num_steps=4 model.device=cpu "$@"',
        folders=FOLDERS,
        about=(
            "Tries out a cluster in a minute, on CPUs of 2 nodes:   sbatch sbatch/smoke.sh [section.key=value ...]",
            "It trains the embedded model for 4 steps, into runs/smoke-JOB; it needs the clone and its Python.",
            EDIT,
        ),
        # of its own for each job, since one that is finished would not train; before "$@", which may name another
        before=('set -- run.name="smoke-$SLURM_JOB_ID" "$@"', 'read_job "$PROJECT/jobs/tiny.toml"'),
        nodes=2,
        time="00:15:00",
        account="YOUR_ACCOUNT",
        partition="YOUR_PARTITION",
        memory="3000",
    ),
}
"""By the name of the file, which is ``sbatch/NAME.sh``."""
