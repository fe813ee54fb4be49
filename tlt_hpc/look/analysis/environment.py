"""On what a run's starts ran, oldest first, and one of them in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlt_hpc.look.analysis.result import Analysis, count, listed
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.storage.environment_lines import Environment, Host, read_environments


@dataclass(frozen=True)
class Environments(Analysis):
    """``starts``: oldest first; those before ``environment.jsonl`` was written are not there."""

    starts: tuple[Environment, ...]

    @property
    def has_data(self) -> bool:
        return len(self.starts) > 0


def read_environment(run: RunLog) -> tuple[Environment, ...]:
    """A run's starts, oldest first; what cannot be read is noted, and left out."""
    found, problems = read_environments(run.folder.environment)
    for problem in problems:
        run.note(problem)
    return tuple(found)


def analyse_environment(run: RunLog) -> Environments:
    """All starts; the verdict is of the last, and of what others had otherwise."""
    starts = read_environment(run)
    return Environments(run.name, _verdict(starts), run.problems, starts)


def environment_in_words(environment: Environment) -> str:
    """One paragraph: code, libraries, nodes, who started it."""
    commit = f"commit {environment.commit[:12]}, " if environment.commit else ""
    torch = environment.packages.get("torch", "unknown")
    others = [f"{name} {version}" for name, version in environment.packages.items() if name != "torch"]
    built = f" for CUDA {environment.cuda}" if environment.cuda else " for CPUs"
    mpi = " ".join(environment.mpi.partition("\n")[0].split())
    job = f" in Slurm job {environment.slurm['job']}" if "job" in environment.slurm else ""
    threads = f"{environment.threads or 'unset'} {'thread' if environment.threads == '1' else 'threads'} a rank"
    return (
        f"tlt_hpc {environment.version} ({commit}files {environment.source}) with Python {environment.python}, "
        f"torch {torch}{built}, {listed([*others, mpi])}. {_hosts_in_words(environment.hosts)}; "
        f"{threads}. Started at {environment.time} by {environment.launcher}{job}."
    )


def _hosts_in_words(hosts: Sequence[Host]) -> str:
    """Hosts that are alike are told of once."""
    kinds: dict[str, list[Host]] = {}
    for host in hosts:
        kinds.setdefault(_kind_in_words(host), []).append(host)
    ranks = count(sum(host.num_ranks for host in hosts), "rank")
    return f"{ranks} on {listed([f'{_named(alike)} ({kind})' for kind, alike in kinds.items()])}"


def _named(hosts: Sequence[Host]) -> str:
    return hosts[0].name if len(hosts) == 1 else f"{len(hosts)} nodes, {hosts[0].name} to {hosts[-1].name}"


def _kind_in_words(host: Host) -> str:
    gpus = "".join(f", {number} x {name}" for name, number in sorted(host.gpus.items()))
    cores = count(host.num_cores, "core")
    return f"{count(host.num_ranks, 'rank')}, {cores} of {host.processor}, {host.memory_bytes / 1e9:,.0f} GB{gpus}"


def _verdict(starts: Sequence[Environment]) -> str:
    if not starts:
        return "The run does not tell on what it ran: its folder has no environment.jsonl."
    last, parts = starts[-1], [environment_in_words(starts[-1])]
    if len(starts) > 1:
        odd = sum(_what_counts(start) != _what_counts(last) for start in starts[:-1])
        others = (
            f"{odd} of them on other code, versions or nodes" if odd else "all on the same code, versions and nodes"
        )
        parts.append(f"The last of {len(starts)} starts; {others}.")
    return " ".join(parts)


def _what_counts(start: Environment) -> Environment:
    """Without what differs from start to start of one job on one machine."""
    return replace(start, time="", slurm={}, launcher="", command=(), energy={})
