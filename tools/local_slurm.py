"""Start a private Slurm of several nodes on this machine, to try batch scripts and for tests; stop and remove it.

    eval "$(python tools/local_slurm.py start)"     # prints: export SLURM_CONF=...
    python tools/local_slurm.py stop

For Debian 12 and its Slurm 22.05; needs root, but no systemd, no cgroup and nothing under /etc. Every node is a slurmd
on the loopback interface with 2 CPUs, 4,000 MB (or ``--memory``; not limited, so the machine needs what the jobs use)
and 2 GPUs that are only names. Jobs in the partition `urgent` preempt those in `main`. Ranks start under `srun
--mpi=pmi2` with MPICH. Installs nothing; the daemons are stopped by the process ids that they wrote.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.script import run_script

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Debian's package for each program that is needed."""
NODES, GPUS_PER_NODE, MEMORY_MB = 4, 2, 4000
UP_SECONDS = 60.0
EMPTY_SECONDS = 30.0
"""For jobs to end at ``stop``: Slurm kills what outlives KillWait."""
END_SECONDS = 10.0
PORTS = range(20000, 30000)
"""Below those that the system gives to outgoing connections."""
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""The user's, and where Debian has daemons."""

MARK = "# Written by tools/local_slurm.py"
"""The first line of `slurm.conf` in a folder of this tool, which removes no other."""
SETTINGS = """\
{mark}
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# credentials that expire soon: a requeued job waits for them (145 s by default)
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/finished_jobs.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=5
KillOnBadExit=1
MinJobAge=7200
InactiveLimit=0
# several nodes on one host have more CPUs than it
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory={memory} \
Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 DefaultTime=00:05:00 State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 DefaultTime=00:05:00 State=UP PriorityTier=10 PreemptMode=off
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description="A private Slurm of several nodes on this machine.")
    parser.add_argument("command", choices=("start", "stop"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tlt-slurm"), help="of its files (/tmp/tlt-slurm)")
    parser.add_argument("--memory", type=int, default=MEMORY_MB, help=f"of each node, in MB ({MEMORY_MB})")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    check_machine()
    if options.command == "start":
        start(folder, options.memory)
        print(f"export SLURM_CONF={folder / 'slurm.conf'}")
    elif is_own(folder):
        stop(folder)
        shutil.rmtree(folder)
        print(f"ended, and removed {folder}")
    return 0


def is_own(folder: Path) -> bool:
    """Return True if this tool made the folder."""
    settings = folder / "slurm.conf"
    return settings.is_file() and settings.read_text(encoding="utf-8", errors="replace").startswith(MARK)


def check_machine() -> None:
    """Refuse a machine without Slurm, and another user than root.

    Raises:
        UserError: with the remedy.
    """
    if missing := [package for program, package in PACKAGES.items() if shutil.which(program, path=PATH) is None]:
        raise UserError(f"no Slurm here; install it with: apt-get install --no-install-recommends {' '.join(missing)}")
    if os.geteuid() != 0:
        raise UserError("slurmd starts as root only; use sudo, or a container whose user is root")


# --- start ---


def start(folder: Path, memory: int = MEMORY_MB) -> None:
    """Start the daemons of nodes of ``memory`` MB, and wait until every node takes jobs.

    Raises:
        UserError: a daemon did not start, one is up already, or the folder is not this tool's.
    """
    if is_own(folder):
        if pids(folder):
            raise UserError(
                f"a Slurm is up in {folder}; to use it: export SLURM_CONF={folder / 'slurm.conf'} (`stop` would end "
                "its jobs)"
            )
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} has files of something else; give another --folder")
    write_settings(folder, memory)
    munge = folder / "munge"
    files = {f"{name}-file": munge / name for name in ("key", "log", "seed")}
    files |= {"socket": munge / "socket", "pid-file": folder / "munged.pid"}
    start_daemon(folder, "munged", ["munged", "--force", *(f"--{name}={path}" for name, path in files.items())])
    if not wait_until((munge / "socket").is_socket, END_SECONDS):
        raise UserError(f"munged opens no socket; see {munge}/log")
    settings = str(folder / "slurm.conf")
    start_daemon(folder, "slurmctld", ["slurmctld", "-f", settings])
    for number in range(1, NODES + 1):
        start_daemon(folder, f"slurmd-node{number}", ["slurmd", "-f", settings, "-N", f"node{number}"])
    if not wait_until(lambda: node_states(folder).count("idle") == NODES, UP_SECONDS):
        raise UserError(f"not all of {NODES} nodes are up ({' '.join(node_states(folder))}); see {folder}")


def node_states(folder: Path) -> list[str]:
    """The state of each node, as sinfo has it."""
    return ask(folder, "sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()


def write_settings(folder: Path, memory: int) -> None:
    """Write the files that the daemons read, and make their folders."""
    # munged refuses a key below a folder that others may write to, except sticky ones such as /tmp
    for path in (folder, folder / "munge", folder / "state"):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
    port, host = free_ports(NODES + 1), socket.gethostname().partition(".")[0]
    ports = {"port": port, "first": port + 1, "last": port + NODES}
    (folder / "slurm.conf").write_text(
        SETTINGS.format(mark=MARK, host=host, folder=folder, nodes=NODES, gpus=GPUS_PER_NODE, memory=memory, **ports)
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")
    for number in range(GPUS_PER_NODE):
        (folder / f"gpu{number}").symlink_to(os.devnull)  # Slurm wants a device file for each, and does not open it
    (folder / "gres.conf").write_text(f"Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    for number in range(1, NODES + 1):
        (folder / f"spool-node{number}").mkdir()
        (folder / f"tmp-node{number}").mkdir()
        (folder / f"tmp-node{number}").chmod(0o1777)
    (folder / "munge" / "key").touch(0o600)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))


def free_ports(count: int) -> int:
    """Return the first of ``count`` neighbouring ports on which nothing listens.

    Raises:
        UserError: none were found.
    """
    for port in random.sample(PORTS, 100):
        if all(map(is_free, range(port, port + count))):
            return port
    raise UserError(f"no {count} neighbouring ports are free in {PORTS}")


def is_free(port: int) -> bool:
    """Return True if a daemon could listen on a port, on all interfaces."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start_daemon(folder: Path, daemon: str, command: Sequence[str]) -> None:
    """Start a daemon, which goes into the background by itself once it has written its process id.

    Raises:
        UserError: it ended at once; with its last line.
    """
    output = folder / f"{daemon}.start"  # a file: a pipe would stay open as long as the daemon lives
    with output.open("w") as file:
        done = subprocess.run(
            command, env=environment(folder), stdout=file, stderr=file, stdin=subprocess.DEVNULL, check=False
        )
    if done.returncode or not wait_until(lambda: daemon in pids(folder), END_SECONDS):
        last = (output.read_text().splitlines() or ["it wrote nothing"])[-1]
        raise UserError(f"{daemon} did not start: {last}; see the logs in {folder}")


