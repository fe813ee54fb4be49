# shellcheck shell=bash disable=SC1090,SC1091
# The environment of every rank; sourced by the batch scripts, which set PROJECT and STORE. Not a program.

# --- your site, in this one place ---
# Modules that the ranks need, separated by spaces, such as "cuda/12.8 openmpi/5.0"; empty: none.
TLT_MODULES="${TLT_MODULES:-}"
# Folder of a virtual environment or name of a conda one. Empty: the first that there is of the one that is active where
# sbatch is called (but conda's base), the conda environment tlt_hpc, .venv in the clone, and the path's own python.
TLT_ENVIRONMENT="${TLT_ENVIRONMENT:-}"
# How srun starts ranks of your MPI (srun --mpi=list). Empty: pmix for Open MPI, pmi2 for MPICH and Intel MPI,
# cray_shasta for Cray MPICH.
TLT_SRUN_MPI="${TLT_SRUN_MPI:-}"
# Intel MPI under srun needs Slurm's PMI library, wherever your site has it.
# export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so
# What starts the ranks: srun, or mpirun within the allocation, where srun --mpi=list has nothing for your MPI.
TLT_LAUNCH="${TLT_LAUNCH:-srun}"
# The cores of each rank (srun --cpu-bind). Where they are far from its GPU, a run's log says so and gives a value.
TLT_CPU_BIND="${TLT_CPU_BIND:-cores}"
# Threads of each rank. Empty: as many as it has cores (--cpus-per-task). OMP_NUM_THREADS and MKL_NUM_THREADS of the shell
# that calls sbatch do not count: login nodes often have 1.
TLT_THREADS="${TLT_THREADS:-}"
# A disk of each node's own, for caches. Empty: what Slurm or the site made for this job, else /tmp.
TLT_LOCAL_DISK="${TLT_LOCAL_DISK:-}"
# What starts a program in a container, with the image's whole path, such as "apptainer exec --nv /shared/tlt_hpc.sif"
# (docs/cluster.md, "Containers"). Empty: none. TLT_ENVIRONMENT is not looked at then: the image has its own.
TLT_CONTAINER="${TLT_CONTAINER:-}"
# The network that ranks meet on, where they choose a wrong one ("is stuck in connecting"); names: ip -brief address.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# The network that NCCL must use between nodes, or fail: IB, or "AWS Libfabric" on Slingshot. Without it NCCL falls back
# silently to a slower one; a run prints what it has chosen.
# export NCCL_NET=IB
# ---

# sbatch hands on the variables of where it was called. After --export=NONE the ranks would not get this environment; in
# an interactive job its memory, GPUs and cores would be asked for once more, which this job may not have, and a program
# that this script starts would pass for a rank. A step that asks for nothing has all that its job has.
unset SLURM_EXPORT_ENV SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND
unset SLURM_TRES_PER_TASK SLURM_TRES_BIND "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_STEP_ID
unset PMI_RANK PMI_SIZE PMI_FD PMIX_RANK PMIX_NAMESPACE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE

die() {
    echo "sbatch/env.sh: $*" >&2
    exit 1
}

find_conda() {
    local shell
    shell="$(type -P conda || type -P micromamba || type -P mamba || true)"
    echo "${shell:-${CONDA_EXE:-${MAMBA_EXE:-}}}"
}

activate_conda() { # fails where there is no conda or no such environment
    local conda
    conda="$(find_conda)"
    [[ -n $conda ]] || return 1
    case $conda in
    *conda) eval "$("$conda" shell.bash hook 2>/dev/null)" && conda activate "$1" 2>/dev/null ;;
    *) eval "$("$conda" shell hook --shell bash 2>/dev/null)" && "${conda##*/}" activate "$1" 2>/dev/null ;;
    esac
}

# The environment whose python the path has first. Conda's base is active after every login, so nobody has chosen it.
find_active() {
    local folder
    for folder in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        [[ -n $folder && $(type -P python) == "$folder/bin/python" ]] || continue
        [[ $folder != "${VIRTUAL_ENV:-}" && ${CONDA_DEFAULT_ENV:-} == base ]] || echo "$folder"
        return
    done
}

find_modules() { # a shell that nobody has logged in to may not have been told of them
    local file
    for file in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
        type module >/dev/null 2>&1 && return
        [[ ! -f $file ]] || source "$file" || true
    done
    type module >/dev/null 2>&1 || die "TLT_MODULES=$TLT_MODULES, and there is no command module on $(hostname)"
}

