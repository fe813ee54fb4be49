#!/usr/bin/env bash
# Interrupts a short run of a job in every way that ends runs, with the nodes and ranks that are asked for here, and
# resumes it, with what its script asks of a node:
#   sbatch -N 2 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=8 --mem=0 sbatch/rehearse.sh jobs/qwen7b.toml
# The last fault is this job's own time limit: Slurm then queues it again, and its log ends with what was lost.
# Edit the account and the partition and, where they differ, the two paths. The environment: sbatch/env.sh.
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=tlt-rehearse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
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
[[ -z $TLT_CONTAINER ]] || die "sbatch/rehearse.sh does not work with TLT_CONTAINER; take tlt rehearse on one node"
[[ $# -gt 0 ]] || die "sbatch/rehearse.sh: give a job file, such as jobs/tiny.toml"
cd "$STORE"
export mpi_library TLT_LAUNCH
export -f run_ranks # python starts the ranks again and again
exec python -P -m tlt_hpc rehearse "$(find_job "$1")" "${@:2}"
