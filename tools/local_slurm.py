"""Brings up a private Slurm of several nodes on this one machine, to try batch scripts on and for tests; takes it down.

    eval "$(python tools/local_slurm.py start)"     # prints: export SLURM_CONF=...
    python tools/local_slurm.py status              # of the one that SLURM_CONF names
    python tools/local_slurm.py stop --purge

For Debian 12 and its Slurm 22.05; needs root, but no systemd, no cgroup and nothing under /etc. Every node is a slurmd
on the loopback interface with 2 CPUs, 4,000 MB and 2 GPUs that are only names. Jobs in the partition `urgent` preempt
those in `main`. Ranks start under `srun --mpi=pmi2` with MPICH. Installs nothing; the daemons are stopped by the
process ids that they wrote. Knows nothing of the package.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
"""Debian's package for each program that is needed."""
MOST_NODES = 16
GPUS_PER_NODE = 2
UP_SECONDS = 60.0
EMPTY_SECONDS = 30.0
"""How long jobs may take to end at ``stop``: Slurm kills what outlives KillWait."""
END_SECONDS = 10.0
FIRST_PORTS = range(20000, 30000)
"""Where ports are looked for: below those that the system gives to outgoing connections."""

MARK = "# Written by tools/local_slurm.py"
"""By this line a folder is known as its own: `stop --purge` removes no other."""
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
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000 \
Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 DefaultTime=00:05:00 State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 DefaultTime=00:05:00 State=UP PriorityTier=10 PreemptMode=off
"""


@dataclass(frozen=True)
class Cluster:
    """A Slurm of ``nodes`` nodes whose files all lie in ``folder``; its ports are ``port`` and the next ``nodes``."""

    folder: Path
    nodes: int = 4
    port: int = 0

    @property
    def settings(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def daemons(self) -> list[str]:
        """In the order in which they end."""
        return [*self.node_names, "slurmctld", "munged"]

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands; its daemons lie where a user's path may not lead."""
        return {**os.environ, "SLURM_CONF": str(self.settings), "PATH": search_path()}

    def pid_file(self, daemon: str) -> Path:
        """Of ``munged``, ``slurmctld`` or a node."""
        return self.folder / f"slurmd-{daemon}.pid" if daemon.startswith("node") else self.folder / f"{daemon}.pid"


class SlurmError(Exception):
    """Something is missing or did not come up; one line with the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 1 where it failed, or where ``status`` finds nothing up."""
    options = parse(arguments)
    try:
        return {"start": run_start, "stop": run_stop, "status": run_status}[options.command](options)
    except SlurmError as error:
        print(f"local_slurm: {error}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="A private Slurm of several nodes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="bring it up, and print what to export")
    stop = commands.add_parser("stop", help="cancel its jobs and end its daemons")
    status = commands.add_parser("status", help="which daemons and nodes are up")
    usual = Path(tempfile.gettempdir()) / "tlt-slurm"
    for command, default in ((start, usual), (stop, exported_folder() or usual), (status, exported_folder() or usual)):
        command.add_argument("--folder", type=Path, default=default, help="of all its files (default %(default)s)")
    start.add_argument("--nodes", type=int, default=4, help=f"1 to {MOST_NODES} (default 4)")
    start.add_argument("--port", type=int, default=0, help="first of nodes + 1 ports (default: some that are free)")
    stop.add_argument("--purge", action="store_true", help="remove the folder too: queue, logs and all")
    return parser.parse_args(arguments)


def exported_folder() -> Path | None:
    """The folder of the Slurm that SLURM_CONF names, where that is one of ours."""
    settings = Path(os.environ.get("SLURM_CONF", ""))
    is_own = settings.is_file() and settings.read_text(encoding="utf-8", errors="replace").startswith(MARK)
    return settings.parent if is_own else None


def run_start(options: argparse.Namespace) -> int:
    """``start``."""
    if not 1 <= options.nodes <= MOST_NODES:
        raise SlurmError(f"--nodes {options.nodes}: give 1 to {MOST_NODES}")
    check_programs()
    check_root()
    folder = options.folder.resolve()
    port = options.port or free_ports(options.nodes + 1)
    start(Cluster(folder, options.nodes, port))
    print(f"export SLURM_CONF={folder / 'slurm.conf'}")
    return 0


def run_stop(options: argparse.Namespace) -> int:
    """``stop``."""
    cluster = find_cluster(options.folder)
    if cluster is not None:
        check_root()
        stop(cluster)
        if options.purge:
            shutil.rmtree(cluster.folder)
    say("stopped" if cluster else f"there is none in {options.folder}")
    return 0


