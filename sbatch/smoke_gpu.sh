#!/usr/bin/env bash
# The first minutes on a GPU of a cluster, one node with one GPU:   sbatch sbatch/smoke_gpu.sh
# tools/gpu_first.py checks the kernels, the text and a training run of two ranks, measures decoding at the shape of
# Qwen2.5-7B with random weights, and writes runs/gpu-JOB/page.md. It needs the clone and its Python, no model.
# Edit the account and the partition and, where they differ, the two paths. The environment: sbatch/env.sh.
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=tlt-smoke-gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=1
#SBATCH --mem=32000
#SBATCH --time=00:15:00
#SBATCH --output=%x-%j.log
PROJECT="$SLURM_SUBMIT_DIR" # the clone; call sbatch there
STORE="$PROJECT"            # the shared folder where runs/ is written

set -euo pipefail
[[ -f $PROJECT/sbatch/env.sh ]] ||
    { echo "$PROJECT has no sbatch/env.sh; call sbatch in the clone (SLURM_SUBMIT_DIR)" >&2; exit 1; }
source "$PROJECT/sbatch/env.sh"
# without srun: the parts start their own ranks
# shellcheck disable=SC2086 # TLT_CONTAINER is words, or none: sbatch/env.sh
exec $TLT_CONTAINER python "$PROJECT/tools/gpu_first.py" --output "$STORE/runs/gpu-$SLURM_JOB_ID" "$@"
