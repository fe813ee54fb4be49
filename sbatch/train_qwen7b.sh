#!/usr/bin/env bash
# Trains Qwen2.5-7B on 8 nodes of 8 GPUs:   sbatch sbatch/train_qwen7b.sh [section.key=value ...]
# Edit the account, the partition, the two paths and the environment lines. Submitted again with the same run.name it
# goes on from its last checkpoint; ranks get USR2 120 s before the time limit and then save one and end with status 75.
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=tlt-qwen7b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -eo pipefail

PROJECT="$SLURM_SUBMIT_DIR" # the clone, where sbatch was called
STORE="$PROJECT"            # a shared folder with models/ and data/; runs/ is written there

module load cuda
eval "$(conda shell.bash hook)" && conda activate tlt_hpc
set -u # from here on: activation scripts read variables that are not set
source "$PROJECT/sbatch/env.sh"

cd "$PROJECT"
# Inside a container: put  apptainer exec --nv --bind "$STORE" tlt_hpc.sif  before python.
srun --mpi="${TLT_SRUN_MPI:-pmix}" --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpi4py -m tlt_hpc train jobs/qwen7b.toml \
    model.path="$STORE/models/Qwen2.5-7B" data.source="$STORE/data/math_train.jsonl" run.folder="$STORE/runs" "$@"
