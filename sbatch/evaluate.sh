#!/usr/bin/env bash
# Judges a run's policy, or a model, on one node:   sbatch sbatch/evaluate.sh RUN [key=value ...]
# or   sbatch sbatch/evaluate.sh MODEL JOB.toml [key=value ...]
# Requeued or submitted again, it resumes. Status 75: stopped early.
# Edit the account and the partition and, where they differ, the two paths. The environment: sbatch/env.sh.
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=tlt-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=USR2@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --exclusive
#SBATCH --requeue
PROJECT="$SLURM_SUBMIT_DIR" # the clone; call sbatch there
STORE="$PROJECT"            # the shared folder that has models/ and data/, and where runs/ is written

set -euo pipefail
[[ -f $PROJECT/sbatch/env.sh ]] ||
    { echo "$PROJECT has no sbatch/env.sh; call sbatch in the clone (SLURM_SUBMIT_DIR)" >&2; exit 1; }
source "$PROJECT/sbatch/env.sh"
cd "$STORE"
: "${1:?give a run, such as runs/qwen7b, or a model and a job file}"
[[ ! ${2:--} =~ ^(-|[a-z_]+\.[a-z0-9_]+=) ]] || set -- "$1" "$1/config.toml" "${@:2}"
set -- "$1" "$(find_job "$2")" "${@:3}"
read_job "$2"
run_ranks python -P -m mpi4py -m tlt_hpc evaluate "$@"
