"""The isolation of a sandbox where there are no user namespaces: each program enters a Landlock domain.

Landlock (Linux 5.13) refuses to open or change files without a rule, and to look into processes outside the domain;
that a path exists can still be seen. Only later versions know TCP and signals, and none knows other sockets: the filter
of system calls refuses all of these by itself. No file can be written, because nothing here could limit a folder's
size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

from tlt_hpc.extras.code_rewards.sandbox.privileges import (
    check_libc_result,
    die_with_parent,
    drop_privileges,
    libc,
    set_process,
)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every processor
_ASK_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""By version; later ones have 16."""
_TCP, _SCOPES = 3, 3
"""TCP's bind and connect, since version 4; abstract sockets and signals, since version 6."""
_PR_SET_CHILD_SUBREAPER = 36


class Landlock:
    """Walls (see ``isolation.py``) around each program alone; its supervisor is an ordinary process without rights."""

    def become_supervisor(self, libraries: Sequence[str], for_supervisor: Sequence[int]) -> None:
        """Make this process the supervisor.

        Raises:
            OSError: the system does not allow it; names the call.
        """
        os.setsid()
        os.chdir("/")
        drop_privileges(is_nobody=False)  # nobody may be unable to read the interpreter
        die_with_parent()
        set_process(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")
        self._supervisor = os.getpid()
        self._children = Path(f"/proc/self/task/{self._supervisor}/children")
        try:
            self._children.read_bytes()
        except OSError as error:
            raise OSError(error.errno, f"reading {self._children}: {error.strerror}") from None
        self._ruleset = _make_ruleset(libraries)

    def isolate_program(self) -> None:
        """Enter the domain, in a process group that signals to the group do not leave."""
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != self._supervisor:
            os._exit(1)
        check_libc_result(libc.syscall(_RESTRICT_SELF, self._ruleset, 0), "landlock_restrict_self")

    def kill_remaining_processes(self) -> None:
        """Kill all children until there are none: what a program leaves becomes a child of this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in self._children.read_text(encoding="ascii").split():
                    os.kill(int(pid), signal.SIGKILL)
                os.wait()


def _make_ruleset(libraries: Sequence[str]) -> int:
    """Rules that allow to read these folders, but not the packages that are installed in them."""
    version = check_libc_result(libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION), "landlock_create_ruleset")
    rights = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    handled = (ctypes.c_uint64 * 3)(rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = check_libc_result(libc.syscall(_CREATE_RULESET, handled, 24, 0), "landlock_create_ruleset")
    for library in libraries:
        _allow(ruleset, library, _READ_DIR)
        for entry in os.scandir(library):
            if entry.name not in ("site-packages", "dist-packages"):
                with contextlib.suppress(FileNotFoundError):  # a link to nowhere
                    _allow(ruleset, entry.path, _READ_FILE)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, fd)
    check_libc_result(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
    os.close(fd)
