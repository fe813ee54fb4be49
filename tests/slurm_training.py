"""A run under the tests' own Slurm, from sbatch/smoke.sh: what is asked of it and awaited of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from local_slurm import ENDED, LocalSlurm

PATIENCE_SECONDS = 180.0
"""Without a sign of progress: on a machine that others use, too, all takes as long as it takes."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "checkpoint.every_steps=5",
]  # fmt: skip


def wait_for(reached: Callable[[], bool], signs: Callable[[], str]) -> None:
    """Wait, as long as there is something new among the signs of progress.

    Raises:
        AssertionError: there was nothing new for too long; with the signs.
    """
    end, seen = time.monotonic() + PATIENCE_SECONDS, ""
    while not reached():
        assert time.monotonic() < end, f"nothing new for {PATIENCE_SECONDS} s\n{seen}"
        if (now := signs()) != seen:
            end, seen = time.monotonic() + PATIENCE_SECONDS, now
        time.sleep(0.2)


class Training:
    """A run under Slurm that is submitted again where Slurm does not queue it again itself."""

    def __init__(self, slurm: LocalSlurm, folder: Path, num_steps: int) -> None:
        self.slurm, self.folder, self.num_steps = slurm, folder, num_steps
        folder.mkdir()
        self.log = folder / "log"
        self.job = ""

    def submit(self, *options: str) -> None:
        """Submit, or submit the same again, with further options of sbatch."""
        self.job = self.slurm.sbatch(
            "--partition=main", f"--output={self.log}", *options, "sbatch/smoke.sh", "run.name=run",
            f"run.folder={self.folder}", f"run.num_steps={self.num_steps}", *SETTINGS,
        )  # fmt: skip

    @property
    def num_done(self) -> int:
        """Steps that are committed."""
        path = self.folder / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def said(self) -> str:
        """The log so far, of all starts."""
        return self.log.read_text() if self.log.exists() else ""

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait, as long as the run gets on.

        Raises:
            AssertionError: nothing has been done for too long.
        """
        wait_for(reached, lambda: f"{self.said()}\n{self.num_done} steps; {self.slurm.state(self.job)}; {what}?")

    def until_ended(self, state: str) -> None:
        """Wait until its job has ended so."""
        self.until(lambda: self.slurm.state(self.job) in ENDED, f"the end of job {self.job}")
        assert self.slurm.state(self.job) == state, self.said()

    def until_back(self, restarts: int) -> None:
        """Wait until Slurm runs it for the so-many-th time after the first."""
        self.until(
            lambda: self.slurm.show(self.job)["Restarts"] == str(restarts) and self.slurm.state(self.job) == "RUNNING",
            f"restart {restarts} of job {self.job}",
        )

    @property
    def nodes(self) -> list[str]:
        """Where it runs."""
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.show(self.job)["NodeList"]).split()

    def policy(self) -> str:
        """The digest that the last start printed."""
        found = re.findall(rf"finished: {self.num_steps} steps, policy ([0-9a-f]+)", self.said())
        assert len(found) == 1, self.said()
        return found[0]