activate() {
    if [[ -n $TLT_CONTAINER ]]; then
        return
    elif [[ -n $TLT_ENVIRONMENT && -f $TLT_ENVIRONMENT/bin/activate ]]; then
        source "$TLT_ENVIRONMENT/bin/activate"
    elif [[ -n $TLT_ENVIRONMENT ]]; then
        activate_conda "$TLT_ENVIRONMENT" || die "TLT_ENVIRONMENT=$TLT_ENVIRONMENT is neither a folder with" \
            "bin/activate nor a conda environment that conda (found: $(find_conda)) activates; correct it"
    elif [[ -n $active ]]; then
        PATH="$active/bin:$PATH" # modules may have put theirs before it
    elif activate_conda tlt_hpc; then
        return
    elif [[ -f $PROJECT/.venv/bin/activate ]]; then
        source "$PROJECT/.venv/bin/activate"
    fi
}

active="$(find_active)"
set +u # activation scripts read variables that are not set
if [[ -n $TLT_MODULES ]]; then
    find_modules
    # shellcheck disable=SC2086
    module load $TLT_MODULES || die "module load $TLT_MODULES failed on $(hostname)"
fi
activate
set -u

# TMPDIR may be the login node's: it counts where it was made for this job.
if [[ -z $TLT_LOCAL_DISK ]]; then
    TLT_LOCAL_DISK="${SLURM_TMPDIR:-/tmp}"
    [[ ${TMPDIR:-} != *"${SLURM_JOB_ID:-none}"* ]] || TLT_LOCAL_DISK="$TMPDIR"
fi

# In a container the ranks see the clone, the store and the node's disk at the same paths.
bind_folders() {
    local name=APPTAINER_BIND folders="$PROJECT"
    [[ $TLT_CONTAINER != *singularity* ]] || name=SINGULARITY_BIND
    [[ $STORE == "$PROJECT" ]] || folders+=",$STORE"
    [[ $TLT_LOCAL_DISK == /tmp ]] || folders+=",$TLT_LOCAL_DISK" # which it has anyway
    export "$name=$folders${!name:+,${!name}}"
}
[[ -z $TLT_CONTAINER ]] || bind_folders

# What was installed below ~/.local goes before the environment's own; set it empty where that is the environment.
export PYTHONNOUSERSITE="${PYTHONNOUSERSITE-1}"

# The MPI library that mpi4py will load, which also shows that this is the right Python.
ask_mpi='import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version().strip("\0 \n"))'
# shellcheck disable=SC2086 # the words of a command, or none
mpi_library="$($TLT_CONTAINER python -P -c "$ask_mpi")" || {
    [[ -z $TLT_CONTAINER ]] || die "$TLT_CONTAINER python: mpi4py and its MPI library do not load in it (see above)"
    die "$(type -P python || echo "no python"): mpi4py and its MPI library do not load (see above). Looked for:" \
        "TLT_ENVIRONMENT=$TLT_ENVIRONMENT, an active environment (${active:-none}), the conda environment tlt_hpc" \
        "(conda: $(find_conda)), $PROJECT/.venv, python on the path. Make one of them (README), or name yours in" \
        "sbatch/env.sh"
}
# Only of use where srun is what starts Open MPI.
need_pmix() {
    local types
    types="$(srun --mpi=list 2>&1 || true)"
    [[ $types != *none* || $types == *pmix* ]] || # every list has "none"
        die "srun cannot start Open MPI, which needs PMIx: srun --mpi=list has $(tail -n +2 <<<"$types" | xargs). Put" \
            "'mpich<5' in the place of openmpi in environment.yml, or set TLT_LAUNCH=mpirun"
}

[[ -z ${TLT_NETWORK:-} ]] || die "TLT_NETWORK=$TLT_NETWORK is no longer read; set NCCL_NET=IB, or NCCL_NET='AWS Libfabric'"
[[ $TLT_LAUNCH == srun || $TLT_LAUNCH == mpirun ]] || die "TLT_LAUNCH=$TLT_LAUNCH is neither srun nor mpirun; correct it"
if [[ -z $TLT_SRUN_MPI ]]; then
    case $mpi_library in
    *"CRAY MPICH"*) TLT_SRUN_MPI=cray_shasta ;;
    "Open MPI"*)
        TLT_SRUN_MPI=pmix
        [[ $TLT_LAUNCH != srun ]] || need_pmix
        ;;
    MPICH* | Intel* | MVAPICH*) TLT_SRUN_MPI=pmi2 ;;
    *) die "cannot tell how srun starts ranks of ${mpi_library%%$'\n'*}; set TLT_SRUN_MPI to one of srun --mpi=list" ;;
    esac
