# shellcheck shell=bash
# The environment of every rank; sourced by the batch scripts. Not a program.

# Caches on the node's own disk: compiled kernels on a shared file system are slow, and ranks would race for them.
local_cache="${TLT_LOCAL_CACHE:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/tlt-cache-${USER:-$(id -un)}-${SLURM_JOB_ID:-0}}"
export TRITON_CACHE_DIR="$local_cache/triton"
export TORCH_EXTENSIONS_DIR="$local_cache/torch_extensions"
export TORCHINDUCTOR_CACHE_DIR="$local_cache/inductor"
export HF_HOME="$local_cache/huggingface"

# Compute nodes have no internet: models and data are paths.
export HF_HUB_OFFLINE=1
export TRANSFORMERS_OFFLINE=1

# Parallel file systems lack the locks that HDF5 asks for; every file here has one writer.
export HDF5_USE_FILE_LOCKING=FALSE

# ZeRO offload runs its optimiser on the rank's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# Belongs to the installation alone.
unset DS_BUILD_OPS