def run_status(options: argparse.Namespace) -> int:
    """``status``."""
    cluster = find_cluster(options.folder)
    if cluster is None:
        raise SlurmError(f"there is none in {options.folder}; begin one with start")
    up = {daemon: is_up(cluster, daemon) for daemon in cluster.daemons}
    print("\n".join(f"{daemon:10} {'up' if runs else 'down'}" for daemon, runs in up.items()))
    if up["slurmctld"]:
        print(ask(cluster, "sinfo", "-N", "-o", "%N %P %T"), end="")
    print(f"export SLURM_CONF={cluster.settings}")
    return 0 if all(up.values()) else 1


# --- before it starts ---


def search_path() -> str:
    """The user's search path, and where Debian keeps daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def missing_packages() -> list[str]:
    """Debian packages of which a program is absent."""
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=search_path()) is None]


def check_programs() -> None:
    """Refuse a machine without Slurm.

    Raises:
        SlurmError: with the command that installs what is missing.
    """
    if missing := missing_packages():
        raise SlurmError(f"no Slurm here; install it with: apt-get install --no-install-recommends {' '.join(missing)}")


def check_root() -> None:
    """Refuse another user than root, whom slurmd does not serve.

    Raises:
        SlurmError: with the remedy.
    """
    if os.geteuid() != 0:
        raise SlurmError("slurmd starts as root only; use sudo, or a container whose user is root")


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody listens on.

    Raises:
        SlurmError: there are none.
    """
    first = random.randrange(FIRST_PORTS.start, FIRST_PORTS.stop)
    for port in itertools.chain(range(first, FIRST_PORTS.stop, count), range(FIRST_PORTS.start, first, count)):
        if all(map(is_free, range(port, port + count))):
            return port
    raise SlurmError(f"no {count} neighbouring ports are free in {FIRST_PORTS}; give --port")


def is_free(port: int) -> bool:
    """Whether a daemon could listen there, on all interfaces."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_cluster(folder: Path) -> Cluster | None:
    """What was started in a folder, by the settings that lie there; None where there are none of this program's."""
    settings = folder.resolve() / "slurm.conf"
    lines = settings.read_text().splitlines() if settings.is_file() else []
    if MARK not in lines:
        return None
    port = next(int(line.partition("=")[2]) for line in lines if line.startswith("SlurmctldPort="))
    nodes = next(int(line.partition("node[1-")[2].partition("]")[0]) for line in lines if line.startswith("NodeName="))
    return Cluster(settings.parent, nodes, port)


# --- start ---


def start(cluster: Cluster) -> None:
    """Bring it up and wait until every node takes jobs; what is up in its folder already is used as it is.

    Raises:
        SlurmError: a daemon did not start, what is up there has another number of nodes, or the folder is another's.
    """
    there = find_cluster(cluster.folder)
    if there is None and cluster.folder.exists() and any(cluster.folder.iterdir()):
        raise SlurmError(f"{cluster.folder} has files of something else; give another --folder")
    if there is not None and any(is_up(there, daemon) for daemon in there.daemons):
        if there.nodes != cluster.nodes:
            raise SlurmError(f"one of {there.nodes} nodes is up in {there.folder}; stop it first")
        cluster = there
    else:
        write_settings(cluster)
    start_munge(cluster)
    start_daemon(cluster, "slurmctld", ["slurmctld", "-f", str(cluster.settings)])
    for node in cluster.node_names:
        start_daemon(cluster, node, ["slurmd", "-f", str(cluster.settings), "-N", node])
    wait_for_nodes(cluster)
    say(f"{cluster.nodes} nodes are up, partitions main and urgent; files in {cluster.folder}")