fi
export TLT_SRUN_MPI TLT_CPU_BIND

# Start the job's ranks: run_ranks python -P -m mpi4py -m tlt_hpc ...
# Consecutive ranks are on one node, on neighbouring cores (block:block): a tensor-parallel replica is of consecutive
# ranks, and communicates in every layer.
run_ranks() {
    local start=(srun --mpi="$TLT_SRUN_MPI" --kill-on-bad-exit=1 --distribution=block:block
        --cpu-bind="$TLT_CPU_BIND" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
    if [[ $TLT_LAUNCH == mpirun ]]; then # ranks with GPUs bind themselves (mpi/placing.py)
        case $mpi_library in
        "Open MPI"*) start=(mpirun -n "$SLURM_NTASKS" --map-by "ppr:$SLURM_NTASKS_PER_NODE:node" --bind-to none) ;;
        *)
            start=(mpiexec -n "$SLURM_NTASKS" -ppn "$SLURM_NTASKS_PER_NODE")
            # Slurm signals all of a job step: the proxies too, in which mpiexec has srun start the ranks, and which
            # SIGUSR2 would end. MPICH splits these words at blanks alone.
            export HYDRA_LAUNCHER_EXTRA_ARGS=$'bash -c trap\t""\tUSR2;exec\t"$@" bash'
            ;;
        esac
    fi
    # shellcheck disable=SC2086 # TLT_CONTAINER is words, or none
    "${start[@]}" $TLT_CONTAINER "$@"
}

# shellcheck disable=SC2086
[[ -z $TLT_CONTAINER ]] || $TLT_CONTAINER sh -c 'command -v squeue && command -v scontrol' >/dev/null ||
    echo "sbatch/env.sh: no squeue and scontrol in the container, so a run does not know when its time ends but by" \
        "SIGUSR2, and is not queued again by itself; bind them (docs/cluster.md, \"Containers\")" >&2

# The clone's own package, whatever is installed.
export PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}"

# The job file of an argument: in the store, where relative paths are, else in the clone.
find_job() {
    [[ -f $1 || ! -f $PROJECT/$1 ]] || set -- "$PROJECT/$1"
    echo "$1"
}

# What the ranks are given of their job file, so that not each of them opens it: read_job FILE, before srun.
read_job() {
    [[ -f $1 && $(wc -c <"$1") -le 65536 ]] || return 0 # a file that is not there the ranks complain of
    TLT_JOB_FILE="$1" TLT_JOB_TEXT="$(<"$1")"
    export TLT_JOB_FILE TLT_JOB_TEXT
}

# Caches on the node's own disk: on a shared one compiled kernels are slow and ranks race for them. A folder for each
# user, job and start, since a killed job leaves locks in it; every rank makes it on its node (cluster/caches.py).
# A node that cannot ask who the user is prints a number, and status 1.
TLT_NODE_CACHE="$TLT_LOCAL_DISK/tlt-$(id -un 2>/dev/null || true)-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}"
export TLT_NODE_CACHE
export TRITON_CACHE_DIR="$TLT_NODE_CACHE/triton"
export TORCH_EXTENSIONS_DIR="$TLT_NODE_CACHE/torch_extensions"
export TORCHINDUCTOR_CACHE_DIR="$TLT_NODE_CACHE/inductor"
export CUDA_CACHE_PATH="$TLT_NODE_CACHE/cuda"
export HF_HOME="$TLT_NODE_CACHE/huggingface"

# Compute nodes have no internet: models and data are paths.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1

# Parallel file systems lack the locks that HDF5 asks for; every file here has one writer.
export HDF5_USE_FILE_LOCKING=FALSE

# Rollout and update ask for blocks of very different sizes, and what one has freed must serve the other. The memory pools
# of CUDA graphs support it (torch 2.5 and newer).
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}"

# ZeRO offload runs its optimiser on the rank's cores; torch takes MKL's number before OpenMP's.
export OMP_NUM_THREADS="${TLT_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
unset MKL_NUM_THREADS OMP_THREAD_LIMIT

# Belongs to the installation alone.
unset DS_BUILD_OPS

launched_by="srun --mpi=$TLT_SRUN_MPI"
[[ $TLT_LAUNCH == srun ]] || launched_by=mpirun
echo "nodes ${SLURM_JOB_NODELIST:-$(hostname)}: ${TLT_CONTAINER:-$(type -P python)}, ${mpi_library%%[$'\n\r']*}, $launched_by, caches in $TLT_NODE_CACHE"
