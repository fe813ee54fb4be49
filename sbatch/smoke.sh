#!/usr/bin/env bash
# Tries out a cluster in a minute, on CPUs of 2 nodes:   sbatch sbatch/smoke.sh [section.key=value ...]
# It trains the embedded model for 4 steps, into runs/smoke-JOB; it needs the clone and its Python.
# Edit the account and the partition and, where they differ, the two paths. The environment: sbatch/env.sh.
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=tlt-smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=3000
#SBATCH --time=00:15:00
#SBATCH --signal=USR2@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --requeue
PROJECT="$SLURM_SUBMIT_DIR" # the clone; call sbatch there
STORE="$PROJECT"            # the shared folder that has models/ and data/, and where runs/ is written

set -euo pipefail
[[ -f $PROJECT/sbatch/env.sh ]] ||
    { echo "$PROJECT has no sbatch/env.sh; call sbatch in the clone (SLURM_SUBMIT_DIR)" >&2; exit 1; }
source "$PROJECT/sbatch/env.sh"
cd "$STORE"
set -- run.name="smoke-$SLURM_JOB_ID" "$@"
read_job "$PROJECT/jobs/tiny.toml"
run_ranks python -P -m mpi4py -m tlt_hpc train "$PROJECT/jobs/tiny.toml" run.num_steps=4 model.device=cpu "$@"