def write_settings(cluster: Cluster) -> None:
    """The files that the daemons read, and their folders."""
    folder = cluster.folder
    # munged wants no folder above its key that others may write to, but for sticky ones such as /tmp
    for path in (folder, folder / "munge", folder / "state"):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
    cluster.settings.write_text(
        SETTINGS.format(
            mark=MARK,
            host=socket.gethostname().partition(".")[0],
            port=cluster.port,
            first=cluster.port + 1,
            last=cluster.port + cluster.nodes,
            folder=folder,
            nodes=cluster.nodes,
            gpus=GPUS_PER_NODE,
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n")
    for number in range(GPUS_PER_NODE):
        device = folder / f"gpu{number}"
        if not device.is_symlink():
            device.symlink_to(os.devnull)  # Slurm wants a device file for each, and does not open it
    (folder / "gres.conf").write_text(f"Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    for node in cluster.node_names:
        for path in (folder / f"spool-{node}", folder / f"tmp-{node}"):
            path.mkdir(exist_ok=True)
        (folder / f"tmp-{node}").chmod(0o1777)


def start_munge(cluster: Cluster) -> None:
    """A munged of its own: the machine's, where there is one, is neither used nor changed."""
    folder = cluster.folder / "munge"
    key = folder / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
    command = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/socket", f"--log-file={folder}/log"]
    command += [f"--pid-file={cluster.pid_file('munged')}", f"--seed-file={folder}/seed"]
    start_daemon(cluster, "munged", command)
    if not wait_until((folder / "socket").is_socket, END_SECONDS):
        raise SlurmError(f"munged opens no socket; see {folder}/log")


def start_daemon(cluster: Cluster, daemon: str, command: Sequence[str]) -> None:
    """Start it unless it is up; it goes into the background by itself once it has written its process id.

    Raises:
        SlurmError: it ended at once; with its last words.
    """
    if is_up(cluster, daemon):
        return
    # to a file: a pipe would stay open as long as the daemon lives
    words = cluster.folder / f"{daemon}.start"
    with words.open("w") as output:
        done = subprocess.run(
            command, env=cluster.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False
        )
    if done.returncode or not wait_until(lambda: is_up(cluster, daemon), END_SECONDS):
        last = (words.read_text().splitlines() or ["it said nothing"])[-1]
        raise SlurmError(f"{daemon} did not start: {last}; see the logs in {cluster.folder}")


def wait_for_nodes(cluster: Cluster) -> None:
    """Wait until every node is ready for jobs.

    Raises:
        SlurmError: one is not within a minute; with what Slurm says of it.
    """
    if wait_until(lambda: nodes_up(cluster) == cluster.nodes, UP_SECONDS / 6):
        return
    for node in cluster.node_names:  # after a crash a node may come back as down
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], env=cluster.environment, check=False)
    if not wait_until(lambda: nodes_up(cluster) == cluster.nodes, UP_SECONDS):
        states = " ".join(ask(cluster, "sinfo", "-h", "-N", "-p", "main", "-o", "%N:%T").split())
        raise SlurmError(f"only {nodes_up(cluster)} of {cluster.nodes} nodes are up ({states}); see {cluster.folder}")


def nodes_up(cluster: Cluster) -> int:
    """How many nodes take jobs or have some."""
    states = ask(cluster, "sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()
    return sum(state in ("idle", "allocated", "mixed", "completing") for state in states)


def ask(cluster: Cluster, *command: str) -> str:
    """What a command of Slurm prints; empty where it fails, as while the controller starts."""
    return subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False).stdout


# --- stop ---


def stop(cluster: Cluster) -> None:
    """Cancel its jobs, wait for them, end its daemons; those that are down already are left out.

    Raises:
        SlurmError: a job does not end; what it runs may be left, the daemons are not.
    """
    try:
        if is_up(cluster, "slurmctld"):
            cancel_jobs(cluster)
    finally:
        for daemon in cluster.daemons:
            end_daemon(cluster, daemon)


def cancel_jobs(cluster: Cluster) -> None:
    """End all jobs while their nodes can: a slurmd that goes leaves its jobs' processes behind."""
    if not wait_until(lambda: not cancel_once(cluster), EMPTY_SECONDS):
        left = " ".join(ask(cluster, "squeue", "-h", "-o", "%i:%T").split())
        raise SlurmError(f"jobs do not end: {left}; see {cluster.folder}")


def cancel_once(cluster: Cluster) -> list[str]:
    """Cancel what there is, and return it; a member of an array may have started since the last time."""
    jobs = ask(cluster, "squeue", "-h", "-r", "-o", "%i").split()
    if jobs:
        ask(cluster, "scancel", *jobs)
    return jobs


def end_daemon(cluster: Cluster, daemon: str) -> None:
    """End one daemon by its process id, and forget that."""
    pid = running_pid(cluster, daemon)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: running_pid(cluster, daemon) is None, END_SECONDS):
            os.kill(pid, signal.SIGKILL)
    cluster.pid_file(daemon).unlink(missing_ok=True)


def is_up(cluster: Cluster, daemon: str) -> bool:
    return running_pid(cluster, daemon) is not None


def running_pid(cluster: Cluster, daemon: str) -> int | None:
    """The process id that a daemon wrote, where that process is still it: numbers are given out again."""
    try:
        pid = int(cluster.pid_file(daemon).read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    program = "slurmd" if daemon.startswith("node") else daemon
    # a process that has ended and that nobody waits for has an empty command line
    is_it = Path(words[0]).name == program and any(str(cluster.folder) in word for word in words)
    return pid if is_it and (program != "slurmd" or daemon in words) else None


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within ``seconds``; looks ten times a second."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return held


def say(text: str) -> None:
    """To standard error: standard output is for ``eval``."""
    print(f"local_slurm: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(ending("local_slurm", main))
