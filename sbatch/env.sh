# shellcheck shell=bash disable=SC1091
# The environment of every rank; sourced by the batch scripts, which set PROJECT. Not a program.

# --- your site, in this one place ---
# Modules that the ranks need, separated by spaces, such as "cuda/12.8 openmpi/5.0"; empty: none.
TLT_MODULES="${TLT_MODULES:-}"
# Folder of a virtual environment or name of a conda one. Empty: the first that there is of .venv in the clone, the
# conda environment tlt_hpc, and whatever python the path has, as where one was active when sbatch was called.
TLT_ENVIRONMENT="${TLT_ENVIRONMENT:-}"
# How srun starts ranks of your MPI (srun --mpi=list). Empty: pmix for Open MPI, pmi2 for MPICH and Intel MPI.
TLT_SRUN_MPI="${TLT_SRUN_MPI:-}"
# A disk of each node's own, for caches. Empty: what Slurm or the site made for this job, else /tmp.
TLT_LOCAL_DISK="${TLT_LOCAL_DISK:-}"
# ---

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

activate() {
    if [[ -n $TLT_ENVIRONMENT && -f $TLT_ENVIRONMENT/bin/activate ]]; then
        source "$TLT_ENVIRONMENT/bin/activate"
    elif [[ -n $TLT_ENVIRONMENT ]]; then
        activate_conda "$TLT_ENVIRONMENT" || die "TLT_ENVIRONMENT=$TLT_ENVIRONMENT is neither a folder with" \
            "bin/activate nor a conda environment that conda (found: $(find_conda)) activates; mend it there"
    elif [[ -f $PROJECT/.venv/bin/activate ]]; then
        source "$PROJECT/.venv/bin/activate"
    else
        activate_conda tlt_hpc || true
    fi
}

set +u # activation scripts read variables that are not set
if [[ -n $TLT_MODULES ]]; then
    type module >/dev/null 2>&1 || die "TLT_MODULES=$TLT_MODULES, and there is no command module on $(hostname)"
    # shellcheck disable=SC2086
    module load $TLT_MODULES || die "module load $TLT_MODULES failed on $(hostname)"
fi
activate
set -u

# The MPI library that mpi4py will load, which also shows that this is the right Python.
ask_mpi='import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())'
mpi_library="$(python -c "$ask_mpi")" ||
    die "$(type -P python || echo "no python"): mpi4py and its MPI library do not load (see above). Looked for:" \
        "TLT_ENVIRONMENT=$TLT_ENVIRONMENT, $PROJECT/.venv, the conda environment tlt_hpc (conda: $(find_conda))," \
        "python on the path. Make one of them (README), or name yours in sbatch/env.sh"
if [[ -z $TLT_SRUN_MPI ]]; then
    case $mpi_library in
    *"CRAY MPICH"*) TLT_SRUN_MPI=cray_shasta ;;
    "Open MPI"*) TLT_SRUN_MPI=pmix ;;
    MPICH* | Intel* | MVAPICH*) TLT_SRUN_MPI=pmi2 ;;
    *) die "cannot tell how srun starts ranks of ${mpi_library%%$'\n'*}; set TLT_SRUN_MPI to one of srun --mpi=list" ;;
    esac
fi
export TLT_SRUN_MPI

# The clone's own package, whatever is installed.
export PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}"

# What the ranks are given of their job file, so that not each of them opens it: read_job FILE, before srun.
read_job() {
    [[ -f $1 && $(wc -c <"$1") -le 65536 ]] || return 0 # a file that is not there the ranks complain of
    TLT_JOB_FILE="$1" TLT_JOB_TEXT="$(<"$1")"
    export TLT_JOB_FILE TLT_JOB_TEXT
}

# Caches on the node's own disk: on a shared one compiled kernels are slow and ranks race for them. A folder for each
# user, job and start, since a killed job leaves locks in it; every rank makes it on its node (launch/caches.py).
# TMPDIR may be the login node's: it counts where it was made for this job.
if [[ -z $TLT_LOCAL_DISK ]]; then
    TLT_LOCAL_DISK="${SLURM_TMPDIR:-/tmp}"
    [[ ${TMPDIR:-} != *"${SLURM_JOB_ID:-none}"* ]] || TLT_LOCAL_DISK="$TMPDIR"
fi
TLT_NODE_CACHE="$TLT_LOCAL_DISK/tlt-$(id -un)-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}"
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

# ZeRO offload runs its optimiser on the rank's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# Belongs to the installation alone.
unset DS_BUILD_OPS

echo "nodes ${SLURM_JOB_NODELIST:-$(hostname)}: $(type -P python), ${mpi_library%%[$'\n\r']*}, srun --mpi=$TLT_SRUN_MPI, caches in $TLT_NODE_CACHE"