def environment(folder: Path) -> dict[str, str]:
    """For Slurm's commands and daemons."""
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}


def ask(folder: Path, *command: str) -> str:
    """Return what a command of Slurm prints; empty if it fails, as while the controller starts."""
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False).stdout


# --- stop ---


def stop(folder: Path) -> None:
    """Cancel all jobs, wait for them, and end the daemons.

    Raises:
        UserError: a job does not end; the daemons are ended all the same.
    """
    # a slurmd that ends leaves the processes of its jobs behind
    is_empty = "slurmctld" not in pids(folder) or wait_until(lambda: not cancel(folder), EMPTY_SECONDS)
    left = "" if is_empty else " ".join(ask(folder, "squeue", "-h", "-o", "%i:%T").split())
    for daemon, pid in sorted(pids(folder).items(), reverse=True):  # nodes, the controller, munge
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda daemon=daemon: daemon not in pids(folder), END_SECONDS):  # type: ignore[misc]
            os.kill(pid, signal.SIGKILL)
    for path in folder.glob("*.pid"):
        path.unlink()
    if left:
        raise UserError(f"jobs do not end: {left}; see {folder}")


def cancel(folder: Path) -> list[str]:
    """Cancel the jobs that there are and return them; a member of an array may have started since the last time."""
    jobs = ask(folder, "squeue", "-h", "-r", "-o", "%i").split()
    if jobs:
        ask(folder, "scancel", *jobs)
    return jobs


def pids(folder: Path) -> dict[str, int]:
    """Daemon -> process id, of those that run; process ids are reused, so the command line must be the daemon's."""
    found = {}
    for path in folder.glob("*.pid"):
        try:
            pid = int(path.read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue
        program, _, node = path.stem.partition("-")
        if (
            Path(words[0]).name == program
            and any(str(folder) in word for word in words)
            and (not node or node in words)
        ):
            found[path.stem] = pid
    return found


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within ``seconds``; it is checked ten times a second."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return held


if __name__ == "__main__":
    sys.exit(run_script("local_slurm", main))
