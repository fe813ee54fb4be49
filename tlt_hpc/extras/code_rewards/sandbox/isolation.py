"""The two kinds of sandbox. They differ in their walls alone: limits and the filter of system calls are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tlt_hpc.extras.code_rewards.sandbox.landlock import Landlock
from tlt_hpc.extras.code_rewards.sandbox.namespaces import Namespaces


class Walls(Protocol):
    """The isolation of programs from the host, around a process that supervises them one by one."""

    def become_supervisor(self, libraries: Sequence[str], for_supervisor: Sequence[int]) -> None:
        """Make this process, or a child that it waits for, the supervisor.

        Args:
            libraries: folders that programs may read.
            for_supervisor: descriptors that no other process of the sandbox may keep open.

        Raises:
            OSError: the system does not allow it; names the call.
        """

    def isolate_program(self) -> None:
        """Isolate a program's process, which the supervisor has forked.

        Raises:
            OSError: the system does not allow it.
        """

    def kill_remaining_processes(self) -> None:
        """End everything that a program has left."""


KINDS: dict[str, Callable[[], Walls]] = {"namespaces": Namespaces, "Landlock": Landlock}
"""The first that the system allows is used."""
