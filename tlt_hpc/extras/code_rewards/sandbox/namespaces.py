"""The isolation of a sandbox: namespaces, an empty read-only root, and no privileges.

Linux only. Works for root, without a user namespace if that is allowed, and for every user to whom the kernel allows
user namespaces. Each refusal names the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tlt_hpc.extras.code_rewards.sandbox.privileges import (
    become_nobody,
    check_libc_result,
    die_with_parent,
    drop_privileges,
    libc,
)

SCRATCH = "/tmp"
"""The only folder that can be written to, in memory."""
_SCRATCH_OPTIONS = b"size=64m,nr_inodes=4096,mode=1777"
_COVERED = "/tmp"
"""Any folder that every machine has: in the new mount namespace the new root is put together on it."""
_NOBODY = 65534

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_WALLS = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _NOATIME, _NODIRATIME, _BIND, _REC, _PRIVATE, _RELATIME = (
    1, 2, 4, 8, 32, 1024, 2048, 4096, 16384, 1 << 18, 1 << 21,
)  # fmt: skip
_KEPT = {os.ST_NOEXEC: _NOEXEC, os.ST_NOATIME: _NOATIME, os.ST_NODIRATIME: _NODIRATIME, os.ST_RELATIME: _RELATIME}
"""Flags of a mount that a user namespace may not take off when it adds "read-only"."""
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


class Namespaces:
    """Walls (see ``isolation.py``) around the supervisor too, which is process 1 of its namespace."""

    def become_supervisor(self, libraries: Sequence[str], for_supervisor: Sequence[int]) -> None:
        """Fork the supervisor in new namespaces, and wait for its end.

        Raises:
            OSError: the system does not allow it; names the call.
        """
        is_root = unshare()
        die_with_parent()
        pid = os.fork()
        if pid:
            for fd in for_supervisor:
                os.close(fd)
            os.waitpid(pid, 0)  # then all inside has ended, and with this process the stream that outside reads
            os._exit(0)
        os.setsid()  # kill(0, ...) reaches all of a process group, in other namespaces too
        change_root(libraries)
        drop_privileges(is_root)
        die_with_parent()

    def isolate_program(self) -> None:
        """Do nothing: a process that the supervisor forks is isolated already."""

    def kill_remaining_processes(self) -> None:
        """Kill all processes but this one: this namespace has no others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def unshare() -> bool:
    """Leave the host's namespaces; children are in new process namespaces.

    Returns:
        Whether this process is root without a user namespace, who can read a Python that is root's alone.

    Raises:
        OSError: the system does not allow it; names the call.
    """
    if os.geteuid() == 0:
        if libc.unshare(_WALLS) == 0:
            return True
        with contextlib.suppress(PermissionError):  # a root without rights is like any user
            become_nobody()
    uid, gid = os.geteuid(), os.getegid()
    check_libc_result(libc.unshare(_NEWUSER | _WALLS), "unshare(user, mount, process, network and IPC namespaces)")
    _write_proc_file("/proc/self/setgroups", "deny")
    _write_proc_file("/proc/self/uid_map", f"{_NOBODY} {uid} 1")
    _write_proc_file("/proc/self/gid_map", f"{_NOBODY} {gid} 1")
    return False


def change_root(paths: Sequence[str]) -> None:
    """Make an empty read-only root with nothing in it but these folders, read-only, and the scratch folder; go there.

    Raises:
        OSError: a mount is refused; names it.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    # taken before the new root covers them
    folders = {path: os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in paths}
    _mount("tmpfs", _COVERED, "tmpfs", _NOSUID | _NODEV, b"size=1m,mode=755")
    outermost = [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]
    for path in outermost:
        _bind(folders[path], _COVERED + path)
        for packages in ("site-packages", "dist-packages"):
            if Path(_COVERED + path, packages).is_dir():
                _mount("tmpfs", f"{_COVERED}{path}/{packages}", "tmpfs", _RDONLY | _NOSUID | _NODEV, b"size=4k")
    scratch = _COVERED + SCRATCH
    Path(scratch).mkdir()
    _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, _SCRATCH_OPTIONS)
    for fd in folders.values():
        os.close(fd)
    os.chdir(_COVERED)
    number = _PIVOT_ROOT[os.uname().machine]
    check_libc_result(libc.syscall(number, b".", b"."), "pivot_root")
    check_libc_result(libc.umount2(b".", _DETACH), "umount2 of the old root")
    os.chdir("/")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(SCRATCH)


def _bind(fd: int, target: str) -> None:
    """Show a folder read-only at another place."""
    flags = os.fstatvfs(fd).f_flag
    kept = sum(mount_flag for flag, mount_flag in _KEPT.items() if flags & flag)
    Path(target).mkdir(parents=True)
    _mount(f"/proc/self/fd/{fd}", target, None, _BIND)
    _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    check_libc_result(libc.mount(*words, ctypes.c_ulong(flags), options), f"mount of {target}")


def _write_proc_file(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="ascii")
    except OSError as error:
        raise OSError(error.errno, f"writing {path}: {error.strerror}") from None
